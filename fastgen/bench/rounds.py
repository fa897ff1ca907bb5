"""Engines taking turns: every workload several times on every engine, and what the rounds say together."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from fastgen.bench.machine import Meter
from fastgen.bench.measures import Sla, measures
from fastgen.bench.protocol import Opener, Run, Settings, Target, Tick, Workload
from fastgen.errors import FastgenError

__all__ = ["Result", "Spread", "Watch", "compare", "ratios", "same_tokens"]

Watch = Callable[[str, str, int], Tick]
"""(workload, engine, round) about to run -> who to tell of its tokens."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of some rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Result:
    """All rounds of one engine on one workload. ``others``: cores that other processes kept busy, a round."""

    workload: Workload
    engine: str
    runs: list[Run] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    note: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def figures(self, slas: Sequence[Sla] = ()) -> list[dict[str, float]]:
        """`measures` of every round."""
        return [measures(run, self.workload, slas) for run in self.runs]

    @property
    def wall(self) -> Spread:
        """Seconds."""
        return Spread.of([run.wall for run in self.runs])


def compare(
    workloads: Sequence[Workload],
    rows: Mapping[str, Opener],
    settings: Settings,
    *,
    rounds: int = 3,
    watch: Watch | None = None,
    failed: Callable[[str, FastgenError], None] | None = None,
) -> list[Result]:
    """Run each workload ``rounds`` times on each engine, turn and turn about, so that a machine that slows down slows
    all of them. Every engine is loaded once, and warmed up on a few tokens before it is timed.

    Args:
        failed: told of an engine that could not be loaded or broke down (``(name, why)``); its rows are left out and
            the others go on. None: the first failure ends everything.

    Raises:
        FastgenError: the model cannot be loaded, or does not take a workload (too long, ids beyond its vocabulary);
            with ``failed``, only if no engine is left.
    """
    loaded: dict[str, Target] = {}
    results: list[Result] = []

    def drop(name: str, error: FastgenError) -> None:
        if failed is None or left == 1:
            raise error
        failed(name, error)
        results[:] = [result for result in results if result.engine != name]
        if name in loaded:
            loaded.pop(name).close()

    left = len(rows)
    try:
        for name, opener in rows.items():
            try:
                loaded[name] = opener(settings)
            except FastgenError as error:
                drop(name, error)
                left -= 1
        for workload in workloads:
            for name, engine in list(loaded.items()):
                try:
                    engine.run(workload.short(), lambda _: None)
                    results.append(Result(workload, name, note=engine.note, versions=dict(engine.versions)))
                except FastgenError as error:
                    drop(name, error)
                    left -= 1
            for number in range(1, rounds + 1):
                for row in [result for result in results if result.workload is workload]:
                    tick = watch(workload.name, row.engine, number) if watch else lambda _: None
                    gc.collect()
                    meter = Meter()
                    try:
                        row.runs.append(loaded[row.engine].run(workload, tick))
                        row.others.append(meter.read())
                    except FastgenError as error:
                        drop(row.engine, error)
                        left -= 1
    finally:
        for engine in loaded.values():
            engine.close()
    return results


def ratios(one: Result, other: Result) -> Spread:
    """How many times as fast ``one`` is as ``other``, round by round (neighbours in time)."""
    return Spread.of([b.wall / a.wall for a, b in zip(one.runs, other.runs, strict=True)])


def same_tokens(one: Result, other: Result) -> int | None:
    """Requests whose tokens are equal in the last round; None if an engine does not tell its tokens. Near ties may
    differ: padding and batch shapes round differently."""
    pairs = list(zip(one.runs[-1].tokens, other.runs[-1].tokens, strict=True))
    if not all(a and b for a, b in pairs):
        return None
    return sum(a == b for a, b in pairs)
