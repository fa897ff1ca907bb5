"""The JSON that every benchmark writes: one layout for all, checked when it is read again.

Seconds and rates per second throughout; `fastgen.bench.measures` says what each figure means.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastgen.bench.measures import Sla
from fastgen.bench.protocol import Run, Workload
from fastgen.bench.rounds import Result, Spread, same_tokens
from fastgen.errors import ConfigError, first_problem

__all__ = ["FORMAT", "PassColumns", "Record", "Round", "Row", "SpreadRecord", "make_rows", "read", "write"]

FORMAT: Literal["fastgen-bench/1"] = "fastgen-bench/1"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SpreadRecord(_Part):
    """One figure over the rounds."""

    median: float
    low: float
    high: float


class WorkloadRecord(_Part):
    name: str
    title: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    clients: int | None = Field(description="Closed loop: requests in flight at most.")
    rate: float | None = Field(description="Open loop: Poisson arrivals a second.")
    about: dict[str, Any] = Field(description="How it was drawn: distribution, scale, seed.")


class TimelineRecord(_Part):
    """One request. Seconds since the run began."""

    prompt: int = Field(description="Tokens of its prompt.")
    group: str
    sent: float
    times: list[float] = Field(description="When each token came.")


class PassColumns(_Part):
    """The forward passes of a run, a list a column; see `fastgen.bench.protocol.Pass`."""

    start: list[float]
    seconds: list[float]
    prompt: list[int]
    decode: list[int]
    running: list[int]
    waiting: list[int]


class Round(_Part):
    figures: dict[str, float]
    other_cores: float = Field(description="Cores that other processes kept busy meanwhile.")
    inexact: int = Field(description="Requests whose token times are interpolated.")
    cached: int = Field(description="Prompt tokens found in a cache instead of read.")
    timelines: list[TimelineRecord] | None = Field(description="With --timelines.")
    budget: int | None = Field(description="Most tokens of a pass, if the engine tells.")
    passes: PassColumns | None = Field(description="Of the last round, if the engine tells.")


class Row(_Part):
    """One engine on one workload."""

    engine: str
    note: str
    versions: dict[str, str]
    workload: WorkloadRecord
    rounds: list[Round]
    summary: dict[str, SpreadRecord] = Field(description="Of the figures that every round has.")
    same_tokens: int | None = Field(description="Requests with the tokens of this workload's first row; null: untold.")


class SlaRecord(_Part):
    prompt_rate: float = Field(description="First token within prompt tokens / this seconds.")
    rate: float = Field(description="Moving average of token gaps under 1 / this seconds.")


class Record(_Part):
    format: Literal["fastgen-bench/1"] = FORMAT
    command: str
    model: str
    dtype: str
    device: str
    seed: int
    options: dict[str, Any] = Field(description="Engine options of fastgen.")
    machine: dict[str, Any]
    slas: list[SlaRecord]
    scaling: str | None = Field(description="How this differs from DeepSpeed-FastGen's setting, where it is scaled.")
    rows: list[Row]


def make_rows(results: Sequence[Result], slas: Sequence[Sla] = (), *, timelines: bool = False) -> list[Row]:
    """``timelines``: keep when every token of every request came, not the figures alone."""
    firsts: dict[int, Result] = {}
    return [
        _row(result, firsts.setdefault(id(result.workload), result), slas, timelines=timelines) for result in results
    ]


def _row(result: Result, first: Result, slas: Sequence[Sla], *, timelines: bool) -> Row:
    figures = result.figures(slas)
    shared = [name for name in figures[0] if all(name in one for one in figures)]
    last = len(result.runs) - 1
    return Row(
        engine=result.engine,
        note=result.note,
        versions=dict(result.versions),
        workload=_workload(result.workload),
        rounds=[
            Round(
                figures={name: round(value, 6) for name, value in one.items()},
                other_cores=round(others, 2),
                inexact=run.inexact,
                cached=run.cached,
                timelines=_timelines(run, result.workload) if timelines else None,
                budget=run.budget,
                passes=_passes(run) if number == last and run.passes else None,
            )
            for number, (run, one, others) in enumerate(zip(result.runs, figures, result.others, strict=True))
        ],
        summary={name: _spread([one[name] for one in figures]) for name in shared},
        same_tokens=same_tokens(first, result),
    )


def _spread(values: Sequence[float]) -> SpreadRecord:
    spread = Spread.of(values)
    return SpreadRecord(median=round(spread.median, 6), low=round(spread.low, 6), high=round(spread.high, 6))


def _workload(workload: Workload) -> WorkloadRecord:
    return WorkloadRecord(
        name=workload.name,
        title=workload.title,
        requests=len(workload.requests),
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        clients=workload.clients,
        rate=workload.rate,
        about=dict(workload.about),
    )


def _timelines(run: Run, workload: Workload) -> list[TimelineRecord]:
    return [
        TimelineRecord(
            prompt=len(request.prompt),
            group=request.group,
            sent=round(line.sent, 5),
            times=[round(at, 5) for at in line.times],
        )
        for line, request in zip(run.lines, workload.requests, strict=True)
    ]


def _passes(run: Run) -> PassColumns:
    return PassColumns(
        start=[round(one.start, 5) for one in run.passes],
        seconds=[round(one.seconds, 5) for one in run.passes],
        prompt=[one.prompt for one in run.passes],
        decode=[one.decode for one in run.passes],
        running=[one.running for one in run.passes],
        waiting=[one.waiting for one in run.passes],
    )


def write(record: Record, path: Path) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(record.model_dump_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def read(path: Path) -> Record:
    """
    Raises:
        ConfigError: the file cannot be read, or was not written by a benchmark of this version.
    """
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValidationError as error:
        _, text = first_problem(error.errors(), Record.model_fields, what="field")
        raise ConfigError(f"{path} is not a benchmark's {FORMAT}: {text}") from None
