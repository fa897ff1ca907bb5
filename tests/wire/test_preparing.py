"""A plugin that takes long to prepare for a request holds up that request alone."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen.core.plugin import LogitsProcessorSpec, hookimpl, registered
from fastgen.testing.children import wait_until
from fastgen.wire.messages import Abort, Accepted, Refused, Request, Step, Submit
from fastgen.wire.pulse import Pulse
from fastgen.wire.serving import Serving

SECONDS = 30
EXAMPLE = {"what": "the example"}


@dataclass
class Slow:
    """A plugin that keeps what took long, for each ``what`` of its options."""

    go: threading.Event = field(default_factory=threading.Event)
    begun: list[tuple[str, bool]] = field(default_factory=list)
    """What it had to prepare for, and whether it was checked before."""
    known: set[str] = field(default_factory=set)

    def make(self, options: dict[str, Any], *, checked: bool, **given: Any) -> Any:
        what = options["what"]
        if what not in self.known:
            self.begun.append((what, checked))
            assert what == EXAMPLE["what"] or self.go.wait(SECONDS)
            if what == "refused":
                raise ValueError("not this one")
            self.known.add(what)
        return lambda ids, logits: logits

    @hookimpl
    def fastgen_logits_processors(self) -> list[LogitsProcessorSpec]:
        return [LogitsProcessorSpec("slow", self.make, needs=("checked",), example=EXAMPLE)]


class Front:
    """Commands go in; what the engine says is kept."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self._commands: queue.SimpleQueue[Submit | Abort | None] = queue.SimpleQueue()
        self._numbers = iter(range(1000))

    def submit(self, *names: str, **params: Any) -> int:
        number = next(self._numbers)
        requests = [
            Request(name, [65, 66], {"max_new_tokens": 400, "ignore_eos": True, **params}, False) for name in names
        ]
        self._commands.put(Submit(number, requests))
        return number

    def abort(self, name: str) -> None:
        self._commands.put(Abort(name))

    def end(self) -> None:
        self._commands.put(None)

    def next(self, *, wait: bool) -> Submit | Abort | None:
        try:
            command = self._commands.get(wait)
        except queue.Empty:
            return None
        if command is None:
            raise EOFError
        return command

    def answer(self, number: int) -> Accepted | Refused | None:
        return next((m for m in self.said if isinstance(m, Accepted | Refused) and m.number == number), None)

    def outputs(self, name: str) -> list[Any]:
        return [o for m in list(self.said) if isinstance(m, Step) for o in m.outputs if o.request_id == name]


@pytest.fixture
def slow() -> Iterator[Slow]:
    plugin = Slow()
    with registered(plugin, name="slow"):
        yield plugin
    plugin.go.set()


@contextmanager
def serving(model: Path, slow: Slow) -> Iterator[Front]:
    front = Front()
    with fastgen.Engine.load(model, device="cpu", threads=1, num_blocks=128) as engine:
        pulse = Pulse(front.said.append, os.getppid(), on_orphaned=lambda: None)
        thread = threading.Thread(target=lambda: Serving(engine, front.said.append, pulse).run(front.next))
        thread.start()
        try:
            yield front
        finally:
            slow.go.set()
            front.end()
            thread.join(SECONDS)


def becomes(condition: Callable[[], object]) -> None:
    wait_until(lambda: bool(condition()), SECONDS)


def test_others_go_on_meanwhile(tiny: Path, slow: Slow) -> None:
    with serving(tiny, slow) as front:
        running = front.submit("running")
        becomes(lambda: front.outputs("running"))
        waiting = front.submit("waiting", logits_processors={"slow": {"what": "new"}}, max_new_tokens=2, n=3)
        becomes(lambda: ("new", True) in slow.begun)
        before = len(front.outputs("running"))
        later = front.submit("later", max_new_tokens=2)
        becomes(lambda: len(front.outputs("running")) >= before + 20)
        becomes(lambda: len(front.outputs("later")) == 2)
        assert isinstance(front.answer(running), Accepted)
        assert isinstance(front.answer(later), Accepted)
        assert front.answer(waiting) is None
        slow.go.set()
        becomes(lambda: len(front.outputs("waiting")) == 6)
        assert isinstance(front.answer(waiting), Accepted)
        assert len([what for what, _ in slow.begun if what == "new"]) == 1


def test_an_engine_without_other_work_takes_others(tiny: Path, slow: Slow) -> None:
    with serving(tiny, slow) as front:
        front.submit("waiting", logits_processors={"slow": {"what": "new"}}, max_new_tokens=2)
        becomes(lambda: ("new", True) in slow.begun)
        front.submit("later", max_new_tokens=2)
        becomes(lambda: len(front.outputs("later")) == 2)
        assert not front.outputs("waiting")
        slow.go.set()
        becomes(lambda: len(front.outputs("waiting")) == 2)


def test_an_abort_meanwhile_is_not_lost(tiny: Path, slow: Slow) -> None:
    with serving(tiny, slow) as front:
        number = front.submit("one", "other", logits_processors={"slow": {"what": "new"}})
        becomes(lambda: ("new", True) in slow.begun)
        front.abort("one")
        slow.go.set()
        becomes(lambda: len(front.outputs("other")) == 400)
        assert isinstance(front.answer(number), Accepted)
        assert [output.finish_reason for output in front.outputs("one")] == ["abort"]


def test_a_refusal_is_told(tiny: Path, slow: Slow) -> None:
    slow.go.set()
    with serving(tiny, slow) as front:
        number = front.submit("a", logits_processors={"slow": {"what": "refused"}})
        becomes(lambda: front.answer(number))
        refused = front.answer(number)
        assert isinstance(refused, Refused)
        assert "not this one" in refused.text
        assert refused.field == "logits_processors"
        unknown = front.submit("b", logits_processors={"slw": {}})
        becomes(lambda: isinstance(front.answer(unknown), Refused))


def test_the_example_is_made_at_the_start(tiny: Path, slow: Slow) -> None:
    with serving(tiny, slow):
        becomes(lambda: EXAMPLE["what"] in slow.known)
