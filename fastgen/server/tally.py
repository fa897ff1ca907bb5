"""Counts of what requests took, cheap enough to be kept for each token: histograms, and percentiles of late."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from fastgen.types import FinishReason

__all__ = ["REASONS", "SIZES", "Histogram", "Marks", "Recent", "Tallies", "Tally", "one_two_five"]

REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``most``."""
    return tuple(
        value for power in range(len(str(most))) for digit in (1, 2, 5) if (value := digit * 10**power) <= most
    )


# What Prometheus is told ends at these edges, which are those that vLLM's metrics and the dashboards for them have.
FIRST_TOKEN_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
GAP_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
PASS_TOKEN_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_FINEST, _COARSEST, _GROWTH = 1e-4, 1e4, 1.1
_SECONDS = tuple(
    sorted(
        {_FINEST * _GROWTH**i for i in range(int(math.log(_COARSEST / _FINEST) / math.log(_GROWTH)) + 1)}
        | {*FIRST_TOKEN_EDGES, *GAP_EDGES, *REQUEST_EDGES}
    )
)
"""Edges of what is counted in seconds: a tenth apart, so that a percentile is off by 5 % at most, and those above."""
SIZES: tuple[float, ...] = tuple(sorted({*one_two_five(10**8), *(2**power for power in range(24))}))
"""Edges of what is counted in tokens."""


class Histogram:
    """How many values lie at or below each edge. Written by one thread, read by any: a reader may miss the value that
    is being added, and no more."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float] = _SECONDS) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        """Values in ``(edges[i - 1], edges[i]]``; the last: above all edges."""
        self.total = 0.0
        """Of the values."""

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def merge(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def since(self, past: Histogram) -> Histogram:
        """The values that came after ``past`` was copied."""
        new = Histogram(self.edges)
        new.counts = [now - then for now, then in zip(self.counts, past.counts, strict=True)]
        new.total = self.total - past.total
        return new

    def at(self, edges: Sequence[float]) -> list[tuple[str, float]]:
        """Prometheus' buckets, ``(le, values at or below)``, the last for all. ``edges`` are among the histogram's."""
        buckets, below, place = [], 0, 0
        counts = list(self.counts)
        for edge in edges:
            while place < len(self.edges) and self.edges[place] <= edge:
                below += counts[place]
                place += 1
            buckets.append((str(float(edge)), float(below)))
        return [*buckets, ("+Inf", float(sum(counts)))]

    def percentile(self, share: float) -> float | None:
        """The value below which ``share`` of all lie, about; ``None`` of nothing."""
        counts = list(self.counts)
        wanted, below = share * sum(counts), 0
        for place, count in enumerate(counts):
            below += count
            if count and below >= wanted:
                low = self.edges[place - 1] if place else 0.0
                high = self.edges[min(place, len(self.edges) - 1)]
                return math.sqrt(low * high) if low > 0 else high
        return None


def _sizes() -> Histogram:
    return Histogram(SIZES)


@dataclass(slots=True)
class Tally:
    """What one thread counted. Times in seconds, lengths in tokens."""

    first_token: Histogram = field(default_factory=Histogram)
    """From submission to a request's first token."""
    gap: Histogram = field(default_factory=Histogram)
    """Between a choice's tokens."""
    whole: Histogram = field(default_factory=Histogram)
    """From submission to the end of a request's last choice."""
    answering: Histogram = field(default_factory=Histogram)
    """From the first token to that end."""
    mean_gap: Histogram = field(default_factory=Histogram)
    """Of each request with two tokens or more."""
    prompt_lengths: Histogram = field(default_factory=_sizes)
    answer_lengths: Histogram = field(default_factory=_sizes)
    """Of a request's choices together."""
    choices: Histogram = field(default_factory=_sizes)
    """``n`` of each request that ended."""
    max_tokens: Histogram = field(default_factory=_sizes)
    """``max_new_tokens`` of each request that ended and had it set."""
    pass_tokens: Histogram = field(default_factory=_sizes)
    pass_seconds: Histogram = field(default_factory=Histogram)
    prompt_tokens: int = 0
    """Of the requests that have got their first token."""
    cached_tokens: int = 0
    """Of the prompts of requests that ended, found in the prefix cache."""
    answer_tokens: int = 0
    ended: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    """Choices, by how they ended."""

    def merge(self, other: Tally) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Histogram):
                mine.merge(theirs)
            elif isinstance(mine, dict):
                for reason in mine:
                    mine[reason] += theirs[reason]
            else:
                setattr(self, each.name, mine + theirs)


