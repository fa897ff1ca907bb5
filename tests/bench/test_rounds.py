"""Engines take turns, and the rounds say together what each said alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastgen.bench import rounds
from fastgen.bench.drive import Request, Timeline
from fastgen.bench.machine import Meter, machine
from fastgen.bench.protocol import Opener, Run, Settings, Tick, Workload
from fastgen.bench.rounds import Result, Spread, compare, ratios, same_tokens
from fastgen.errors import ConfigError, RequestFailedError


def line(wall: float, tokens: list[int]) -> Timeline:
    return Timeline(0.0, [wall] * max(1, len(tokens)), tokens)


class Turn:
    """An engine that only says when it ran."""

    note = "a note"
    versions: Mapping[str, str] = {"turn": "1"}

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        log.append(f"{name} load")

    def run(self, workload: Workload, tick: Tick) -> Run:
        self.log.append(f"{self.name} {len(workload.requests)}")
        tick(workload.output_tokens)
        return Run([line(1.0, [1])] * len(workload.requests))

    def close(self) -> None:
        self.log.append(f"{self.name} close")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def rows(log: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Opener]:
    monkeypatch.setattr(rounds, "gc", SimpleNamespace(collect=int))
    return {name: lambda _, name=name: Turn(name, log) for name in ("a", "b")}


def five() -> Workload:
    return Workload("mine", "Mine", [Request([1, 2], 3)] * 5)


def test_engines_take_turns_after_a_warm_up(rows: dict[str, Opener], log: list[str]) -> None:
    results = compare([five()], rows, Settings(Path()), rounds=2)
    assert log == ["a load", "b load", "a 2", "b 2", *("a 5", "b 5") * 2, "a close", "b close"]
    assert [(result.engine, len(result.runs), len(result.others)) for result in results] == [("a", 2, 2), ("b", 2, 2)]
    assert results[0].versions == {"turn": "1"}


def test_engines_are_closed_when_one_fails(rows: dict[str, Opener], log: list[str]) -> None:
    def broken(_: Settings) -> Turn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compare([five()], {**rows, "c": broken}, Settings(Path()))
    assert log[-2:] == ["a close", "b close"]


class Broken(Turn):
    """One that breaks down in its second round."""

    def run(self, workload: Workload, tick: Tick) -> Run:
        if self.log.count(f"{self.name} 5"):
            raise RequestFailedError("out of memory")
        return super().run(workload, tick)


def test_the_others_go_on_when_one_fails(rows: dict[str, Opener], log: list[str]) -> None:
    def missing(_: Settings) -> Turn:
        raise ConfigError("not installed")

    told: list[str] = []
    every = {"m": missing, "x": lambda _: Broken("x", log), **rows}
    results = compare(
        [five()], every, Settings(Path()), rounds=2, failed=lambda name, why: told.append(f"{name}: {why}")
    )
    assert told == ["m: not installed", "x: out of memory"]
    assert [(result.engine, len(result.runs), len(result.others)) for result in results] == [("a", 2, 2), ("b", 2, 2)]
    assert [line for line in log if "close" in line] == ["x close", "a close", "b close"]
    with pytest.raises(ConfigError, match="not installed"):  # nothing is left
        compare([five()], {"m": missing, "n": missing}, Settings(Path()), failed=lambda name, why: None)


def test_progress_adds_up(rows: dict[str, Opener]) -> None:
    seen: list[tuple[str, str, int]] = []
    ticked: list[int] = []

    def watch(*run: object) -> Tick:
        seen.append(run)
        return ticked.append

    compare([five()], {"a": rows["a"]}, Settings(Path()), rounds=2, watch=watch)
    assert seen == [("mine", "a", 1), ("mine", "a", 2)]
    assert sum(ticked) == 2 * 15


def result(name: str, walls: list[float], tokens: list[list[int]]) -> Result:
    work = Workload("w", "W", [Request([1, 2, 3], 4), Request([1], 6)])
    return Result(work, name, [Run([line(wall, answer) for answer in tokens]) for wall in walls])


def test_arithmetic() -> None:
    one = result("a", [2.0, 1.0, 4.0], [[1, 2], [3]])
    other = result("b", [4.0, 4.0, 4.0], [[1, 2], [4]])
    assert one.wall == Spread(2.0, 1.0, 4.0)
    assert [figures["output_rate"] for figures in one.figures()] == [5.0, 10.0, 2.5]
    assert [figures["total_rate"] for figures in one.figures()] == [7.0, 14.0, 3.5]
    assert ratios(one, other) == Spread(2.0, 1.0, 4.0)
    assert same_tokens(one, other) == 1
    assert same_tokens(one, result("c", [1.0], [[1], []])) is None


def test_machine_names_what_figures_depend_on() -> None:
    info = machine(3)
    assert info["threads"] == 3
    assert info["processor"]
    assert info["versions"]["torch"]


def test_our_own_work_is_not_a_neighbour_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 busy seconds in 10, of which 15 were ours: half a core was someone else's."""
    clock = {"now": 100.0, "busy": 50.0, "own": 5.0}
    monkeypatch.setattr("fastgen.bench.machine.time", SimpleNamespace(perf_counter=lambda: clock["now"]))
    monkeypatch.setattr("fastgen.bench.machine._busy", lambda: clock["busy"])
    monkeypatch.setattr("fastgen.bench.machine._own", lambda: clock["own"])
    meter = Meter()
    clock.update(now=110.0, busy=70.0, own=20.0)
    assert meter.read() == pytest.approx(0.5)
