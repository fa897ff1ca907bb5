"""From the engine's thread into a caller's event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from fastgen.core.loop import CallerGone

__all__ = ["AsyncInbox", "Doorbell"]

E = TypeVar("E")


class Doorbell:
    """Calls from other threads into one event loop. Waking a loop is a system call, and a step may have something for
    hundreds of tasks: the loop is woken once for all that is there when it gets to look."""

    # Calls hold tasks, and tasks their loop. So its doorbell is kept by those who may ring it, and by a loop that has
    # been rung until it has looked: one that is closed before that takes its calls with it.
    _of_loops: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[Doorbell]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = weakref.ref(events)
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._rung = False

    @classmethod
    def here(cls) -> Doorbell:
        """The running event loop's."""
        events = asyncio.get_running_loop()
        known = cls._of_loops.get(events)
        found = None if known is None else known()
        if found is None:
            found = cls(events)
            cls._of_loops[events] = weakref.ref(found)
        return found

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Have the event loop call ``function(*args)`` soon, in the order of these calls.

        Raises:
            CallerGone: the event loop is closed, as ``asyncio.run`` leaves it: whoever waited there is no more.
        """
        events = self._events()
        if events is None or events.is_closed():  # asked for each call: one that has been rung may close unheard
            self._calls.clear()
            raise CallerGone("Event loop is closed")
        self._calls.append((function, args))
        if not self._rung:
            self._rung = True
            try:
                events.call_soon_threadsafe(self._answer)
            except RuntimeError as error:
                if not events.is_closed():
                    raise
                raise CallerGone(str(error)) from error

    def _answer(self) -> None:
        """In the event loop."""
        events = asyncio.get_running_loop()
        self._rung = False  # before looking: what comes from here on rings anew
        while self._calls:
            function, args = self._calls.popleft()
            events.call_soon(function, *args)  # not at once: if one raises, the others must still come


class AsyncInbox(Generic[E]):
    """A queue from one thread to one task of an event loop. The task is woken once, however many events come before
    it runs."""

    def __init__(self) -> None:
        self._doorbell = Doorbell.here()
        self._events: deque[E] = deque()
        self._ready = asyncio.Event()
        self._woken = False

    def put(self, event: E) -> None:
        """In the engine's thread."""
        self._events.append(event)
        if not self._woken:
            self._woken = True
            self._doorbell.call(self._ready.set)

    async def get(self) -> E:
        """The next event, in the task."""
        await self._come()
        return self._events.popleft()

    async def get_all(self) -> list[E]:
        """All that is there, at least one, in the task."""
        await self._come()
        return [self._events.popleft() for _ in range(len(self._events))]

    async def _come(self) -> None:
        while not self._events:
            await self._ready.wait()
            self._ready.clear()
            self._woken = False  # before looking again: what is put from here on wakes anew
