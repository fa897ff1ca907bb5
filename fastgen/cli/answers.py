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
