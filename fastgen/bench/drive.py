"""When requests arrive, and the loop that feeds them to an engine and notes when every token came.

Needs the standard library alone, and nothing else of fastgen: peers run in virtual environments of their own, where
this file is loaded by its path.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Protocol

__all__ = ["Arrivals", "Request", "Stepper", "Tick", "Timeline", "drive"]

Tick = Callable[[int], None]
"""Called with the number of requested output tokens that just came."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload.

    ``prompt``: token ids. ``out``: how many tokens to generate, end tokens ignored. ``after``: ``(row, tokens)`` pairs,
    earlier requests that must have given so many tokens before this one may arrive. ``at``: seconds from the beginning
    of the run, or from the moment ``after`` is met. ``group``: a label to report by, such as ``long``.
    """

    prompt: list[int]
    out: int
    at: float = 0.0
    after: tuple[tuple[int, int], ...] = ()
    group: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Request:
        """What `as_json` wrote. Nothing is checked: `fastgen.bench.workloads` reads files of unknown origin."""
        return cls(**{**raw, "after": tuple((row, tokens) for row, tokens in raw.get("after", ()))})


@dataclass(slots=True)
class Timeline:
    """What one request got. Seconds since the run began.

    ``sent``: when it arrived by the workload's rule, not when the engine had time to look at it. ``times``: one a
    token. ``tokens``: their ids, as many; empty if the engine does not tell.
    """

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        """Seconds from arrival to the first token."""
        return self.times[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds from arrival to the last token."""
        return self.times[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens, ``len(times) - 1`` of them."""
        return [b - a for a, b in pairwise(self.times)]


class Arrivals:
    """Says which requests are to be sent by now. No clock of its own: every call is told the time.

    ``clients``: at most so many requests in flight; whoever is done takes the next one of a shared queue (a closed
    loop). None: every request is sent when it is due, however many are running (an open loop).
    """

    def __init__(self, requests: Sequence[Request], clients: int | None = None) -> None:
        self._requests = requests
        self._left = [request.out for request in requests]
        self._unfinished = len(requests)
        self._free = [0.0] * (len(requests) if clients is None else clients)  # when each client was free
        self._limited = clients is not None
        self._needs: list[set[tuple[int, int]]] = [set(request.after) for request in requests]
        self._waiting: dict[int, list[int]] = {}  # row -> rows that need its tokens
        for row, needs in enumerate(self._needs):
            for other, _ in needs:
                self._waiting.setdefault(other, []).append(row)
        self._ready = [(request.at, row) for row, request in enumerate(requests) if not request.after]
        heapq.heapify(self._ready)
        self._given = [0] * len(requests)

    @property
    def done(self) -> bool:
        """Whether every request has all its tokens."""
        return not self._unfinished

    def due(self, now: float) -> list[tuple[int, float]]:
        """``(row, second it arrived)`` of the requests to be sent now, oldest first. Each is named once."""
        rows = []
        while self._ready and self._ready[0][0] <= now and self._free:
            at, row = heapq.heappop(self._ready)
            rows.append((row, max(at, heapq.heappop(self._free)) if self._limited else at))
        return rows

    def wait(self, now: float) -> float | None:
        """Seconds until the clock alone makes the next request due; None if only tokens can."""
        if not self._ready or not self._free:
            return None
        return max(0.0, self._ready[0][0] - now)

    def came(self, row: int, tokens: int, now: float) -> None:
        """``tokens`` more tokens of request ``row`` came.

        Raises:
            ValueError: more than were asked for.
        """
        self._left[row] -= tokens
        self._given[row] += tokens
        if self._left[row] < 0:
            raise ValueError(f"request {row} got {self._given[row]} tokens, {self._requests[row].out} were asked for")
        for other in self._waiting.get(row, ()):
            needs = self._needs[other]
            met = {need for need in needs if need[0] == row and need[1] <= self._given[row]}
            if met:
                needs -= met
                if not needs:
                    heapq.heappush(self._ready, (now + self._requests[other].at, other))
        if not self._left[row] and tokens:
            self._unfinished -= 1
            if self._limited:
                heapq.heappush(self._free, now)


class Stepper(Protocol):
    """An engine that is driven step by step."""

    def add(self, row: int, prompt: list[int], out: int) -> None:
        """Accept request ``row``: greedy, exactly ``out`` tokens, end tokens ignored, no prefix of earlier runs."""

    def step(self) -> list[tuple[int, list[int]]]:
        """Run a little; ``(row, new token ids)`` of what came. Raises if a request ends before it has all tokens."""


def drive(
    engine: Stepper,
    requests: Sequence[Request],
    *,
    clients: int | None = None,
    tick: Tick | None = None,
) -> list[Timeline]:
    """Send ``requests`` by their rule, step the engine until all are done, and note when tokens came.

    A request that arrives during a step is handed over after it; its wait counts from its arrival.
    """
    arrivals, lines = Arrivals(requests, clients), [Timeline() for _ in requests]
    running = 0
    began = time.perf_counter()
    while not arrivals.done:
        now = time.perf_counter() - began
        for row, at in arrivals.due(now):
            lines[row].sent = at
            engine.add(row, requests[row].prompt, requests[row].out)
            running += 1
        if not running:
            time.sleep(arrivals.wait(now) or 0.0)
            continue
        came = engine.step()
        now = time.perf_counter() - began
        for row, tokens in came:
            lines[row].tokens += tokens
            lines[row].times += [now] * len(tokens)
            arrivals.came(row, len(tokens), now)
            running -= len(lines[row].times) == requests[row].out
        if tick is not None and came:
            tick(sum(len(tokens) for _, tokens in came))
    return lines
