"""Keeps the event loop free: work whose time grows with a request or an answer is done in a thread once that is large.

Small work stays where it is: a thread costs some 100 us, and everybody waits for what is done in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastgen.types import Chunk, Completion, Response, TokenLogprob
from fastgen.wire.requests import PromptLogprobs, StreamStart

__all__ = ["LARGE_BYTES", "LARGE_ENTRIES", "aside", "weight"]

T = TypeVar("T")

LARGE_BYTES = 2**16
"""Of a request's body."""
LARGE_ENTRIES = 2000
"""Of an answer: tokens and log-probabilities."""


async def aside(large: bool, function: Callable[[], T]) -> T:
    """What ``function`` gives, called in a thread if it has much to do. Threads are not cancelled: they end."""
    return await asyncio.to_thread(function) if large else function()


def weight(told: Response | Completion | Chunk | StreamStart | PromptLogprobs | list[TokenLogprob | None]) -> int:
    """Tokens and log-probabilities that an answer, or a piece of one, holds."""
    match told:
        case Response():
            prompt = len(told.prompt_token_ids) + _entries(told.prompt_logprobs)
            return prompt + sum(map(weight, told.choices))
        case StreamStart():
            return len(told.prompt_token_ids)
        case PromptLogprobs():
            return _entries(told.prompt_logprobs)
        case list():
            return _entries(told)
        case _:
            return len(told.token_ids) + _entries(told.logprobs)


def _entries(logprobs: Sequence[TokenLogprob | None] | None) -> int:
    if not logprobs:
        return 0
    last = logprobs[-1]  # all have as many beside them, but for a prompt's first, which has none
    return len(logprobs) * (1 if last is None else 1 + len(last.top))
