"""Engines that die, get stuck or never come up: everybody waiting is told in seconds, and the engine comes back."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastgen.config import EngineConfig
from fastgen.core.loop import Submission
from fastgen.errors import CheckpointError, EngineClosedError, FastgenError
from fastgen.front.verbs import Verbs
from fastgen.server.admission import DrainingError
from fastgen.server.replicas import Replicas
from fastgen.server.settings import ServerConfig
from fastgen.testing.children import Holdings, wait_until
from fastgen.testing.scripted_worker import MODULE
from fastgen.types import Chunk, SamplingParams, TokenLogprob

SECONDS = 20
CONFIG = EngineConfig()


@contextmanager
def serving(model: str, **settings: Any) -> Iterator[tuple[Replicas, Verbs]]:
    """Replicas of a scripted engine, and verbs over them."""
    replicas = Replicas(model, CONFIG, ServerConfig(**settings), module=MODULE)
    try:
        replicas.start()
        yield replicas, Verbs(replicas, tokenizer=replicas.tokenizer, config=CONFIG, max_model_len=10_000)
    finally:
        replicas.close()


def pid_of(replicas: Replicas, index: int = 0) -> int:
    pid = replicas.replicas()[index].pid
    assert pid is not None
    return pid


def kill(replicas: Replicas, index: int = 0) -> None:
    os.kill(pid_of(replicas, index), signal.SIGKILL)


def stop(replicas: Replicas) -> None:
    os.kill(pid_of(replicas), signal.SIGSTOP)


FAULTS: dict[str, tuple[Callable[[Replicas, Verbs], object], str]] = {
    "killed": (lambda replicas, verbs: kill(replicas), "process died before the request ended"),
    "leaves": (lambda replicas, verbs: verbs.stream("EXIT now"), "process died before the request ended"),
    "raises": (lambda replicas, verbs: verbs.stream("RAISE now"), "unexpected error: RuntimeError: the step is broken"),
    "stuck": (lambda replicas, verbs: verbs.stream("SLEEP now"), r"took more than 1 seconds \(step_timeout\)"),
    "stopped": (lambda replicas, verbs: stop(replicas), r"silent for 1.5 seconds \(heartbeat_timeout\)"),
    "garbage": (lambda replicas, verbs: verbs.stream("GARBAGE now"), "sent what is no message"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "words"), FAULTS.values(), ids=FAULTS)
def test_e6_everybody_is_told_and_the_engine_comes_back(
    scripted: str, fault: Callable[[Replicas, Verbs], object], words: str
) -> None:
    before = Holdings()
    settings = {"step_timeout": 1.0, "heartbeat_timeout": 1.5}
    with serving(scripted, **settings) as (replicas, verbs), ThreadPoolExecutor(8) as pool:
        first = pid_of(replicas)
        streams = [verbs.stream(f"SLOW {'x' * 2000}") for _ in range(3)]
        for stream in streams:
            next(stream)
        waiting = pool.submit(verbs, f"SLOW {'y' * 2000}")
        wait_until(lambda: replicas.in_flight == 4)
        with suppress(EngineClosedError):  # it may be gone before it has answered
            fault(replicas, verbs)
        for stream in streams:
            with pytest.raises(EngineClosedError, match=words):
                list(stream)
        with pytest.raises(EngineClosedError, match=words):
            waiting.result(SECONDS)
        assert replicas.state in ("restarting", "ready")
        assert replicas.in_flight == 0
        wait_until(lambda: replicas.state == "ready")
        assert verbs("hello").text == "hello"
        (replica,) = replicas.replicas()
        assert (replica.restarts, replica.detail) == (1, "")
        assert replica.pid != first
        assert not psutil.pid_exists(first)
    assert Holdings() == before


class Slow:
    """A sink that takes its time, in the thread that reads from the engine."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.over = threading.Event()
        self.chunks: list[Chunk] = []
        self.errors: list[FastgenError] = []

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        pass

    def chunk(self, chunk: Chunk) -> None:
        if not self.chunks:
            time.sleep(self.seconds)
        self.chunks.append(chunk)
        if chunk.usage is not None:
            self.over.set()

    def fail(self, error: FastgenError) -> None:
        self.errors.append(error)
        self.over.set()


