"""One request of fastgen's own API, gRPC or HTTP, and the events of a streamed answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fastgen.errors import InvalidRequestError
from fastgen.types import Chunk, Message, SamplingParams, TokenLogprob
from fastgen.wire.strict_json import read_json

__all__ = ["ChatPrompt", "GenerateRequest", "PromptLogprobs", "StreamEvent", "StreamStart", "json_text", "json_value"]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation and how to render it; as the arguments of ``Pipeline.chat``."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template: str | None = None
    template_variables: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and how to go on from it."""

    prompt: str | list[int] | ChatPrompt
    """Text, token ids, or a conversation."""
    params: SamplingParams = field(default_factory=SamplingParams)
    model: str | None = None
    """A name the server knows the model by, or a LoRA adapter's. ``None``: the model."""


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The request was accepted, and what was made of its prompt: with it and what follows, a caller can build the whole
    ``Response``."""

    request_id: str
    prompt_token_ids: list[int]
    prompt: str | None = None
    n: int = 1
    """Choices that will be generated."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of a streamed answer whose request asked for them, before the first chunk."""

    prompt_logprobs: list[TokenLogprob | None]


StreamEvent: TypeAlias = StreamStart | PromptLogprobs | Chunk


def json_text(value: object, field: str) -> str:
    """``value`` as JSON.

    Raises:
        InvalidRequestError: it holds what JSON has no form for: an object of some class, a number that is not finite,
            text that is no valid Unicode; names ``field``.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} must be made of what JSON can hold: {error}", field=field) from None
    return text


def json_value(text: str, field: str, kind: type[Any]) -> Any:
    """What ``json_text`` wrote, or somebody else: ``kind`` is ``list`` or ``dict``.

    Raises:
        InvalidRequestError: it is no JSON as the standard has it, of another kind, or too deep; names ``field``.
    """
    try:
        value = read_json(text)
    except ValueError as error:
        raise InvalidRequestError(f"{field} must be JSON text that can be used: {error}", field=field) from None
    if not isinstance(value, kind):
        what = "a list" if kind is list else "an object"
        raise InvalidRequestError(f"{field} must be {what} as JSON text, got {type(value).__name__}", field=field)
    return value
