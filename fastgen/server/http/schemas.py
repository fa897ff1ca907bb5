"""What clients may send: OpenAI's fields, and fastgen's beside them.

``null`` is the same as leaving a field out. A field left out takes the model's ``generation_config.json``, then
fastgen's default, exactly as in ``fastgen.pipeline``: so an unset ``temperature`` is not OpenAI's 1 but the model's
own, and an unset ``max_tokens`` not 16 but what a pipeline generates. Unknown fields are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fastgen.server.http.messages import read_message
from fastgen.types import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS

__all__ = [
    "ChatMessages",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Prompts",
    "Sampled",
    "StreamOptions",
    "TokenizeRequest",
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _prompts(value: Any) -> Any:
    """``str``, ``list[str]``, ``list[int]`` or ``list[list[int]]``; looked through here, as a union's errors would name
    each of its members."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("is empty; give at least one prompt")
    kinds = set(map(type, value))
    if kinds == {str} or kinds == {int}:
        return value
    if kinds == {list}:
        for index, ids in enumerate(value):
            if not ids or set(map(type, ids)) != {int}:
                raise ValueError(f"prompt {index} (the first is 0) must be a list of token ids that is not empty")
        return value
    raise ValueError("must be all strings, all token ids or all lists of token ids")


_TOKEN_ID = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
Prompts: TypeAlias = Annotated[
    Any,
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]


def _strings(value: Any) -> Any:
    value = [value] if isinstance(value, str) else value
    if value is not None and (not isinstance(value, list) or not all(isinstance(one, str) for one in value)):
        raise ValueError("must be a string or a list of strings")
    if value and len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(value)} stop strings given, at most {MAX_STOP_STRINGS} are allowed")
    if value and "" in value:
        raise ValueError("an empty stop string would end every answer at once; leave it out")
    return value


_STOP = {"type": "string", "minLength": 1}
StopStrings: TypeAlias = Annotated[
    Annotated[list[str], Field(fail_fast=True)] | None,
    BeforeValidator(_strings),
    WithJsonSchema(
        {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]}
    ),
]


def _bias(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for key in value:
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or str(int(key)) != key:
            raise ValueError(f"the key {key[:20]!r} is no token id")
    return value


LogitBias: TypeAlias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None,
    BeforeValidator(_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                {"type": "null"},
            ]
        }
    ),
]

Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
TokenIds: TypeAlias = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
"""Long lists fail at their first wrong entry: a million errors would be made to tell one."""
Logprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _part(kinds: list[str], text: str) -> dict[str, Any]:
    properties = {"type": {"enum": kinds}, text: {"type": "string"}}
    return {"type": "object", "properties": properties, "required": ["type", text]}


_PARTS = {"anyOf": [_part(["text", "input_text"], "text"), _part(["refusal"], "refusal")]}
_CONTENT = [{"type": "string"}, {"type": "array", "items": _PARTS}]
_NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_CALL = {"type": "object", "properties": {"function": _NAMED}, "required": ["function"]}
_CALLS = {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]}
_SPEAKERS = ["system", "developer", "user", "tool"]
Messages: TypeAlias = Annotated[
    list[dict[str, Any]],
    Field(fail_fast=True),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {
                            "role": {"enum": _SPEAKERS},
                            "content": {"anyOf": _CONTENT},
                            "tool_calls": _CALLS,
                        },
                        "required": ["role", "content"],
                    },
                    {
                        "type": "object",
                        "properties": {
                            "role": {"type": "string", "minLength": 1, "not": {"enum": _SPEAKERS}},
                            "content": {"anyOf": [*_CONTENT, {"type": "null"}]},
                            "tool_calls": _CALLS,
                        },
                        "required": ["role"],
                    },
                ]
            },
        }
    ),
]
"""Text, in one string or in parts."""

_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
        "parameters": {
            "anyOf": [{"type": "object", "properties": {"type": {"const": "object"}}}, {"type": "null"}],
        },
    },
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
ToolList: TypeAlias = Annotated[
    Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None,
    WithJsonSchema({"anyOf": [{"type": "array", "items": _TOOL, "maxItems": 128}, {"type": "null"}]}),
]


def _truth(value: Any) -> Any:
    if value is not None and not isinstance(value, bool):
        raise ValueError("must be false")
    return value


Off: TypeAlias = Annotated[Literal[False], BeforeValidator(_truth)]
"""0 equals it, and is none."""


class StreamOptions(Strict):
    include_usage: bool | None = Field(default=None, description="A last chunk without choices tells the usage.")
    include_obfuscation: Off | None = Field(default=None, description="There is none here.")
    continuous_usage_stats: Off | None = Field(default=None, description="Usage comes once, at the end.")


class Meaningless(Strict):
    """Fields of OpenAI's that mean nothing here. They are accepted, at the values that change nothing."""

    user: str | None = None
    store: Off | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None