@dataclass(frozen=True, slots=True)
class Recent:
    """What the live view shows: since the start at one moment, or between two."""

    seconds: float
    """The moment, or the time between the two."""
    first_token: Histogram
    gap: Histogram
    whole: Histogram
    prompt_tokens: int
    answer_tokens: int
    ended: int
    """Choices."""

    def since(self, past: Recent) -> Recent:
        return Recent(
            seconds=self.seconds - past.seconds,
            first_token=self.first_token.since(past.first_token),
            gap=self.gap.since(past.gap),
            whole=self.whole.since(past.whole),
            prompt_tokens=self.prompt_tokens - past.prompt_tokens,
            answer_tokens=self.answer_tokens - past.answer_tokens,
            ended=self.ended - past.ended,
        )


class Tallies:
    """A tally for each thread that counts, so that none waits for another, and their sum."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._lock = threading.Lock()
        self._of_threads: list[tuple[threading.Thread, Tally]] = []
        self._ended = Tally()  # of threads that are no more

    def mine(self) -> Tally:
        """The calling thread's."""
        tally: Tally | None = getattr(self._own, "tally", None)
        if tally is None:
            tally = self._own.tally = Tally()
            with self._lock:
                self._fold()
                self._of_threads.append((threading.current_thread(), tally))
        return tally

    def sum(self) -> Tally:
        """A copy of all together, as of now."""
        total = Tally()
        with self._lock:
            total.merge(self._ended)
            for _, tally in self._of_threads:
                total.merge(tally)
        return total

    def mark(self, now: float) -> Recent:
        """A copy of what the live view needs."""
        first, gap, whole = Histogram(), Histogram(), Histogram()
        prompt_tokens = answer_tokens = ended = 0
        with self._lock:
            for tally in (self._ended, *(tally for _, tally in self._of_threads)):
                first.merge(tally.first_token)
                gap.merge(tally.gap)
                whole.merge(tally.whole)
                prompt_tokens += tally.prompt_tokens
                answer_tokens += tally.answer_tokens
                ended += sum(tally.ended.values())
        return Recent(now, first, gap, whole, prompt_tokens, answer_tokens, ended)

    def _fold(self) -> None:
        """With the lock. A restarted engine's messages come in a new thread; what the old one counted stays."""
        for thread, tally in self._of_threads:
            if not thread.is_alive():
                self._ended.merge(tally)
        self._of_threads = [(thread, tally) for thread, tally in self._of_threads if thread.is_alive()]


class Marks:
    """Moments at least ``STEP`` seconds apart, to say what came since one of them."""

    STEP, KEPT = 1.0, 64

    def __init__(self, start: float) -> None:
        nothing = Recent(start, Histogram(), Histogram(), Histogram(), 0, 0, 0)
        self._marks = deque([nothing], maxlen=self.KEPT)
        self._lock = threading.Lock()

    def due(self, now: float) -> bool:
        """Whether the last one is old enough for another."""
        return now - self._marks[-1].seconds >= self.STEP

    def add(self, mark: Recent) -> None:
        with self._lock:
            if self.due(mark.seconds):  # several threads may have found so at once
                self._marks.append(mark)

    def recent(self, now: Recent, seconds: float) -> Recent:
        """What came within the last ``seconds``, about: since the youngest mark that is as old, or the oldest there
        is."""
        with self._lock:
            marks = list(self._marks)
        return now.since(next((one for one in reversed(marks) if now.seconds - one.seconds >= seconds), marks[0]))
