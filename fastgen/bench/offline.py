"""`fastgen bench offline`: whole workloads at once, engines taking turns, medians over rounds."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from fastgen.bench.engines import ENGINES, FastgenEngine, Run, Settings, Tick, TransformersEngine
from fastgen.bench.workloads import Workload
from fastgen.errors import ConfigError, did_you_mean

__all__ = ["Result", "Spread", "compare", "machine", "ratios", "same_tokens", "select_engines"]

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
    """All rounds of one engine on one workload."""

    workload: Workload
    engine: str
    runs: list[Run] = field(default_factory=list)

    @property
    def wall(self) -> Spread:
        """Seconds."""
        return Spread.of([run.wall for run in self.runs])

    @property
    def first_token(self) -> Spread:
        """Seconds to the first token of any request."""
        return Spread.of([run.first_token for run in self.runs])

    @property
    def output_rate(self) -> Spread:
        """Requested output tokens per second of wall time."""
        return Spread.of([self.workload.output_tokens / run.wall for run in self.runs])

    @property
    def total_rate(self) -> Spread:
        """Prompt and output tokens per second of wall time."""
        total = self.workload.prompt_tokens + self.workload.output_tokens
        return Spread.of([total / run.wall for run in self.runs])

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload.name,
            "engine": self.engine,
            "requests": len(self.workload.requests),
            "prompt_tokens": self.workload.prompt_tokens,
            "output_tokens": self.workload.output_tokens,
            "wall_s": [round(run.wall, 4) for run in self.runs],
            "first_token_s": [round(run.first_token, 4) for run in self.runs],
            "median_wall_s": round(self.wall.median, 4),
            "median_output_tokens_per_s": round(self.output_rate.median, 2),
            "median_total_tokens_per_s": round(self.total_rate.median, 2),
        }


def select_engines(names: Sequence[str]) -> list[str]:
    """The names, each once.

    Raises:
        ConfigError: an engine that is not known, or none at all.
    """
    for name in names:
        if name not in ENGINES:
            raise ConfigError(
                f"unknown engine {name!r}: choose from {', '.join(ENGINES)}.{did_you_mean(name, ENGINES)}"
            )
    if not names:
        raise ConfigError(f"no engine to run: choose from {', '.join(ENGINES)}")
    return list(dict.fromkeys(names))


def compare(
    workloads: Sequence[Workload],
    engines: Sequence[str],
    settings: Settings,
    *,
    rounds: int = 3,
    watch: Watch | None = None,
) -> list[Result]:
    """Run each workload ``rounds`` times on each engine, turn and turn about, so that a machine that slows down slows
    all of them. Every engine is loaded once, and warmed up on a few tokens before it is timed.

    Raises:
        FastgenError: the model cannot be loaded, or does not take a workload (too long, ids beyond its vocabulary).
    """
    loaded: list[FastgenEngine | TransformersEngine] = []
    results: list[Result] = []
    try:
        for name in engines:
            loaded.append(ENGINES[name](settings))
        for workload in workloads:
            rows = [Result(workload, engine.name) for engine in loaded]
            results += rows
            for engine in loaded:
                engine.run(workload.short(), lambda _: None)
            for number in range(1, rounds + 1):
                for engine, row in zip(loaded, rows, strict=True):
                    tick = watch(workload.name, engine.name, number) if watch else lambda _: None
                    gc.collect()
                    row.runs.append(engine.run(workload, tick))
    finally:
        for engine in loaded:
            engine.close()
    return results


def ratios(one: Result, other: Result) -> Spread:
    """How many times as fast ``one`` is as ``other``, round by round (neighbours in time)."""
    return Spread.of([b.wall / a.wall for a, b in zip(one.runs, other.runs, strict=True)])


def same_tokens(one: Result, other: Result) -> int:
    """Requests whose tokens are equal in the last round. Near ties may differ: padding and batch shapes round
    differently."""
    return sum(a == b for a, b in zip(one.runs[-1].tokens, other.runs[-1].tokens, strict=True))


def machine(threads: int) -> dict[str, Any]:
    """What the numbers depend on: processor, cores this process may use, threads, versions, load before the run."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("fastgen", "torch", "transformers")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
