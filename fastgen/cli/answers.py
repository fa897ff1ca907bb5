"""Answers gathered from chunks, finished or cut short, and how they are shown."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from fastgen.cli.prompts import Job
from fastgen.types import Chunk, TokenLogprob, Usage

__all__ = ["Answer", "json_line", "text_block"]


@dataclass(slots=True)
class ChoiceSoFar:
    """One choice, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class Answer:
    """All choices of one job."""

    index: int
    job: Job
    choices: list[ChoiceSoFar] = field(default_factory=list)
    usage: Usage | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __post_init__(self) -> None:
        self.choices = [ChoiceSoFar() for _ in range(self.job.params.n)]

    def add(self, chunk: Chunk) -> None:
        choice = self.choices[chunk.index]
        choice.text += chunk.text
        choice.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            choice.logprobs = [*(choice.logprobs or []), *chunk.logprobs]
        if chunk.finish_reason is not None:
            choice.finish_reason, choice.stop, choice.error = chunk.finish_reason, chunk.stop, chunk.error
        self.usage = chunk.usage or self.usage

    @property
    def done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def started(self) -> bool:
        return any(choice.token_ids or choice.finish_reason for choice in self.choices)

    @property
    def errors(self) -> list[str]:
        return [choice.error or "unknown error" for choice in self.choices if choice.finish_reason == "error"]

    def cut_short(self) -> None:
        """What is not finished will not be."""
        for choice in self.choices:
            choice.finish_reason = choice.finish_reason or "abort"

    def heading(self, total: int) -> str:
        """The line above an answer, where there are several."""
        job = self.job
        shown = job.prompt if job.prompt is not None else str((job.messages or [{}])[-1].get("content", ""))
        if job.prompt_token_ids is not None:
            shown = f"{len(job.prompt_token_ids)} token ids"
        shown = " ".join(shown.split())
        return f"--- {self.index + 1}/{total}: {shown[:67] + '...' if len(shown) > 70 else shown}"


def text_block(answer: Answer, total: int) -> str:
    """The texts of an answer, under a heading where it is not the only one."""
    lines = [answer.heading(total)] if total > 1 else []
    for number, choice in enumerate(answer.choices, 1):
        if len(answer.choices) > 1:
            lines.append(f"[choice {number}]")
        lines.append(choice.text)
        if choice.finish_reason == "error":
            lines.append(f"(failed: {choice.error})")
        elif choice.finish_reason == "abort":
            lines.append("(interrupted)")
    return "\n".join(lines)


def json_line(answer: Answer) -> str:
    """One answer as one line of JSON; never NaN or an infinity, which JSON does not have."""
    fields: dict[str, Any] = {
        "index": answer.index,
        **answer.job.given,
        "choices": [_choice(number, choice) for number, choice in enumerate(answer.choices)],
        "usage": None,
    }
    if answer.usage is not None:
        usage = answer.usage
        fields["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        }
    if answer.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [None if p is None else _logprob(p) for p in answer.prompt_logprobs]
    return json.dumps(fields, ensure_ascii=False, allow_nan=False)


def _choice(index: int, choice: ChoiceSoFar) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop": choice.stop,
    }
    if choice.logprobs is not None:
        fields["logprobs"] = [_logprob(one) for one in choice.logprobs]
    if choice.error is not None:
        fields["error"] = choice.error
    return fields


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "token_id": one.token_id,
        "token": one.token,
        "logprob": one.logprob if math.isfinite(one.logprob) else None,
        "rank": one.rank,
    }
    if one.top:
        fields["top"] = [_logprob(other) for other in one.top]
    return fields
