"""Holds back the events of requests that were handed to several engines until all of them are accepted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from fastgen.core.loop import CallerGone, Sink, Submission
from fastgen.errors import FastgenError
from fastgen.types import Chunk, TokenLogprob

__all__ = ["Gate"]


class Gate:
    """Between engines that have begun and sinks that must hear nothing of a batch that is refused.

    Reading threads of several engines come here. While it waits, events are kept; opened, it passes them on in their
    order; shut, it tells whoever comes that nobody is left to hear of it.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        """``abort`` ends a request whose sink turned out to be gone."""
        self._abort = abort
        self._lock = threading.RLock()
        self._open = False
        self._shut = False
        self._kept: list[tuple[_Guarded, Callable[[], None]]] = []

    def guard(self, new: Submission) -> Submission:
        """The same request, its sink behind this gate."""
        return replace(new, sink=_Guarded(self, new.request_id, new.sink))

    def open(self) -> None:
        with self._lock:
            for guarded, event in self._kept:
                if not guarded.gone:
                    try:
                        event()
                    except (Exception, SystemExit):  # as a loop would take it: its own business
                        guarded.gone = True
                        self._abort(guarded.request_id)
            self._kept.clear()
            self._open = True

    def shut(self) -> None:
        with self._lock:
            self._shut = True
            self._kept.clear()

    def pass_on(self, guarded: _Guarded, event: Callable[[], None]) -> None:
        if not self._open:
            with self._lock:
                if self._shut:
                    raise CallerGone("its batch was refused")
                if not self._open:
                    self._kept.append((guarded, event))
                    return
        if guarded.gone:
            raise CallerGone("its sink failed before")
        event()


class _Guarded:
    """A sink."""

    __slots__ = ("_gate", "_sink", "gone", "request_id")

    def __init__(self, gate: Gate, request_id: str, sink: Sink) -> None:
        self._gate = gate
        self._sink = sink
        self.request_id = request_id
        self.gone = False

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        self._gate.pass_on(self, lambda: self._sink.prompt_logprobs(entries))

    def chunk(self, chunk: Chunk) -> None:
        self._gate.pass_on(self, lambda: self._sink.chunk(chunk))

    def fail(self, error: FastgenError) -> None:
        self._gate.pass_on(self, lambda: self._sink.fail(error))
