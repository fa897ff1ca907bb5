"""An event loop in a thread of its own, in which a client's connections live: so that one client serves any number of
threads and event loops."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from fastgen.errors import EngineClosedError

__all__ = ["Background"]

EXIT_SECONDS = 5.0
"""How long a leaving interpreter waits for the connections of a client nobody closed."""

CLOSED = "the client was closed"

T = TypeVar("T")


class Background:
    """Starts its thread with the first work. Every method may be called from any thread."""

    def __init__(self, at_end: Callable[[], Awaitable[None]]) -> None:
        """``at_end``: awaited in the loop before it stops."""
        self._at_end = at_end
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` in the loop. Cancelling the future cancels it.

        Raises:
            EngineClosedError: the client was closed, or this process is a fork of the one that made it.
        """
        try:
            if os.getpid() != self._process:
                raise EngineClosedError("this process was forked after the client was made; make one here")
            with self._lock:
                if self._closed:
                    raise EngineClosedError(CLOSED)
                return asyncio.run_coroutine_threadsafe(work, self._running())
        except BaseException:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, waited for. Whatever ends the wait early, Ctrl-C too, cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except CancelledError:
            raise EngineClosedError(CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for another event loop. Cancelling the wait cancels it."""
        future = self.start(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed and not _cancelling():
                raise EngineClosedError(CLOSED) from None
            raise

    def close(self, timeout: float | None = None) -> None:
        """Cancel what runs, and wait for the loop's end. Closing twice is harmless."""
        thread = self.stop()
        if thread is not None and thread is not threading.current_thread() and os.getpid() == self._process:
            thread.join(timeout)

    def stop(self) -> threading.Thread | None:
        """The same, without waiting. Also for finalisers, which may run anywhere, the lock held: so there is none."""
        self._closed = True
        loop, thread = self._loop, self._thread
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(loop.stop)
            except RuntimeError:  # it has just been closed
                return thread
        return thread

    def _running(self) -> asyncio.AbstractEventLoop:
        """With the lock."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_main, args=(self._loop, self._at_end), name="fastgen-client")
            self._thread.daemon = True
            self._thread.start()
            _live.add(self)
        return self._loop


def _main(loop: asyncio.AbstractEventLoop, at_end: Callable[[], Awaitable[None]]) -> None:
    """The thread. It knows the loop and not the client, which may be dropped."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_wind_up(at_end))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _wind_up(at_end: Callable[[], Awaitable[None]]) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await at_end()


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_live: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for background in list(_live):
        background.stop()
    for background in list(_live):
        background.close(EXIT_SECONDS)
