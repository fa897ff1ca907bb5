"""From an engine's outputs to whoever asked: each request's events, in order, and exactly one last one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fastgen.core.collector import Collector
from fastgen.core.plugin.describe import describe_error
from fastgen.errors import FastgenError
from fastgen.types import Chunk, StepOutput, TokenLogprob

__all__ = ["CallerGone", "Delivery", "Running", "Sink"]

logger = logging.getLogger(__name__)


class CallerGone(Exception):
    """Raised by a sink: nobody is left to hear of its request. The request ends; nothing went wrong."""


class Sink(Protocol):
    """Where one request's events go. Called in one thread of the loop's: must be quick and must not wait.

    Exactly one last event comes: a chunk with ``usage``, or ``fail``. Nothing comes for a request that was refused, and
    nothing more after ``CallerGone``.
    """

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        """Before the first chunk, if the request asked for them."""

    def chunk(self, chunk: Chunk) -> None: ...

    def fail(self, error: FastgenError) -> None:
        """The engine was closed or died."""


@dataclass(slots=True)
class Running:
    """One request, from its submission to its end."""

    collector: Collector
    sink: Sink


R = TypeVar("R", bound=Running)


class Delivery(Generic[R]):
    """The requests of one engine, and the way of their outputs to their sinks.

    It has no lock: ``requests`` changes by single operations, and whoever takes an entry out settles it. All outputs of
    one request must be delivered by one thread.
    """

    def __init__(self, abort: Callable[[str, int | None], None]) -> None:
        """``abort`` ends a request in the engine, or one of its choices."""
        self._abort = abort
        self.requests: dict[str, R] = {}

    def deliver(self, output: StepOutput) -> None:
        """Pass one output on. A request whose sink or detokenizer raises ends, and hurts no other."""
        running = self.requests.get(output.request_id)
        if running is None:
            return
        try:
            self._pass_on(running, output)
        except CallerGone as gone:
            logger.debug("request %s ends, its caller is gone: %s", output.request_id, gone)
            self._forget(output.request_id)
        except (Exception, SystemExit) as error:  # its detokenizer, or its sink: nobody else's business
            self._drop(output.request_id, running, error)

    def fail(self, request_id: str, error: FastgenError) -> None:
        """Take a request out and tell its sink why it ends."""
        running = self.requests.pop(request_id, None)
        if running is None:
            return
        try:
            running.sink.fail(error)
        except BaseException:  # the others must hear of it
            logger.debug("the caller of request %s cannot be reached", request_id, exc_info=True)

    def _pass_on(self, running: R, output: StepOutput) -> None:
        collector, sink = running.collector, running.sink
        if output.prompt_logprobs is not None:
            sink.prompt_logprobs(collector.name_tokens(output.prompt_logprobs))
        chunk = collector.take(output)
        if chunk is None:
            return
        if chunk.finish_reason is not None:
            if output.finish_reason is None:  # a stop string, which the engine knows nothing of
                self._abort(output.request_id, output.index)
            if collector.finished:
                self.requests.pop(output.request_id, None)
        sink.chunk(chunk)

    def _forget(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self._abort(request_id, None)

    def _drop(self, request_id: str, running: R, error: BaseException) -> None:
        logger.warning("request %s failed: %s", request_id, describe_error(error))
        self._forget(request_id)
        try:
            for chunk in running.collector.fail(describe_error(error)):
                running.sink.chunk(chunk)
        except (Exception, SystemExit):
            logger.debug("the caller of request %s cannot be reached", request_id, exc_info=True)
