"""What clients get: OpenAI's objects. Fields that are ``UNSET`` are left out; they are fastgen's own."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

__all__ = [
    "Chat",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatLogprobs",
    "ChatToken",
    "ChatTop",
    "Choice",
    "Completion",
    "Delta",
    "FunctionCall",
    "FunctionDelta",
    "Logprobs",
    "Message",
    "Model",
    "ModelList",
    "PromptTokensDetails",
    "PromptTop",
    "TextChunk",
    "TokenIds",
    "TokenText",
    "ToolCall",
    "ToolCallDelta",
    "UsageBody",
]

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
Index: TypeAlias = Annotated[int, Meta(ge=0)]


class PromptTokensDetails(Struct):
    cached_tokens: Index


class UsageBody(Struct):
    prompt_tokens: Index
    completion_tokens: Index
    total_tokens: Index
    prompt_tokens_details: PromptTokensDetails


class PromptTop(Struct):
    """A token that might have stood at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptTop] | None]
"""By token id, for each token of the prompt; the first has none."""


# ---- completions -----------------------------------------------------------------------------------------------------


class Logprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where in the choice's text each token begins."""


class Choice(Struct, kw_only=True):
    """Of a whole completion."""

    index: Index
    text: str
    logprobs: Logprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | UnsetType | None = UNSET
    """The stop string or token id that ended it, where one did."""
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class Completion(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody
    system_fingerprint: str


class TextChunkChoice(Struct, kw_only=True):
    index: Index
    text: str
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class TextChunk(Struct, kw_only=True):
    """An event of a completion's stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChunkChoice]
    system_fingerprint: str
    usage: UsageBody | UnsetType | None = UNSET


# ---- chats -----------------------------------------------------------------------------------------------------------


class ChatTop(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    """Of a part of a character, too; ``null`` where the tokenizer does not tell."""
    top_logprobs: list[ChatTop]


class ChatLogprobs(Struct):
    content: list[ChatToken]
    refusal: None = None


class FunctionCall(Struct):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: Index
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class Chat(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    system_fingerprint: str


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, kw_only=True):
    index: Index
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: Index
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class ChatChunk(Struct, kw_only=True):
    """An event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: UsageBody | UnsetType | None = UNSET


# ---- models and tokens -----------------------------------------------------------------------------------------------


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "fastgen"
    root: str
    """The model, as it was loaded."""
    parent: str | None = None
    """For a LoRA adapter: the model it changes."""
    max_model_len: int
    """Most tokens of prompt and answer."""


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenIds(Struct):
    count: Index
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenText(Struct):
    prompt: str
