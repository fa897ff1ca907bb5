"""From the engine's thread into a caller's event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from fastgen.core.loop import CallerGone

__all__ = ["Doorbell"]


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