class Sampled(Meaningless):
    """What completions and chats share."""

    model: str | None = Field(default=None, description="A name of the model, or of a LoRA adapter to answer with.")
    n: int | None = Field(default=None, ge=1, le=MAX_N, description="Choices for each prompt.")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Another name for max_tokens.")
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="0 picks the best token.")
    top_p: Share | None = Field(default=None, description="0: the best token only.")
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="Makes the answer repeatable.")
    stop: StopStrings = Field(default=None, description="Strings that end the answer; cut from it.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # fastgen's own, and other servers' names for them
    top_k: int | None = Field(default=None, ge=-1, description="0 or -1 is off.")
    min_p: Share | None = None
    repetition_penalty: float | None = Field(default=None, ge=0.001, le=1000)
    min_tokens: int | None = Field(default=None, ge=0, description="No end token before this many.")
    min_new_tokens: int | None = Field(default=None, ge=0, description="Another name for min_tokens.")
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Logprobs | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31, description="Higher runs first.")
    cache_salt: str | None = None
    return_token_ids: bool | None = Field(default=None, description="Tell the token ids of prompt and answer, too.")
    logits_processors: dict[str, Any] | None = Field(default=None, description="Of plugins, by name, with options.")

    # structured output
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = Field(default=None, description="As vLLM has it.")
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "stream_options is for streams; set stream to true, or leave it out")
        names = ("min_tokens", "min_new_tokens")
        if all(getattr(self, name) is not None for name in names):
            raise _wrong(names[0], f"{names[0]} and {names[1]} are two names for one thing; give one of them")
        return self


class CompletionRequest(Sampled):
    """Go on with a text."""

    prompt: Prompts = Field(description="Text, or token ids; one or several.")
    max_tokens: int | None = Field(default=None, ge=0, description="0, with echo: score the prompt only.")
    best_of: int | None = Field(default=None, description="Must equal n: nothing is ranked.")
    echo: bool | None = Field(default=None, description="Begin the answer with the prompt.")
    suffix: Literal[""] | None = Field(default=None, description="Text cannot be filled in here.")
    logprobs: Logprobs | None = Field(default=None, description="Of the chosen and this many best tokens.")

    @field_validator("suffix", mode="before")
    @classmethod
    def _no_suffix(cls, value: Any) -> Any:
        if value:
            raise ValueError("no model here fills in text before a suffix; leave it out")
        return value

    @model_validator(mode="after")
    def _completion(self) -> Self:
        _one_length(self.max_tokens, self.max_completion_tokens)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _wrong(
                "best_of", f"best_of is {self.best_of} and n {self.n or 1}; nothing is ranked here: let them be equal"
            )
        if self.max_tokens == 0 and not self.echo:
            raise _wrong(
                "max_tokens", "max_tokens is 0, which only scores the prompt; set echo to true, or ask for tokens"
            )
        return self


class ChatMessages(Strict):
    """A conversation, and how the model's template makes a prompt of it."""

    messages: Messages = Field(min_length=1)
    tools: ToolList = None
    chat_template: str | None = Field(default=None, description="The name of one of the model's templates.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="What else the template reads.")
    add_generation_prompt: bool | None = Field(default=None, description="Open the assistant's answer.")
    continue_final_message: bool | None = Field(default=None, description="Go on with the last message.")

    @field_validator("messages")
    @classmethod
    def _messages(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        return None if value is None else [read_message(one, index) for index, one in enumerate(value)]


class ChatRequest(ChatMessages, Sampled):
    """Answer a conversation."""

    max_tokens: int | None = Field(default=None, ge=1, description="Unset: the model's own, else what fits.")
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # meaningless, as above
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    reasoning_effort: None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    function_call: Literal["none"] | None = None
    functions: None = None

    @field_validator("functions", mode="before")
    @classmethod
    def _no_functions(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("functions was replaced by tools; send tools")
        return None

    @model_validator(mode="after")
    def _chat(self) -> Self:
        _one_length(self.max_tokens, self.max_completion_tokens)
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "top_logprobs needs logprobs: true beside it")
        return self


class TokenizeRequest(ChatMessages):
    """Text or a conversation, to be told its token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = Field(default=None, min_length=1)  # type: ignore[assignment]
    add_special_tokens: bool | None = Field(default=None, description="Unset: for a prompt, not for a conversation.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "give prompt or messages, one of the two")
        for name in ChatMessages.model_fields if self.prompt is not None else ():
            if getattr(self, name) is not None:
                raise _wrong(name, f"{name} goes with messages, and this is a prompt")
        return self


class DetokenizeRequest(Strict):
    """Token ids, to be told their text."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = Field(default=None, description="Unset: they are written out.")


def _wrong(field: str, text: str) -> PydanticCustomError:
    """Of a field in the light of others."""
    return PydanticCustomError("field_error", "{text}", {"text": text, "field": field})


def _one_length(most: int | None, other_name: int | None) -> None:
    if most is not None and other_name is not None and most != other_name:
        text = f"max_tokens is {most} and max_completion_tokens {other_name}: two names for one thing"
        raise _wrong("max_completion_tokens", text)