@pytest.mark.slow
def test_a_front_that_is_slow_itself_takes_no_engine_for_dead(scripted: str) -> None:
    with serving(scripted, heartbeat_timeout=1.0) as (replicas, _):
        sink = Slow(3.0)
        replicas.submit([Submission("slow", list(b"abc"), SamplingParams(), sink)]).result(SECONDS)
        assert sink.over.wait(SECONDS)
        assert (len(sink.chunks), sink.errors) == (3, [])
        assert replicas.replicas()[0].restarts == 0


class Held(Slow):
    """Waits with its prompt's log-probabilities until it is let go."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.go = threading.Event()
        self.came: list[object] = []

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        assert self.go.wait(SECONDS)
        self.came.append(entries)

    def chunk(self, chunk: Chunk) -> None:
        self.came.append(chunk)
        super().chunk(chunk)


def test_nobody_waits_for_the_scores_of_a_long_prompt(scripted: str) -> None:
    before = Holdings()
    with serving(scripted) as (replicas, verbs):
        sink = Held()
        params = SamplingParams(prompt_logprobs=1)
        replicas.submit([Submission("held", list(b"abc"), params, sink)]).result(SECONDS)
        assert verbs("hello").text == "hello"
        assert sink.came == []
        sink.go.set()
        assert sink.over.wait(SECONDS)
        scores, *chunks = sink.came
        assert isinstance(scores, list)
        assert [None if one is None else one.token for one in scores] == [None, "b", "c"]
        assert chunks == sink.chunks
        assert [chunk.token_ids for chunk in sink.chunks] == [[one] for one in b"abc"]
        replicas.submit([Submission("held again", list(b"abc"), params, last := Held())]).result(SECONDS)
        kill(replicas)
        wait_until(lambda: replicas.state == "restarting")
        last.go.set()
        assert last.over.wait(SECONDS)  # once, whether it was the answer or the end
        assert len(last.errors) + sum(chunk.usage is not None for chunk in last.chunks) == 1
        wait_until(lambda: replicas.state == "ready")
    assert Holdings() == before


def test_cutting_off_leaves_nothing_to_come(scripted: str) -> None:
    with serving(scripted) as (replicas, verbs):
        stream = verbs.stream(f"SLOW {'x' * 2000}")
        next(stream)
        replicas.cut_off()
        assert [chunk.finish_reason for chunk in stream][-1] == "abort"
        with pytest.raises(DrainingError, match="shutting down"):
            verbs("admitted before, handed in now")
        assert replicas.in_flight == 0


@pytest.mark.slow
def test_a_system_that_has_nothing_to_give_is_asked_again(scripted: str) -> None:
    """No file descriptor is to be had while the engine is to come back."""
    with serving(scripted) as (replicas, verbs):
        pid = pid_of(replicas)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: "could not be started" in replicas.detail or replicas.state == "failed")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert replicas.state == "restarting"
        assert "Too many open files" in replicas.detail
        wait_until(lambda: replicas.state == "ready")
        assert verbs("hello").text == "hello"


CHANGES = """
import sys
from pathlib import Path
import dataclasses
from fastgen.testing.scripted_worker import load
from fastgen.wire.messages import Start
from fastgen.wire.worker import leave, main

def other(start: Start):
    engine, ready = load(start)
    mark = Path(start.model.partition(" ")[2])
    revisions = mark.read_text().split() if mark.exists() else []
    revisions.append(start.config.get("revision") or "none")
    mark.write_text(" ".join(revisions))
    CHANGE
    return engine, ready

if __name__ == "__main__":
    leave(main(load=other))
