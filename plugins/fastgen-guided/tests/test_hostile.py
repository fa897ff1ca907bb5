"""Options from strangers: refused with a reason, in bounded time, and without harm to what comes after."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fastgen_guided import guard
from fastgen_guided.guard import Guard, check

from fastgen.errors import FastgenError, OverloadedError


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def looping() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    return schema


REFUSED: dict[str, tuple[Any, str]] = {
    "no options": (None, "expected an object"),
    "a list": ([], "expected an object"),
    "nothing": ({}, "give one of"),
    "two": ({"regex": "a", "json_object": True}, "give one of .* got json_object and regex"),
    "unknown": ({"regexp": "a"}, "unknown option 'regexp'"),
    "false object": ({"json_object": False}, "json_object must be true"),
    "null object": ({"json_object": None}, "json_object must be true"),
    "whitespace": ({"json_object": True, "whitespace": 1}, "whitespace must be true or false"),
    "empty schema text": ({"json_schema": ""}, "not JSON"),
    "schema number": ({"json_schema": 5}, "must be an object"),
    "schema false": ({"json_schema": False}, "no answer satisfies"),
    "schema false text": ({"json_schema": "false"}, "no answer satisfies"),
    "NaN": ({"json_schema": {"const": float("nan")}}, "not JSON"),
    "no JSON": ({"json_schema": {"const": {1, 2}}}, "not JSON"),
    "unknown type": ({"json_schema": {"type": "objct"}}, "objct"),
    "not": ({"json_schema": {"not": {"type": "string"}}}, "not"),
    "x-guidance cannot make it lenient": (
        {"json_schema": {"not": {}, "x-guidance": {"lenient": True}}},
        "not",
    ),
    "itself": ({"json_schema": {"$ref": "#"}}, "no answer satisfies it"),
    "unreachable": ({"json_schema": {"$ref": "https://example.com/schema.json"}}, "example.com"),
    "no such definition": ({"json_schema": {"$ref": "#/$defs/x"}}, "x"),
    "10,000 deep": ({"json_schema": nested(10_000)}, "levels deep"),
    "10,000 deep, as text": ({"json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000}, "recursion|levels deep"),
    "100 deep, as text": ({"json_schema": '{"items":' * 100 + "{}" + "}" * 100}, "levels deep"),
    "without end": ({"json_schema": looping()}, "levels deep"),
    "many values": ({"json_schema": {"enum": list(range(100_000))}}, "values"),
    "long": ({"json_schema": {"const": "x" * 1_000_000}}, "characters"),
    "huge number": ({"json_schema": {"type": "integer", "minimum": 10**400}}, "number"),
    "empty regex": ({"regex": ""}, "not empty"),
    "anchors alone": ({"regex": "^$"}, "empty answer"),
    "open group": ({"regex": "(a"}, "invalid regex"),
    "look-ahead": ({"regex": "(?=a)b"}, "invalid regex"),
    "regex number": ({"regex": 5}, "must be a text"),
    "empty choice": ({"choice": []}, "choice must be"),
    "empty text": ({"choice": ["a", ""]}, "choice must be"),
    "choice of numbers": ({"choice": [1]}, "choice must be"),
    "many choices": ({"choice": [str(i) for i in range(2000)]}, "at most 1000"),
    "empty grammar": ({"grammar": " "}, "not empty"),
    "broken grammar": ({"grammar": "start: ("}, "Expected token"),
    "deep grammar": ({"grammar": "start: " + "(" * 50_000}, "nested"),
    "deep GBNF": ({"grammar": "root ::= " + "(" * 50_000}, "cannot be read"),
    "structure": ({"structure": [{"token": 1}]}, "a node must be"),
    "two in a node": ({"structure": {"token": 1, "regex": "a"}}, "a node has one of"),
    "bad token": ({"structure": {"token": -1}}, "token must be"),
    "bad repeat": ({"structure": {"repeat": "a"}}, "a repeat has"),
    "empty sequence": ({"structure": {"sequence": []}}, "sequence must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    options, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason) as caught:
        check(options)
    assert len(str(caught.value)) < 2000
    assert "part_" not in str(caught.value)  # nothing of our own rules


ACCEPTED: dict[str, Any] = {
    "empty schema": {"json_schema": {}},
    "true": {"json_schema": True},
    "as text": {"json_schema": '{"type": "null"}'},
    "what pydantic writes": {
        "json_schema": {
            "title": "T",
            "description": "d",
            "type": "object",
            "properties": {"at": {"format": "date-time", "title": "At", "type": "string", "default": "x"}},
        }
    },
    "a property called format": {"json_schema": {"type": "object", "properties": {"format": {"type": "string"}}}},
    "60 deep": {"json_schema": nested(60)},
    "regex with many states": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "a thousand choices": {"choice": [f"choice {i}" for i in range(1000)]},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    check(ACCEPTED[name])


@pytest.fixture
def fresh() -> Iterator[Callable[..., Guard]]:
    """Makes guards."""
    with ExitStack() as stack:

        def make(**options: Any) -> Guard:
            made = Guard(**options)
            stack.callback(made.close)
            return made

        yield make


def schema(number: int) -> dict[str, Any]:
    """Takes longer to compile the larger the number: with these sizes, from seconds to minutes."""
    return {"json_schema": {"type": "integer", "multipleOf": number}}


@pytest.mark.parametrize("number", [300007, 1000003])
def test_one_that_takes_long_is_refused_and_remembered(
    fresh: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(guard, "_guard", fresh())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"more than 0\.5 s"):
            check(schema(number))
    check({"regex": "[a-z]+"})  # the next one has a new process


def test_the_time_that_counts_is_the_processors_own(fresh: Callable[..., Guard]) -> None:
    """A process that sleeps between two grammars has used nothing up."""
    one = fresh(seconds=0.3)
    assert one.problem('start: "a"') == ""
    process = one._idle[0]._process
    time.sleep(0.5)
    assert one.problem('start: "b"') == ""
    assert one._idle[0]._process is process


def test_a_checker_that_was_killed_is_replaced(fresh: Callable[..., Guard]) -> None:
    one = fresh()
    assert one.problem('start: "a"') == ""
    one._idle[0]._process.kill()
    one._idle[0]._process.wait()
    assert one.problem('start: "b"') == ""  # which had no part in it


def test_one_that_kills_the_checker_is_refused(fresh: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch) -> None:
    one = fresh()

    def dies(self: Any, grammar: str, seconds: float) -> str:
        self._process.kill()
        raise EOFError

    monkeypatch.setattr(guard._Checker, "ask", dies)
    assert "crashes" in one.problem('start: "a"')


def test_trouble_of_the_servers_own_is_nobodys_fault(
    fresh: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no ``ValueError``, and not remembered."""
    grammar = 'start: "trouble"'
    crowded = fresh(turn=0.01, processes=1)
    with crowded._turns, pytest.raises(OverloadedError, match="try again") as caught:
        crowded.problem(grammar)
    assert caught.value.retry_after > 0
    assert crowded.problem(grammar) == ""

    busy = fresh(answer=0.0)
    for _ in range(2):
        with pytest.raises(OverloadedError, match="busy"):
            busy.problem(grammar)

    with monkeypatch.context() as patch:
        patch.setattr(guard.sys, "executable", "/no/such/python")
        nowhere = fresh()
        with pytest.raises(FastgenError, match="does not start") as failed:
            nowhere.problem(grammar)
        assert not isinstance(failed.value, ValueError)
    assert nowhere.problem(grammar) == ""


def test_its_processes_end_with_their_parent() -> None:
    program = "from fastgen_guided import guard; guard.check({'regex': 'a'}); print(guard._guard._idle[0]._process.pid)"
    pid = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    import psutil

    try:
        psutil.Process(pid).wait(20)
    except psutil.NoSuchProcess:
        return


def test_checking_needs_no_torch() -> None:
    program = "import sys; from fastgen_guided import guard; guard.check({'regex': 'a'}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
