"""What all answers to one request begin with, and what completions and chats do alike."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from fastgen.server.http.answers import PromptTokensDetails, UsageBody
from fastgen.server.http.logprobs import prompt_logprobs
from fastgen.server.http.middleware import request_id_of
from fastgen.server.http.models import name_of
from fastgen.server.http.schemas import Sampled
from fastgen.server.service import Service
from fastgen.types import TokenLogprob, Usage

__all__ = ["Head", "extras", "head_of", "json_response", "usage_body"]


@dataclass(frozen=True, slots=True)
class Head:
    """Equal in all events of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def head_of(request: Request, service: Service, prefix: str, model: str | None) -> Head:
    """
    Raises:
        UnknownModelError: there is no such model.
    """
    name = name_of(service, model)
    return Head(f"{prefix}-{request_id_of(request.scope)}", int(time.time()), name, _fingerprint(service))


def extras(
    body: Sampled,
    *,
    token_ids: list[int],
    first: bool,
    prompt_token_ids: list[int],
    prompt_entries: list[TokenLogprob | None] | None,
    choice: int,
) -> dict[str, Any]:
    """fastgen's own fields of a choice, or of a piece of one, as far as they were asked for.

    Args:
        first: whether it is the choice's beginning, which tells of the prompt.
        choice: which one of its prompt's. The first alone tells the log-probabilities of the prompt: they are large.
    """
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields["token_ids"] = token_ids
        if first:
            fields["prompt_token_ids"] = prompt_token_ids
    if body.prompt_logprobs is not None and first and choice == 0:
        fields["prompt_logprobs"] = prompt_logprobs(prompt_entries)
    return fields


def stop_reason(stop: str | int | None) -> Any:
    return UNSET if stop is None else stop


def usage_body(usages: Iterable[Usage], *, scored_only: bool = False) -> UsageBody:
    """The sum. ``scored_only``: no token was asked for, and the one that came is not counted."""
    given = list(usages)
    prompt = sum(usage.prompt_tokens for usage in given)
    completion = 0 if scored_only else sum(usage.completion_tokens for usage in given)
    cached = sum(usage.cached_tokens for usage in given)
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def json_response(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _fingerprint(service: Service) -> str:
    """Changes with whatever may change the answer to the same seed."""
    info = service.info
    what = (info.name, info.architecture, info.dtype, info.quantization, info.vocab_size, info.version)
    return f"fastgen-{info.version}-{hashlib.sha256(repr(what).encode()).hexdigest()[:8]}"
