"""The end of a server: how it is asked for, and by when it is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["MARGIN_SECONDS", "Deadline", "Stop"]

MARGIN_SECONDS = 10.0
"""All that a server may take to end beyond its ``drain_timeout``: for last events, its doors and its engines."""


class Deadline:
    """A moment by which several things in turn must be done."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` from now."""
        self._end = time.monotonic() + seconds

    def left(self, *, keep: float = 0.0) -> float:
        """Seconds until then, without the ``keep`` that what comes later needs."""
        return max(0.0, self._end - time.monotonic() - keep)


class Stop:
    """How a server is told to end: ``ask`` once to let requests in flight finish, twice to end at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        self.signal: int | None = None
        """The last one that came."""

    def ask(self, number: int | None = None) -> None:
        """In the event loop."""
        self.signal = number
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    def now(self) -> None:
        self.asked.set()
        self.at_once.set()

    @contextmanager
    def on_signals(self, numbers: Sequence[int]) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self.ask, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
