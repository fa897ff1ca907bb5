"""One background thread that owns an engine, for callers in many threads and event loops."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from fastgen.core.collector import Collector
from fastgen.core.delivery import CallerGone, Delivery, Running, Sink
from fastgen.core.plugin.describe import describe_error
from fastgen.errors import EngineClosedError, InvalidRequestError
from fastgen.text import Tokenizer
from fastgen.types import SamplingParams, StepOutput

__all__ = ["CallerGone", "EngineLike", "EngineLoop", "Loop", "Sink", "Submission", "in_batch"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

Command: TypeAlias = tuple[Callable[[], Any], Future[Any]]

EXIT_SECONDS = 10.0
"""How long a leaving interpreter waits for the step in flight of a loop nobody closed."""


class EngineLike(Protocol):
    """What the loop needs of ``fastgen.Engine``."""

    tokenizer: Tokenizer | None

    @property
    def has_work(self) -> bool: ...

    def add(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        chat: bool = False,
        text: bool = False,
    ) -> str: ...

    def step(self) -> list[StepOutput]: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Submission:
    """A request on its way in."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    sink: Sink
    chat: bool = False


class Loop(Protocol):
    """Whoever runs requests for a front: an engine in this process (``EngineLoop``), in another one, or several. Every
    method may be called from any thread."""

    @property
    def closed(self) -> bool:
        """Whether nothing is taken any more."""

    def new_request_id(self) -> str:
        """A name no other request of this loop has."""

    def submit(self, submissions: Sequence[Submission]) -> Future[None]:
        """Hand in requests, all or none: they run only if every one is accepted.

        The future holds ``None``, or the ``InvalidRequestError`` of the first that was refused, saying which one; or
        the ``EngineClosedError`` of an engine that went before it answered.

        Raises:
            EngineClosedError: nothing is taken any more; says why.
        """

    def abort(self, request_id: str) -> None:
        """End a request; its sink gets last chunks with reason ``abort``. One that is unknown or over is ignored."""


