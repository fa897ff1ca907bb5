"""From a client's fields to ``SamplingParams``, and from errors about these back to the client's names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastgen.errors import InvalidRequestError
from fastgen.server.http.schemas import ChatRequest, CompletionRequest, Sampled
from fastgen.types import SamplingParams

__all__ = ["chat_params", "completion_params", "in_clients_words"]

_SAME = [
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "add_special_tokens"),
    *("prompt_logprobs", "priority", "cache_salt", "logits_processors"),
]

_PLAIN = {
    "prompt_token_ids": "prompt",
    "prompts": "prompt",
    "include_stop": "include_stop_str_in_output",
    "template": "chat_template",
    "template_variables": "chat_template_kwargs",
    "lora": "model",
}


def completion_params(body: CompletionRequest, lora: str | None) -> SamplingParams:
    """
    Raises:
        InvalidRequestError: a value that no request can have.
    """
    fields = _fields(body, lora)
    most = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    if most is not None:
        fields["max_new_tokens"] = max(most, 1)  # 0 scores the prompt: the token that comes with it is dropped
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            fields["prompt_logprobs"] = body.logprobs
    return SamplingParams(**fields)


def chat_params(body: ChatRequest, lora: str | None) -> SamplingParams:
    """As ``completion_params``."""
    fields = _fields(body, lora)
    most = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    if most is not None:
        fields["max_new_tokens"] = most
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return SamplingParams(**fields)


@contextmanager
def in_clients_words(body: Sampled) -> Iterator[None]:
    """Errors about sampling parameters say the names that the client used."""
    try:
        yield
    except InvalidRequestError as error:
        names = {
            **_PLAIN,
            "max_new_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
            "min_new_tokens": "min_tokens" if body.min_new_tokens is None else "min_new_tokens",
        }
        if body.prompt_logprobs is None and isinstance(body, CompletionRequest):
            names["prompt_logprobs"] = "logprobs"  # with echo
        if isinstance(body, ChatRequest):
            names["logprobs"] = "top_logprobs"
        pattern = r"\b(" + "|".join(name for name in names if "_" in name) + r")\b"
        text = re.sub(pattern, lambda match: names[match[1]], str(error))
        field = error.field and names.get(error.field, error.field)
        raise InvalidRequestError(text, field=field) from error


def _fields(body: Sampled, lora: str | None) -> dict[str, Any]:
    fields = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.seed is not None:
        fields["seed"] = body.seed % 2**63  # OpenAI's may be negative, fastgen's has 63 bits
    least = body.min_tokens if body.min_tokens is not None else body.min_new_tokens
    if least is not None:
        fields["min_new_tokens"] = least
    if body.include_stop_str_in_output is not None:
        fields["include_stop"] = body.include_stop_str_in_output
    if lora is not None:
        fields["lora"] = lora
    return fields