"""


@contextmanager
def changing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str
) -> Iterator[tuple[Replicas, Path]]:
    """Replicas of an engine that tells what `change` makes of `ready`, and the file with the revisions asked for."""
    (tmp_path / f"{name}.py").write_text(CHANGES.replace("CHANGE", change))
    monkeypatch.syspath_prepend(tmp_path)
    mark = tmp_path / "revisions"
    replicas = Replicas(f"echo {mark}", CONFIG, ServerConfig(max_restarts=3), module=name)
    try:
        replicas.start()
        yield replicas, mark
    finally:
        replicas.close()


@pytest.mark.slow
def test_it_comes_back_with_the_same_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = f'"{tmp_path}/models--" + start.model.replace("/", "--") + "/snapshots/c0ffee"'
    with changing(tmp_path, monkeypatch, "fetches", f"ready.directory = {cache}") as (replicas, mark):
        kill(replicas)
        wait_until(lambda: replicas.replicas()[0].restarts == 1 and replicas.state == "ready")
        assert mark.read_text().split() == ["none", "c0ffee"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ready.directory += str(len(revisions))", "directory is '.*2' and was '.*1'"),
        (
            "ready.info = dataclasses.replace(ready.info, vocab_size=256 + len(revisions))",
            "vocab_size is 258 and was 257",
        ),
    ],
)
def test_another_model_is_not_taken_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, words: str
) -> None:
    with changing(tmp_path, monkeypatch, "changes", change) as (replicas, _):
        kill(replicas)
        wait_until(lambda: replicas.state in ("failed", "ready") and replicas.replicas()[0].restarts == 1)
        assert replicas.state == "failed"
        assert re.search(f"not the one that the server started with: {words}", replicas.detail)


def test_while_it_comes_back_requests_are_refused_at_once(scripted: str) -> None:
    with serving(scripted) as (replicas, verbs):
        kill(replicas)
        wait_until(lambda: replicas.state == "restarting")
        with pytest.raises(EngineClosedError, match=r"no engine is ready.*(has just died|signal SIGKILL)"):
            verbs("hello")
        wait_until(lambda: "again" in replicas.detail)
        with pytest.raises(EngineClosedError, match=r"no engine is ready.*signal SIGKILL"):
            verbs("hello")
        assert not replicas.closed
        wait_until(lambda: replicas.state == "ready")
        assert verbs("hello").text == "hello"


@pytest.mark.slow
def test_bounded_restarts(scripted: str) -> None:
    with serving(scripted, max_restarts=1) as (replicas, verbs):
        kill(replicas)
        wait_until(lambda: replicas.state == "restarting")
        wait_until(lambda: replicas.state == "ready")
        kill(replicas)
        wait_until(lambda: replicas.state == "failed")
        (replica,) = replicas.replicas()
        assert "given up after 1 restarts within ten minutes (max_restarts)" in replica.detail
        assert replica.pid is None
        assert replicas.closed
        replicas.drain()
        assert replicas.state == "failed"  # nothing drains here
        with pytest.raises(EngineClosedError, match="given up"):
            verbs("hello")


@pytest.mark.slow
def test_an_engine_that_never_comes_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = f"leaves-later {tmp_path_factory.mktemp('mark')}"
    with serving(model, max_restarts=2) as (replicas, _):
        kill(replicas)
        wait_until(lambda: replicas.state == "failed")
        assert "ended before it was ready: it exited with code 9" in replicas.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        ("refuses", CheckpointError, "the files of this model are not there"),
        ("raises", FastgenError, "^ValueError: a plugin's fault$"),
        ("leaves", EngineClosedError, "given up after 1 restarts.*code 9\nIts last lines were:\nout of memory"),
    ],
)
def test_a_model_that_cannot_be_loaded(model: str, kind: type[FastgenError], words: str) -> None:
    before = Holdings()
    with pytest.raises(kind, match=f"(?s){words}"), serving(model, max_restarts=1):
        pass
    assert Holdings() == before


def test_e6_killed_before_it_is_ready(scripted: str) -> None:
    """It is tried again; negative control: the first process is gone."""
    replicas = Replicas("loads", CONFIG, ServerConfig(max_restarts=1), module=MODULE)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(replicas.start)
        wait_until(lambda: replicas.detail == "loading the model")
        assert replicas.state == "starting"
        first = pid_of(replicas)
        kill(replicas)
        wait_until(lambda: replicas.detail == "loading the model" and replicas.replicas()[0].pid not in (None, first))
        assert not psutil.pid_exists(first)
        kill(replicas)
        with pytest.raises(EngineClosedError, match=r"(?s)given up after 1 restarts.*SIGKILL"):
            started.result(SECONDS)
    replicas.close()


def test_closing_while_it_loads() -> None:
    before = Holdings()
    replicas = Replicas("loads", CONFIG, ServerConfig(), module=MODULE)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(replicas.start)
        wait_until(lambda: replicas.detail == "loading the model")
        replicas.close()
        with pytest.raises(EngineClosedError, match="shutting down"):
            started.result(SECONDS)
    assert Holdings() == before


def test_an_engine_that_takes_too_long() -> None:
    words = r"not ready within 1.5 seconds \(start_timeout\)"
    with pytest.raises(EngineClosedError, match=words), serving("loads", start_timeout=1.5, max_restarts=0):
        pass


def test_closing_ends_what_is_in_flight(scripted: str) -> None:
    with serving(scripted) as (replicas, verbs):
        stream = verbs.stream(f"SLOW {'x' * 2000}")
        next(stream)
        replicas.close()
        with pytest.raises(EngineClosedError, match="shutting down"):
            list(stream)
        with pytest.raises(EngineClosedError, match="shutting down"):
            verbs("hello")
        replicas.close()


def test_aborting_all_gives_last_chunks(scripted: str) -> None:
    with serving(scripted) as (replicas, verbs):
        stream = verbs.stream(f"SLOW {'x' * 2000}")
        next(stream)
        replicas.abort_all()
        last: Chunk = list(stream)[-1]
        assert last.finish_reason == "abort"
        assert last.usage is not None


@pytest.mark.slow
def test_an_idle_engine_is_left_alone(scripted: str) -> None:
    with serving(scripted, heartbeat_timeout=1.0, step_timeout=1.0) as (replicas, verbs):
        first = pid_of(replicas)
        time.sleep(2.5)
        assert verbs("hello").text == "hello"
        assert pid_of(replicas) == first


def test_a_child_takes_no_signals_of_the_terminal(scripted: str) -> None:
    with serving(scripted) as (replicas, verbs):
        stream = verbs.stream(f"SLOW {'x' * 20}")
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid_of(replicas), number)
        assert len(list(stream)) == 25
        assert replicas.replicas()[0].restarts == 0


PARENT = """
import sys, time
from fastgen.config import EngineConfig
from fastgen.server.replicas import Replicas
from fastgen.server.settings import ServerConfig
replicas = Replicas(sys.argv[1], EngineConfig(), ServerConfig(), module=sys.argv[2])
if __name__ == "__main__":
    replicas._supervisors[0].start()
    while not replicas.replicas()[0].pid or (sys.argv[1] != "loads" and replicas.state != "ready"):
        time.sleep(0.01)
    print(replicas.replicas()[0].pid, "torch" in sys.modules, flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("model", ["echo", "loads"])
def test_a_parent_that_is_killed_leaves_no_child(model: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, model, MODULE], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid, torch = parent.stdout.readline().split()
        child = psutil.Process(int(pid))
        assert child.is_running()
        parent.kill()
        parent.wait()
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        assert torch == "False"  # without a tokenizer, a front needs none
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


@pytest.mark.slow
def test_twenty_starts_and_stops_leave_nothing(scripted: str) -> None:
    with serving(scripted):
        pass
    before = Holdings()
    for round_ in range(20):
        with serving(scripted) as (replicas, verbs):
            if round_ % 2:
                verbs.stream(f"SLOW {'x' * 2000}")
            assert replicas.state == "ready"
    assert Holdings() == before