class EngineLoop:
    """Runs ``engine`` in a thread of its own: commands between steps, steps while there is work, sleep otherwise.

    Tokens become text, and stop strings end their choice, in this thread right after the step; so answers do not depend
    on how fast anyone reads them. The loop closes the engine at its end, whatever the end is.
    """

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._ids = itertools.count()
        # No lock anywhere: a finaliser may call abort() and stop() in the middle of any line, the loop's own too, where
        # a lock would be held by its own thread. SimpleQueue's put is made for that, and wakes a get about to sleep.
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None only wakes
        self._process = os.getpid()
        self._stopping = False
        self._end: EngineClosedError | None = None  # why nothing is taken any more
        self._delivery: Delivery[Running] = Delivery(engine.abort)
        self._requests = self._delivery.requests  # the loop's thread only
        self._thread = threading.Thread(target=self._main, name="fastgen-engine", daemon=True)
        _live.add(self)
        self._thread.start()

    # ---- any thread ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether nothing is taken any more: it was closed, or a step failed beyond repair."""
        return self._stopping or self._end is not None

    def new_request_id(self) -> str:
        """A name no other request of this loop has."""
        return f"request-{next(self._ids)}"

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Call ``function`` in the loop's thread, between steps. What it raises is its future's, and hurts no one.

        Raises:
            EngineClosedError: the loop was closed, or died; says of what. Or this process is a fork of the one with the
                loop's thread, which forks do not inherit.
        """
        if os.getpid() != self._process:
            raise EngineClosedError(
                "this process was forked after the model was loaded, and threads do not survive that; load it here"
            )
        if self.closed:
            raise EngineClosedError(str(self._end or "the engine was closed")) from self._end
        future: Future[T] = Future()
        self._commands.put((function, future))
        if self._end is not None:  # set before the loop looked for commands the last time, which may have been just now
            self._refuse_commands(self._end)
        return future

    def submit(self, submissions: Sequence[Submission]) -> Future[None]:
        """Hand in requests, all or none: they run only if every one is accepted.

        The future holds ``None``, or the ``InvalidRequestError`` of the first that was refused, saying which one.

        Raises:
            EngineClosedError: as ``run``.
        """
        return self.run(lambda: self._accept(submissions))

    def abort(self, request_id: str) -> None:
        """End a request; its sink gets last chunks with reason ``abort``. One that is unknown or over is ignored."""
        with suppress(EngineClosedError):
            self.run(lambda: self._abort(request_id))

    def stop(self) -> None:
        """Ask the loop to end after the step in flight, and do not wait."""
        self._stopping = True
        self._commands.put(None)

    def close(self, timeout: float | None = None) -> None:
        """End the loop and wait for that, at most ``timeout`` seconds. Requests in flight fail with
        ``EngineClosedError``. Closing twice is harmless."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # ---- the loop's thread -----------------------------------------------------------------------------------------

    def _main(self) -> None:
        end = EngineClosedError("the engine was closed before the request ended")
        try:
            self._serve()
        except BaseException as error:
            logger.exception("the engine stopped; every request in flight fails")
            end = EngineClosedError(f"the engine stopped on an unexpected error: {describe_error(error)}")
            end.__cause__ = error
        finally:
            self._finish(end)

    def _serve(self) -> None:
        while not self._stopping:
            self._carry_out_commands()
            if self._stopping:
                return
            if self._engine.has_work:
                self._deliver(self._engine.step())
            elif self._requests:
                raise RuntimeError(f"the engine forgot {len(self._requests)} requests")

    def _carry_out_commands(self) -> None:
        """What was asked for before now, so that no flood of commands keeps a step from coming. Sleeps while there is
        nothing to do at all. A command is taken out only when its turn comes: whatever happens, the others are there
        for ``_finish`` to refuse."""
        if not (self._engine.has_work or self._requests):
            _carry_out(self._commands.get())
        for _ in range(self._commands.qsize()):
            if self._stopping:
                return
            _carry_out(self._commands.get())

    def _accept(self, submissions: Sequence[Submission]) -> None:
        accepted: list[str] = []
        try:
            for new in submissions:
                collector = Collector(new.request_id, new.prompt_token_ids, new.params, self._engine.tokenizer)
                self._engine.add(new.prompt_token_ids, new.params, request_id=new.request_id, chat=new.chat, text=True)
                accepted.append(new.request_id)
                self._requests[new.request_id] = Running(collector, new.sink)
        except BaseException as error:
            for request_id in accepted:  # no step has run since: nothing has come of them
                del self._requests[request_id]
                self._engine.abort(request_id)
            if isinstance(error, InvalidRequestError) and len(submissions) > 1:
                raise in_batch(error, len(accepted), len(submissions)) from error
            raise

    def _abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._engine.abort(request_id)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self._delivery.deliver(output)

    def _finish(self, end: EngineClosedError) -> None:
        self._end = end
        self._refuse_commands(end)
        for request_id in list(self._requests):
            self._delivery.fail(request_id, end)
        try:
            self._engine.close()
        except BaseException:
            logger.exception("the engine did not close cleanly")

    def _refuse_commands(self, end: EngineClosedError) -> None:
        """In any thread: each command is taken out by one alone."""
        with suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None and command[1].set_running_or_notify_cancel():
                    error = EngineClosedError(str(end))  # one each: raising writes a traceback into it
                    error.__cause__ = end
                    command[1].set_exception(error)


def in_batch(error: InvalidRequestError, index: int, count: int) -> InvalidRequestError:
    """The error, saying which prompt of several it is about."""
    return InvalidRequestError(f"prompt {index} of {count} (the first is 0): {error}", field=error.field)


def _carry_out(command: Command | None) -> None:
    """Settles the command's future, whatever is raised. A plugin's ``sys.exit()`` is one more error; what else is no
    ``Exception`` goes on."""
    if command is None:
        return
    function, future = command
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception | SystemExit):
            raise
    else:
        future.set_result(result)


_live: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread must not be inside a step while the interpreter is torn down."""
    for loop in list(_live):
        loop.stop()
    for loop in list(_live):
        loop.close(EXIT_SECONDS)
