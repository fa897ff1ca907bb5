"""Between fastgen's own types and JSON, for HTTP, both ways.

Names are those of the Python classes. JSON has no numbers that are not finite: a log-probability of ``-inf`` (a token
that cannot come) is ``null``, and read back as ``-inf``; ``null`` stands for nothing else there. (Log-probabilities are
never NaN: a request whose logits are ends with an error.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from fastgen.types import Chunk, Completion, Response, TokenLogprob, Usage
from fastgen.wire.info import ModelInfo
from fastgen.wire.requests import ChatPrompt, GenerateRequest, PromptLogprobs, StreamEvent, StreamStart, json_text

__all__ = ["encode", "read_event", "read_model_info", "read_response", "request_document"]

_encoder = msgspec.json.Encoder()  # writes floats that are not finite as null


def encode(answer: Response | StreamEvent | ModelInfo) -> bytes:
    """Every field, in its class's order."""
    try:
        return _encoder.encode(answer)
    except UnicodeEncodeError:  # a plugin's error may say anything
        return _encoder.encode(_clean(answer))


def request_document(request: GenerateRequest, *, stream: bool) -> bytes:
    """The body of a request.

    Raises:
        InvalidRequestError: something in it JSON has no form for; names the field.
    """
    given = request.params.model_dump(exclude_unset=True, exclude_none=True)
    parts = {"params": "{" + ",".join(f'"{name}":{json_text(value, name)}' for name, value in given.items()) + "}"}
    if request.model is not None:
        parts["model"] = json_text(request.model, "model")
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt):
        for name in ChatPrompt.__dataclass_fields__:
            value = getattr(prompt, name)
            if value is not None:
                parts[name] = json_text(value, name)
    else:
        name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        parts[name] = json_text(prompt, name)
    parts["stream"] = json_text(stream, "stream")
    return ("{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}").encode()


def read_response(data: bytes) -> Response:
    """
    Raises:
        ValueError: it is none.
    """
    found = _object(data)
    try:
        return Response(
            request_id=found["request_id"],
            prompt_token_ids=found["prompt_token_ids"],
            choices=[
                Completion(**{**choice, "logprobs": _logprobs(choice["logprobs"])}) for choice in found["choices"]
            ],
            usage=Usage(**found["usage"]),
            prompt=found["prompt"],
            prompt_logprobs=_logprobs(found["prompt_logprobs"]),
        )
    except (KeyError, TypeError) as error:
        raise _unlike("a response", error) from None


def read_event(data: bytes) -> StreamEvent:
    """One event of a stream.

    Raises:
        ValueError: it is none.
    """
    found = _object(data)
    try:
        if "prompt_token_ids" in found:
            return StreamStart(**found)
        if "prompt_logprobs" in found:
            return PromptLogprobs(_logprobs(found["prompt_logprobs"]))
        usage = found["usage"]
        return Chunk(
            **{
                **found,
                "logprobs": _logprobs(found["logprobs"]),
                "usage": None if usage is None else Usage(**usage),
            }
        )
    except (KeyError, TypeError) as error:
        raise _unlike("an event", error) from None


def read_model_info(data: bytes) -> ModelInfo:
    """
    Raises:
        ValueError: it is none.
    """
    return msgspec.json.decode(data, type=ModelInfo)  # msgspec's errors are ValueErrors


def _clean(answer: Any) -> Any:
    if isinstance(answer, Response):
        return replace(answer, choices=[_clean(choice) for choice in answer.choices])
    if isinstance(answer, Chunk | Completion) and answer.error is not None:
        return replace(answer, error=answer.error.encode("utf-8", "replace").decode())
    return answer


def _object(data: bytes) -> dict[str, Any]:
    return msgspec.json.decode(data, type=dict[str, Any])


def _logprobs(entries: list[Any] | None) -> Any:
    return None if entries is None else [None if entry is None else _logprob(entry) for entry in entries]


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    logprob = entry["logprob"]
    return TokenLogprob(
        token_id=entry["token_id"],
        logprob=-math.inf if logprob is None else logprob,
        rank=entry["rank"],
        token=entry["token"],
        top=tuple(_logprob(other) for other in entry["top"]),
    )


def _unlike(what: str, error: Exception) -> ValueError:
    return ValueError(f"this is not {what} as this version of fastgen knows it: {error}")
