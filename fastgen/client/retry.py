"""Sending again what the server has not begun."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastgen.client.errors import NotBegun, RequestTimeoutError

__all__ = ["Deadline", "retrying"]

FIRST_WAIT, LONGEST_WAIT = 0.25, 8.0
"""Seconds. The wait doubles from one try to the next."""

T = TypeVar("T")


class Deadline:
    """When a call of the client must be over, all its tries together."""

    __slots__ = ("_end", "_timeout")

    def __init__(self, timeout: float | None) -> None:
        """``timeout``: seconds from now. ``None``: never."""
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """Seconds, perhaps none; ``None`` where there is no end."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def error(self) -> RequestTimeoutError:
        within = "its deadline" if self._timeout is None else f"{self._timeout:g} s (the client's timeout)"
        return RequestTimeoutError(f"the answer was not whole within {within}")


async def retrying(attempt: Callable[[], Awaitable[T]], retries: int, deadline: Deadline) -> T:
    """What ``attempt`` gives. While it raises ``NotBegun`` it is made again, at most ``retries`` times, after a wait
    that doubles and is spread at random, so that many clients do not come back at once; never earlier than the server
    asks.

    Raises:
        FastgenError: the last attempt's, as soon as there is no try left, or no time for one.
    """
    tries = 0
    while True:
        try:
            return await attempt()
        except NotBegun as refused:
            wait = min(FIRST_WAIT * 2**tries, LONGEST_WAIT) * random.uniform(0.5, 1)
            if refused.retry_after is not None:
                wait = max(wait, refused.retry_after * random.uniform(1, 1.2))
            left = deadline.left
            if tries >= retries or (left is not None and wait >= left):
                raise refused.error from None
        tries += 1
        await asyncio.sleep(wait)
