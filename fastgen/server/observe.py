"""``Observed``: a loop around a loop that times and counts what its requests get, whichever door they came through."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from fastgen.core.loop import CallerGone, Loop, Sink, Submission
from fastgen.errors import FastgenError
from fastgen.server.service import Backend
from fastgen.server.tally import Marks, Recent, Tallies, Tally
from fastgen.types import Chunk, FinishReason, TokenLogprob, Usage
from fastgen.wire.info import Pass

__all__ = ["Ended", "Observed", "Tracer"]

PASSES_KEPT = 4096
"""For the live view, of each replica."""
RECENT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request went."""

    reasons: tuple[FinishReason, ...]
    """Of its choices, in the order they ended."""
    usage: Usage
    first_token: float | None
    """Seconds after its submission; ``None``: it got none."""
    seconds: float
    """From its submission to its end."""
    error: str | None = None


class Tracer(Protocol):
    """Told of each request (see ``fastgen.server.tracing``)."""

    def begin(self, submission: Submission) -> Callable[[Ended], None]:
        """Called by whoever submits it. What is returned is called once, in any thread, at its end."""


class Observed:
    """Runs requests in ``loop`` and looks on. Every method may be called from any thread."""

    def __init__(
        self, loop: Loop, *, tracer: Tracer | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``clock``: seconds, from any start."""
        self._loop = loop
        self._tracer = tracer
        self._clock = clock
        self._tallies = Tallies()
        self._marks = Marks(clock())
        self._open: set[_Watched] = set()
        self._last_end = clock()
        self._refused = 0
        self._lock = threading.Lock()  # of what happens seldom
        self._followed: Backend | None = None
        self._passes: dict[int, deque[Pass]] = {}
        self.http: dict[tuple[str, str, int], int] = {}
        """Answers of the HTTP door by method, route and status (see ``metrics.HttpCounts``)."""

    # ---- the loop --------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._loop.closed

    def new_request_id(self) -> str:
        return self._loop.new_request_id()

    def submit(self, submissions: Sequence[Submission]) -> Future[None]:
        """As the loop's own."""
        now = self._clock()
        begin = self._tracer.begin if self._tracer is not None else None
        watched = [_Watched(one, self, now, None if begin is None else begin(one)) for one in submissions]
        self._open.update(watched)
        try:
            future = self._loop.submit([one.submission() for one in watched])
        except BaseException as error:
            self._never_ran(watched, str(error))
            raise
        future.add_done_callback(lambda done: self._accepted(watched, done))
        return future

    def abort(self, request_id: str) -> None:
        self._loop.abort(request_id)

    # ---- what was seen ---------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests handed in that have not ended."""
        return len(self._open)

    @property
    def refused(self) -> int:
        """Requests the loop did not take."""
        return self._refused

    def tally(self) -> Tally:
        """All counts since the start, as of now."""
        return self._tallies.sum()

    def recent(self, seconds: float = RECENT_SECONDS) -> Recent:
        """The last ``seconds``, about."""
        now = self._clock()
        mark = self._tallies.mark(now)
        if not self._open and now - self._last_end >= seconds:
            recent = replace(mark.since(mark), seconds=seconds)
        else:
            recent = self._marks.recent(mark, seconds)
        if self._marks.due(now):
            self._marks.add(mark)
        return recent

    def follow(self, backend: Backend) -> None:
        """Hear of the passes of ``backend`` from now on. Asking again for the same one is harmless."""
        with self._lock:
            if self._followed is backend:
                return
            self._followed = backend
        backend.watch(self._take_passes)

    def passes(self, replica: int) -> list[Pass]:
        """The latest passes of a replica, oldest first."""
        return list(self._passes.get(replica, ()))

    def count_http(self, method: str, route: str, status: int) -> None:
        """One answer of the HTTP door. Called in its event loop alone."""
        key = (method, route, status)
        self.http[key] = self.http.get(key, 0) + 1

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _take_passes(self, replica: int, passes: Sequence[Pass]) -> None:
        tally = self._tallies.mine()
        kept = self._passes.get(replica)
        if kept is None:
            kept = self._passes.setdefault(replica, deque(maxlen=PASSES_KEPT))
        for one in passes:
            tally.pass_tokens.add(one.tokens)
            tally.pass_seconds.add(one.seconds)
        kept.extend(passes)

    def _accepted(self, watched: Sequence[_Watched], future: Future[None]) -> None:
        if future.cancelled():
            self._never_ran(watched, "the caller went away before it was accepted")
        elif (error := future.exception()) is not None:
            self._never_ran(watched, str(error))

    def _never_ran(self, watched: Sequence[_Watched], error: str) -> None:
        refused = [one for one in watched if one in self._open]
        self._open.difference_update(refused)
        with self._lock:
            self._refused += len(refused)
        for one in refused:
            one.tell(self._clock(), (), error)

    def _end(self, watched: _Watched, now: float) -> None:
        self._open.discard(watched)
        self._last_end = now
        if self._marks.due(now):
            self._marks.add(self._tallies.mark(now))


_NOBODYS = Tally()
"""Before a request's first token."""


class _Watched:
    """A sink around a request's sink. Its events come in one thread, one after the other."""

    __slots__ = (
        "_clock",
        "_first",
        "_inner",
        "_last",
        "_observed",
        "_prompt_tokens",
        "_reasons",
        "_start",
        "_submission",
        "_tally",
        "_tell",
        "_tokens",
    )

    def __init__(
        self, submission: Submission, observed: Observed, start: float, tell: Callable[[Ended], None] | None
    ) -> None:
        self._submission: Submission | None = submission
        self._inner: Sink = submission.sink
        self._observed = observed
        self._clock = observed._clock
        self._start = start
        self._tell = tell
        self._tally = _NOBODYS
        self._first: float | None = None  # when its first token came
        self._last: list[float | None] = [None] * submission.params.n  # when each choice's latest came
        self._tokens = 0
        self._prompt_tokens = len(submission.prompt_token_ids)
        self._reasons: list[FinishReason] = []

    def submission(self) -> Submission:
        """The request, with this for its sink."""
        one = self._submission
        assert one is not None
        return Submission(one.request_id, one.prompt_token_ids, one.params, self, chat=one.chat)

    # ---- the sink, in the loop's thread ----------------------------------------------------------------------------

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        try:
            self._inner.prompt_logprobs(entries)
        except CallerGone:
            self._gone()
            raise

    def chunk(self, chunk: Chunk) -> None:
        tokens = len(chunk.token_ids)
        if tokens:
            now = self._clock()
            last = self._last[chunk.index]
            if last is None:
                self._begin(now)
            else:
                self._tally.gap.add(now - last)
            self._last[chunk.index] = now
            self._tokens += tokens
            self._tally.answer_tokens += tokens
        if chunk.finish_reason is not None:
            self._reasons.append(chunk.finish_reason)
            if chunk.usage is not None:
                self._end(chunk.usage, chunk.error)
        try:
            self._inner.chunk(chunk)
        except CallerGone:
            self._gone()
            raise

    def fail(self, error: FastgenError) -> None:
        self._end_open_choices("error", str(error))
        self._inner.fail(error)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """A choice's first token."""
        if self._first is None:
            self._first = now
            tally = self._tally = self._observed._tallies.mine()
            tally.first_token.add(now - self._start)
            tally.prompt_tokens += self._prompt_tokens

    def _gone(self) -> None:
        """Nobody listens any more, and nothing more will come."""
        self._end_open_choices("abort", None)

    def _end_open_choices(self, reason: FinishReason, error: str | None) -> None:
        if self in self._observed._open:
            self._reasons += [reason] * (len(self._last) - len(self._reasons))
            self._end(Usage(self._prompt_tokens, self._tokens), error)

    def _end(self, usage: Usage, error: str | None) -> None:
        observed, submission = self._observed, self._submission
        if submission is None:
            return
        now = self._clock()
        tally = observed._tallies.mine()
        tally.whole.add(now - self._start)
        tally.prompt_lengths.add(usage.prompt_tokens)
        tally.answer_lengths.add(usage.completion_tokens)
        tally.cached_tokens += usage.cached_tokens
        tally.choices.add(len(self._last))
        if submission.params.max_new_tokens is not None:
            tally.max_tokens.add(submission.params.max_new_tokens)
        if self._first is not None:
            tally.answering.add(now - self._first)
            choices = sum(last is not None for last in self._last)
            if self._tokens > choices:
                tally.mean_gap.add((now - self._first) * choices / (self._tokens - choices))
        for reason in self._reasons:
            tally.ended[reason] += 1
        observed._end(self, now)
        self.tell(now, tuple(self._reasons), error, usage)

    def tell(
        self, now: float, reasons: tuple[FinishReason, ...], error: str | None, usage: Usage | None = None
    ) -> None:
        """End its trace; ``usage`` if it ran."""
        tell, self._tell, self._submission = self._tell, None, None
        if tell is not None:
            first = None if self._first is None else self._first - self._start
            usage = usage or Usage(self._prompt_tokens, 0)
            with suppress(Exception):  # a tracer's trouble is not the request's
                tell(Ended(reasons, usage, first, now - self._start, error))
