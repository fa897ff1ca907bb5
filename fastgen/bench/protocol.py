"""What every engine of a benchmark looks like, in this process or in one of its own.

A row of a benchmark is a `Target`: opened once, run several times, closed. Engines driven step by step
(`drive.Stepper`) get `run` from `drive.drive`. Peers live in ``fastgen.bench.peers``, one child process each in its own
virtual environment; the child loads ``drive.py`` by its path, reads a workload (`Workload.as_json`), and answers with
`Run.as_json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from fastgen.bench.drive import Request, Tick, Timeline

__all__ = ["Opener", "Pass", "Request", "Run", "Settings", "Target", "Tick", "Timeline", "Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and how they arrive.

    ``clients``: at most so many in flight (closed loop); None: as the requests say, which is all at once unless they
    say otherwise. ``rate``: arrivals a second on average, where they were drawn so (open loop). ``about``: how it was
    made (distribution, seed, scale), for the report.
    """

    name: str
    title: str
    requests: list[Request]
    clients: int | None = None
    rate: float | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.out for request in self.requests)

    @property
    def at_once(self) -> bool:
        """Whether all requests are there from the beginning: an offline batch."""
        return self.clients is None and not any(request.at or request.after for request in self.requests)

    def short(self) -> Workload:
        """A few tokens of the first two requests, at once, to warm an engine up."""
        few = [Request(request.prompt[:64], min(request.out, 4)) for request in self.requests[:2]]
        return Workload(self.name, self.title, few, self.clients)

    def as_json(self) -> dict[str, Any]:
        """The layout of workload files, and of what a child process reads."""
        return {
            "name": self.title,
            "requests": [request.as_json() for request in self.requests],
            "clients": self.clients,
        }


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass. ``start`` and ``seconds``: when, since the run began, and how long. ``prompt`` and ``decode``:
    its tokens. ``running`` and ``waiting``: requests after it."""

    start: float
    seconds: float
    prompt: int
    decode: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Run:
    """One workload, run once: a timeline a request, and the passes if the engine tells.

    ``budget``: most tokens of a pass, if the engine tells. ``inexact``: requests whose token times are interpolated,
    since several tokens came at once and unnumbered. ``cached``: prompt tokens found in a cache instead of read.
    """

    lines: list[Timeline]
    passes: list[Pass] = field(default_factory=list)
    budget: int | None = None
    inexact: int = 0
    cached: int = 0

    @property
    def wall(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(line.times[-1] for line in self.lines) - min(line.sent for line in self.lines)

    @property
    def first_token(self) -> float:
        """Seconds from the first arrival to the first token of any request."""
        return min(line.times[0] for line in self.lines) - min(line.sent for line in self.lines)

    @property
    def tokens(self) -> list[list[int]]:
        """By request; empty lists if the engine does not tell."""
        return [line.tokens for line in self.lines]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Run:
        """What `as_json` wrote."""
        return cls(
            [Timeline(**line) for line in raw["lines"]],
            [Pass(**one) for one in raw.get("passes", ())],
            raw.get("budget"),
            raw.get("inexact", 0),
            raw.get("cached", 0),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """The same for every engine. ``threads``: CPU threads. ``options``: fastgen's engine options."""

    directory: Path
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    options: tuple[tuple[str, Any], ...] = ()


class Target(Protocol):
    """One row of a benchmark. ``name``: the row's label, such as ``vllm bf16``. ``note``: a line on how it is driven.
    ``versions``: the packages its figures depend on."""

    name: str
    note: str
    versions: Mapping[str, str]

    def run(self, workload: Workload, tick: Tick) -> Run:
        """The whole workload, once, greedy, end tokens ignored; no run finds another's prefixes in a cache.

        Raises:
            ConfigError: the engine cannot run a workload of this kind.
            FastgenError: the engine refused a request, or failed.
        """

    def close(self) -> None:
        """End it and free its memory. Closing twice is harmless."""


Opener: TypeAlias = Callable[[Settings], Target]
"""Loads the model, ready to run.

``fastgen.bench.peers.read(path: Path) -> dict[str, Opener]`` gives the rows of a TOML file: a table a row, as in

    [vllm-w8a8]
    engine = "vllm"                     # which adapter
    python = "/venvs/vllm/bin/python"   # the interpreter of its virtual environment
    model = "/models/smollm2-w8a8"      # in this engine's format; unset: the benchmark's model
    dtype = "bfloat16"                  # unset: the benchmark's

and whatever else the adapter takes. It checks everything that can be checked without starting a process, and raises
`ConfigError` with the table's name. The keys are what ``--engines`` names.
"""
