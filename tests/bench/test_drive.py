"""Arrivals: closed loops, open loops and conditions, by a clock of the tests' own; and the loop that drives engines."""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path

import pytest

from fastgen.bench import drive as module
from fastgen.bench import workloads
from fastgen.bench.drive import Arrivals, Request, Timeline, drive


def requests(*outs: int, **fields: object) -> list[Request]:
    return [Request([1, 2], out, **fields) for out in outs]


def test_all_at_once() -> None:
    arrivals = Arrivals(requests(1, 1, 1))
    assert arrivals.due(0.0) == [(0, 0.0), (1, 0.0), (2, 0.0)]
    assert arrivals.due(0.0) == []
    assert arrivals.wait(0.0) is None


def test_open_loop_counts_from_the_arrival_not_from_when_it_was_noticed() -> None:
    arrivals = Arrivals([Request([1], 1, at=at) for at in (0.5, 0.0, 0.25)])
    assert arrivals.due(0.0) == [(1, 0.0)]
    assert arrivals.wait(0.1) == pytest.approx(0.15)
    assert arrivals.due(0.2) == []
    assert arrivals.due(3.0) == [(2, 0.25), (0, 0.5)]


def test_closed_loop_takes_the_next_of_a_shared_queue_when_a_client_is_free() -> None:
    arrivals = Arrivals(requests(2, 2, 1, 1), clients=2)
    assert arrivals.due(0.0) == [(0, 0.0), (1, 0.0)]
    arrivals.came(0, 1, 1.0)
    assert arrivals.due(1.0) == []
    arrivals.came(1, 2, 2.0)  # the second client is done first, and takes the third request
    assert arrivals.due(2.5) == [(2, 2.0)]
    arrivals.came(2, 1, 3.0)
    assert arrivals.due(3.0) == [(3, 3.0)]
    arrivals.came(3, 1, 4.0)
    assert not arrivals.done
    arrivals.came(0, 1, 5.0)
    assert arrivals.done


@pytest.mark.parametrize("clients", [1, 3, 7, 100])
def test_closed_loop_never_exceeds_its_clients(clients: int) -> None:
    draw = random.Random(clients)
    outs = [draw.randrange(1, 5) for _ in range(40)]
    arrivals, left, now, most = Arrivals(requests(*outs), clients), {}, 0.0, 0
    while not arrivals.done:
        left |= {row: outs[row] for row, _ in arrivals.due(now)}
        most = max(most, len(left))
        row = draw.choice(list(left))
        now += 1
        arrivals.came(row, 1, now)
        left[row] -= 1
        if not left[row]:
            del left[row]
    assert most == min(clients, 40)


def test_conditions_of_w3() -> None:
    """Long prompts wait for 8 tokens of every stream, then for each other's first token."""
    work = workloads.load("w3")
    arrivals = Arrivals(work.requests)
    assert [row for row, _ in arrivals.due(0.0)] == list(range(8))
    for row in range(7):
        arrivals.came(row, 8, 1.0)
    arrivals.came(7, 7, 1.0)
    assert arrivals.due(1.0) == []
    arrivals.came(7, 1, 2.0)
    assert arrivals.due(2.5) == [(8, 2.0)]
    for row in (8, 9, 10):
        assert arrivals.due(row) == []
        arrivals.came(row, 1, float(row))
        assert arrivals.due(row) == [(row + 1, float(row))]


def test_at_counts_from_the_condition() -> None:
    arrivals = Arrivals([Request([1], 3), Request([1], 1, at=0.5, after=((0, 2),))])
    arrivals.due(0.0)
    arrivals.came(0, 1, 1.0)
    assert arrivals.wait(1.0) is None
    arrivals.came(0, 1, 2.0)
    assert arrivals.wait(2.0) == pytest.approx(0.5)
    assert arrivals.due(2.4) == []
    assert arrivals.due(2.6) == [(1, 2.5)]


def test_too_many_tokens_are_an_error() -> None:
    arrivals = Arrivals(requests(2))
    with pytest.raises(ValueError, match="request 0 got 3 tokens, 2 were asked for"):
        arrivals.came(0, 3, 1.0)


class Dealer:
    """An engine that gives every running request ``each`` tokens a step."""

    def __init__(self, each: int = 1) -> None:
        self.left: dict[int, int] = {}
        self.log: list[list[int]] = []
        self._each = each

    def add(self, row: int, prompt: list[int], out: int) -> None:
        self.left[row] = out

    def step(self) -> list[tuple[int, list[int]]]:
        self.log.append(sorted(self.left))
        came = [(row, [row] * min(self._each, left)) for row, left in self.left.items()]
        self.left = {row: left - self._each for row, left in self.left.items() if left > self._each}
        return came


@pytest.mark.parametrize("each", [1, 3])
def test_drive_notes_every_token(each: int) -> None:
    ticks: list[int] = []
    lines = drive(Dealer(each), requests(4, 1, 7), tick=ticks.append)
    assert [line.tokens for line in lines] == [[0] * 4, [1], [2] * 7]
    assert sum(ticks) == 12
    for line in lines:
        assert len(line.times) == len(line.tokens)
        assert line.times == sorted(line.times)
        assert 0 == line.sent < line.times[0]


def test_drive_keeps_to_the_clients() -> None:
    engine = Dealer()
    drive(engine, requests(2, 3, 1, 1), clients=2)
    assert engine.log == [[0, 1], [0, 1], [1, 2], [3]]


def test_drive_sleeps_until_the_next_arrival() -> None:
    engine = Dealer()
    lines = drive(engine, [Request([1], 1), Request([1], 1, at=0.05)])
    assert engine.log == [[0], [1]]  # no empty steps meanwhile
    assert lines[1].sent == 0.05 <= lines[1].times[0]


def test_timeline() -> None:
    line = Timeline(1.0, [1.5, 1.75, 2.75], [7, 8, 9])
    assert (line.first_token, line.latency, line.gaps) == (0.5, 1.75, [0.25, 1.0])


def test_a_request_survives_json() -> None:
    request = Request([1, 2], 3, at=0.5, after=((0, 2),), group="long")
    assert Request.from_json(request.as_json()) == request


def test_it_needs_the_standard_library_alone() -> None:
    """Peers load it by its path, where fastgen is not installed."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names <= set(sys.stdlib_module_names) | {"collections.abc"}
