"""The thread that owns the engine: every request ends exactly once, whatever happens, and nobody hangs."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.core import loop as loop_module
from fastgen.core.loop import CallerGone, EngineLoop, Submission
from fastgen.errors import EngineClosedError, FastgenError, InvalidRequestError
from fastgen.testing.scripted import ScriptedEngine
from fastgen.testing.tokenizers import build_byte_tokenizer, save_tokenizer
from fastgen.text import Tokenizer
from fastgen.types import Chunk, SamplingParams, StepOutput, TokenLogprob

SECONDS = 20


class Recorder:
    """A sink that writes down what comes and lets a test wait for the end."""

    def __init__(self, on_chunk: Callable[[Chunk], None] = lambda chunk: None) -> None:
        self.chunks: list[Chunk] = []
        self.errors: list[FastgenError] = []
        self.scores: list[TokenLogprob | None] | None = None
        self.over = threading.Event()
        self.started = threading.Event()
        self._on_chunk = on_chunk

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        assert not self.chunks
        self.scores = entries

    def chunk(self, chunk: Chunk) -> None:
        assert not self.over.is_set()
        self.chunks.append(chunk)
        self.started.set()
        if chunk.usage is not None:
            self.over.set()
        self._on_chunk(chunk)

    def fail(self, error: FastgenError) -> None:
        assert not self.over.is_set()
        self.errors.append(error)
        self.over.set()

    def wait(self) -> Recorder:
        assert self.over.wait(SECONDS)
        return self

    def of(self, index: int) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.index == index]

    def text(self, index: int = 0) -> str:
        return "".join(chunk.text for chunk in self.of(index))

    def ids(self, index: int = 0) -> list[int]:
        return [token for chunk in self.of(index) for token in chunk.token_ids]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = save_tokenizer(build_byte_tokenizer(), tmp_path_factory.mktemp("bytes"), eos_token="<eos>")
    return Tokenizer.load(directory)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    """Answers with the prompt, one byte a step."""
    return ScriptedEngine(tokenizer)


@pytest.fixture
def loop(engine: ScriptedEngine) -> Iterator[EngineLoop]:
    made = EngineLoop(engine)
    yield made
    made.close(SECONDS)
    assert engine.closed


def new(loop: EngineLoop, text: str | bytes, **options: object) -> Submission:
    raw = text.encode() if isinstance(text, str) else text
    return Submission(loop.new_request_id(), list(raw), SamplingParams.of(**options), Recorder())


def ask(loop: EngineLoop, text: str | bytes, **options: object) -> Recorder:
    """Hand in one request and wait for its end."""
    request = new(loop, text, **options)
    loop.submit([request]).result(SECONDS)
    return recorder(request).wait()


def recorder(request: Submission) -> Recorder:
    assert isinstance(request.sink, Recorder)
    return request.sink


def hold(engine: ScriptedEngine) -> threading.Event:
    """Keep every step from ending until the event is set."""
    gate = threading.Event()

    def wait() -> None:
        assert gate.wait(SECONDS)

    engine.on_step = wait
    return gate


def test_tokens_become_chunks(loop: EngineLoop) -> None:
    came = ask(loop, "hé!")
    assert [chunk.text for chunk in came.chunks] == ["h", "", "é", "!"]
    assert came.ids() == list("hé!".encode())
    last = came.chunks[-1]
    assert (last.finish_reason, last.usage.prompt_tokens, last.usage.completion_tokens) == ("length", 4, 4)
    assert last.usage.cached_tokens == 2
    assert [chunk.usage for chunk in came.chunks[:-1]] == [None] * 3
    assert [chunk.finish_reason for chunk in came.chunks[:-1]] == [None] * 3


def test_b1_half_a_character_at_the_end_is_shown(loop: EngineLoop) -> None:
    assert ask(loop, b"a\xf0\x9f").text() == "a\ufffd"


def test_b3_everything_ends_with_the_token_that_completes_the_stop(loop: EngineLoop, engine: ScriptedEngine) -> None:
    came = ask(loop, "one STOP two", stop=["STOP"], logprobs=1)
    assert (came.text(), came.ids()) == ("one ", list(b"one STOP"))
    last = came.chunks[-1]
    assert (last.finish_reason, last.stop, last.usage.completion_tokens) == ("stop", "STOP", 8)
    assert [entry.token for chunk in came.chunks for entry in chunk.logprobs] == list("one STOP")
    assert len(engine.aborted) == 1
    assert ask(loop, "x").text() == "x"
    assert engine.steps < len("one STOP two") + 3


def test_b3_a_stop_in_the_token_of_the_limit_wins(loop: EngineLoop, engine: ScriptedEngine) -> None:
    last = ask(loop, "abSTOP", stop=["STOP"]).chunks[-1]
    assert (last.finish_reason, last.stop) == ("stop", "STOP")
    assert engine.aborted == []


def test_b3_held_text_comes_out_at_every_other_end(loop: EngineLoop) -> None:
    assert ask(loop, "abSTO", stop=["STOP"]).text() == "abSTO"
    came = ask(loop, b"abSTO", stop=["STOP"], stop_token_ids=[ord("O")])
    assert (came.text(), came.chunks[-1].stop) == ("abST", ord("O"))


def test_b3_include_stop(loop: EngineLoop) -> None:
    assert ask(loop, "one STOP two", stop="STOP", include_stop=True).text() == "one STOP"
    assert ask(loop, "ab.cd", stop_token_ids=[ord(".")]).text() == "ab"
    came = ask(loop, "ab.cd", stop_token_ids=[ord(".")], include_stop=True)
    assert (came.text(), came.ids()) == ("ab.", list(b"ab."))


def test_b3_a_stop_ends_its_own_choice_only(tokenizer: Tokenizer) -> None:
    answers = [b"one STOP two", b"no end in sight here", b"aSTOPb"]
    engine = ScriptedEngine(tokenizer, script=lambda prompt, index: list(answers[index]))
    loop = EngineLoop(engine)
    came = ask(loop, "prompt", n=3, stop="STOP")
    loop.close(SECONDS)
    assert [came.text(i) for i in range(3)] == ["one ", "no end in sight here", "a"]
    assert [came.of(i)[-1].finish_reason for i in range(3)] == ["stop", "length", "stop"]
    assert [chunk.usage is not None for chunk in came.chunks].count(True) == 1
    assert came.chunks[-1].usage.completion_tokens == 8 + 20 + 5
    assert sorted(engine.aborted) == [("request-0", 0), ("request-0", 2)]


def test_b4_the_prompt_does_not_count(tokenizer: Tokenizer) -> None:
    loop = EngineLoop(ScriptedEngine(tokenizer, script=lambda prompt, index: list(b"OP!")))
    assert ask(loop, "ST", stop="STOP").text() == "OP!"
    loop.close(SECONDS)


def test_prompt_logprobs_come_first_with_their_text(loop: EngineLoop) -> None:
    came = ask(loop, "abc", prompt_logprobs=1, logprobs=0)
    assert came.scores is not None
    assert [entry and (entry.token, [top.token for top in entry.top]) for entry in came.scores] == [
        None,
        ("b", ["b"]),
        ("c", ["c"]),
    ]


def test_without_tokenizer() -> None:
    loop = EngineLoop(ScriptedEngine(None))
    came = ask(loop, "abc", logprobs=0)
    assert (came.text(), came.ids()) == ("", list(b"abc"))
    with pytest.raises(InvalidRequestError, match="without a tokenizer") as caught:
        ask(loop, "abc", stop="b")
    assert caught.value.field == "stop"
    loop.close(SECONDS)


def test_a_batch_is_accepted_as_a_whole_or_not_at_all(loop: EngineLoop, engine: ScriptedEngine) -> None:
    batch = [new(loop, "good"), new(loop, ""), new(loop, "never reached")]
    with pytest.raises(InvalidRequestError, match="prompt 1 of 3") as caught:
        loop.submit(batch).result(SECONDS)
    assert caught.value.field == "prompt"
    assert engine.added == ["request-0"]
    assert engine.aborted == [("request-0", None)]
    assert ask(loop, "after").text() == "after"
    assert all(recorder(request).chunks == [] for request in batch)


def test_a_duplicate_id_is_refused_and_harms_no_one(loop: EngineLoop, engine: ScriptedEngine) -> None:
    gate = hold(engine)
    first = new(loop, "first")
    loop.submit([first]).result(SECONDS)
    refused = loop.submit([replace(first, sink=Recorder())])
    gate.set()
    with pytest.raises(InvalidRequestError, match="in use"):
        refused.result(SECONDS)
    assert recorder(first).wait().text() == "first"


def test_d8_abort_at_every_point(loop: EngineLoop, engine: ScriptedEngine) -> None:
    """Queued with its submission, while it runs, twice, after its end, and of nothing."""
    gate = hold(engine)
    loop.submit([new(loop, "busy")])
    early = new(loop, "early")
    loop.submit([early])
    loop.abort(early.request_id)
    running = new(loop, "running" * 50)
    loop.submit([running])
    gate.set()
    assert [chunk.finish_reason for chunk in recorder(early).wait().chunks] == ["abort"]
    assert recorder(running).started.wait(SECONDS)
    for _ in range(2):
        loop.abort(running.request_id)
    assert recorder(running).wait().chunks[-1].finish_reason in ("abort", "length")
    loop.abort(running.request_id)
    loop.abort("nobody")
    assert ask(loop, "next").text() == "next"


def test_d8_an_aborted_request_keeps_what_it_had(engine: ScriptedEngine) -> None:
    loop = EngineLoop(engine)
    request = new(loop, "abcdef" * 9, stop="fabcX", n=2)
    sink = recorder(request)
    sink._on_chunk = lambda chunk: loop.abort(request.request_id) if len(sink.chunks) == 18 else None
    loop.submit([request])
    sink.wait()
    loop.close(SECONDS)
    assert [sink.text(i) for i in range(2)] == ["abcdefabc"] * 2
    assert [chunk.finish_reason for chunk in sink.chunks[-2:]] == ["abort", "abort"]
    assert sink.chunks[-1].usage.completion_tokens == 18


def test_a_step_that_raises_fails_everyone_and_ends_the_loop(engine: ScriptedEngine) -> None:
    gate = hold(engine)
    loop = EngineLoop(engine)
    pending = [new(loop, "one"), new(loop, "two")]
    loop.submit(pending).result(SECONDS)
    late = loop.submit([new(loop, "late")])
    wait = engine.on_step

    def explode() -> None:
        wait()
        raise ZeroDivisionError("boom")

    engine.on_step = explode
    loop.submit([new(loop, "more")])
    gate.set()
    for request in pending:
        (error,) = recorder(request).wait().errors
        assert isinstance(error, EngineClosedError)
        assert "ZeroDivisionError: boom" in str(error)
    late.exception(SECONDS)
    assert loop.closed
    with pytest.raises(EngineClosedError, match="boom"):
        loop.submit([new(loop, "too late")])
    loop.close(SECONDS)
    assert engine.closed


def test_an_engine_that_loses_a_request_is_found_out(tokenizer: Tokenizer) -> None:
    class Forgetful(ScriptedEngine):
        def step(self) -> list[StepOutput]:
            super().step()
            self._choices.clear()
            return []

    loop = EngineLoop(Forgetful(tokenizer))
    (error,) = ask(loop, "abc").errors
    assert "forgot 1 requests" in str(error)


def test_e8_a_broken_detokenizer_ends_its_own_request(
    loop: EngineLoop, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold(engine)
    bad, good = new(loop, "bad", n=2), new(loop, "good")
    loop.submit([bad, good]).result(SECONDS)
    running = loop._requests[bad.request_id].collector

    def broken(token: int) -> str:
        raise ValueError("no such letter")

    monkeypatch.setattr(running._streams[1], "_feed", SimpleNamespace(push=broken))
    gate.set()
    assert recorder(good).wait().text() == "good"
    came = recorder(bad).wait()
    assert [came.of(i)[-1].finish_reason for i in range(2)] == ["error", "error"]
    assert came.chunks[-1].error == "ValueError: no such letter"
    assert came.chunks[-1].usage is not None
    assert (bad.request_id, None) in engine.aborted


def test_e8_a_broken_caller_ends_its_own_request(loop: EngineLoop, engine: ScriptedEngine) -> None:
    def gone(chunk: Chunk) -> None:
        raise RuntimeError("Event loop is closed")

    bad = replace(new(loop, "bad" * 100), sink=Recorder(gone))
    good = new(loop, "good")
    loop.submit([bad, good]).result(SECONDS)
    assert recorder(good).wait().text() == "good"
    assert engine.aborted == [(bad.request_id, None)]
    assert len(recorder(bad).chunks) == 2  # the first, and the last, which it was told in vain


def test_a_caller_that_is_gone_is_no_failure(
    loop: EngineLoop, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(chunk: Chunk) -> None:
        raise CallerGone("Event loop is closed")

    caplog.set_level(logging.DEBUG)
    left = replace(new(loop, "left" * 100), sink=Recorder(gone))
    loop.submit([left]).result(SECONDS)
    assert ask(loop, "good").text() == "good"
    assert engine.aborted == [(left.request_id, None)]
    assert len(recorder(left).chunks) == 1
    assert loop._requests == {}
    assert [r.levelname for r in caplog.records if left.request_id in r.getMessage()] == ["DEBUG"]


# ---- what plugins may raise, and where ---------------------------------------------------------------------------


class Death(BaseException):
    """Neither an Exception nor SystemExit."""


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


def test_e8_a_command_that_calls_sys_exit_hurts_no_one(loop: EngineLoop, engine: ScriptedEngine) -> None:
    gate = hold(engine)
    loop.submit([new(loop, "busy")]).result(SECONDS)
    futures = [loop.run(raising(SystemExit(2))), loop.run(lambda: "next"), loop.submit([new(loop, "x")])]
    gate.set()
    assert isinstance(futures[0].exception(SECONDS), SystemExit)
    assert [future.result(SECONDS) for future in futures[1:]] == ["next", None]
    assert ask(loop, "abc").text() == "abc"


def test_e8_a_batch_of_which_one_exits_is_not_accepted(loop: EngineLoop, engine: ScriptedEngine) -> None:
    engine.script = lambda prompt, index: raising(SystemExit(2))() if prompt == list(b"exit") else prompt
    batch = [new(loop, "good"), new(loop, "exit")]
    assert isinstance(loop.submit(batch).exception(SECONDS), SystemExit)
    assert ask(loop, "abc").text() == "abc"
    assert engine.aborted == [(batch[0].request_id, None)]
    assert recorder(batch[0]).chunks == []


def test_whatever_a_command_raises_nobody_waits_for_ever(engine: ScriptedEngine) -> None:
    gate = hold(engine)
    loop = EngineLoop(engine)
    running, waiting = new(loop, "running"), new(loop, "waiting")
    loop.submit([running]).result(SECONDS)
    futures = [loop.run(raising(Death("enough"))), loop.submit([waiting]), loop.run(lambda: None)]
    gate.set()
    errors = [future.exception(SECONDS) for future in futures]
    assert [type(error) for error in errors] == [Death, EngineClosedError, EngineClosedError]
    assert "Death: enough" in str(errors[1])
    (error,) = recorder(running).wait().errors
    assert "Death: enough" in str(error)
    loop.close(SECONDS)
    assert engine.closed


@pytest.mark.parametrize("where", ["detokenizer", "sink"])
def test_e8_sys_exit_in_the_way_out_ends_its_own_request(loop: EngineLoop, engine: ScriptedEngine, where: str) -> None:
    gate = hold(engine)
    bad, good = new(loop, "bad" * 50), new(loop, "good")
    loop.submit([bad, good]).result(SECONDS)
    if where == "sink":
        recorder(bad)._on_chunk = raising(SystemExit(2))
    else:
        loop._requests[bad.request_id].collector._streams[0]._feed = SimpleNamespace(push=raising(SystemExit(2)))
    gate.set()
    assert recorder(good).wait().text() == "good"
    assert recorder(bad).wait().chunks[-1].error == "it called sys.exit(2)"
    assert engine.aborted == [(bad.request_id, None)]


def test_a_death_in_a_step_and_in_a_caller_is_heard_by_everyone(engine: ScriptedEngine) -> None:
    gate = hold(engine)
    loop = EngineLoop(engine)
    requests = [new(loop, "one"), new(loop, "two")]
    recorder(requests[0]).fail = raising(Death())  # type: ignore[method-assign]
    loop.submit(requests).result(SECONDS)
    engine.step = raising(Death("in a step"))  # type: ignore[method-assign]
    gate.set()
    with suppress(EngineClosedError):
        loop.run(lambda: None).exception(SECONDS)
    (error,) = recorder(requests[1]).wait().errors
    assert "Death: in a step" in str(error)
    loop.close(SECONDS)
    assert engine.closed


# ---- finalisers, which run in the middle of any line -----------------------------------------------------------------


class Interrupting(ScriptedEngine):
    """Something happens in the loop's own thread when it looks for work, as if a finaliser ran there."""

    countdown = -1

    def act(self) -> None: ...

    @property
    def has_work(self) -> bool:
        self.countdown -= 1
        if self.countdown == 0:
            self.act()
        return bool(self._choices)


@pytest.mark.parametrize("look", [1, 2, 3])
@pytest.mark.parametrize("what", ["command", "abort", "stop"])
def test_what_a_finaliser_asks_of_its_own_thread_is_not_lost(tokenizer: Tokenizer, look: int, what: str) -> None:
    """Before and after the loop carries commands out, and when it is about to sleep; nothing wakes it afterwards."""
    engine = Interrupting(tokenizer)
    loop = EngineLoop(engine)
    came = threading.Event()

    def act() -> None:
        if what == "command":
            loop.run(came.set)
        elif what == "abort":
            loop._abort = lambda request_id: came.set()  # type: ignore[method-assign]
            loop.abort("some request")
        else:
            loop.stop()

    engine.act = act  # type: ignore[method-assign]
    engine.countdown = 1 << 30
    ask(loop, "a")
    loop.run(lambda: setattr(engine, "countdown", look)).result(SECONDS)
    if look == 3:
        loop.run(lambda: None).result(SECONDS)  # the first two looks were before it
    if what == "stop":
        loop._thread.join(SECONDS)
        assert engine.closed
    else:
        assert came.wait(SECONDS)
        loop.close(SECONDS)


def test_commands_from_real_collections_are_not_lost(loop: EngineLoop) -> None:
    """Each collection in the loop's thread, hundreds of them, gives a command."""
    futures: list[Future[None]] = []

    def collected(phase: str, _: object) -> None:
        if threading.current_thread() is loop._thread and len(futures) < 500:
            futures.append(loop.run(lambda: None))

    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        end = time.monotonic() + SECONDS
        while len(futures) < 500 and time.monotonic() < end:
            assert ask(loop, "abc").text() == "abc"
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert len(futures) == 500
    for future in futures:
        future.result(SECONDS)


def test_a_command_given_while_the_loop_ends_is_refused(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the loop looked for commands the last time, before the caller could know."""
    loop = EngineLoop(engine)

    def late() -> Future[None]:
        loop.close(SECONDS)
        return Future()

    monkeypatch.setattr(loop_module, "Future", late)
    assert isinstance(loop.run(lambda: None).exception(SECONDS), EngineClosedError)


def test_close_fails_what_runs_and_what_waits(engine: ScriptedEngine) -> None:
    gate = hold(engine)
    loop = EngineLoop(engine)
    running = new(loop, "running")
    loop.submit([running]).result(SECONDS)
    while not engine.steps:
        time.sleep(0.001)
    waiting = new(loop, "waiting")
    accepted = loop.submit([waiting])
    loop.stop()
    gate.set()
    loop.close(SECONDS)
    loop.close(SECONDS)
    assert [str(error) for error in recorder(running).wait().errors] == [
        "the engine was closed before the request ended"
    ]
    assert isinstance(accepted.exception(SECONDS), EngineClosedError)
    assert recorder(waiting).chunks == recorder(waiting).errors == []
    assert engine.closed
    with pytest.raises(EngineClosedError, match="closed"):
        loop.submit([new(loop, "x")])
    loop.abort("x")


def test_close_from_inside_does_not_wait_for_itself(engine: ScriptedEngine) -> None:
    loop = EngineLoop(engine)
    request = replace(new(loop, "abc"), sink=Recorder(lambda chunk: loop.close()))
    loop.submit([request])
    recorder(request).wait()
    loop.close(SECONDS)
    assert engine.closed


def test_idle_without_spinning(loop: EngineLoop, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(loop, "abc")
    looked = []
    monkeypatch.setattr(ScriptedEngine, "has_work", property(lambda self: looked.append(1) or bool(self._choices)))
    steps = engine.steps
    time.sleep(0.2)
    assert looked == []
    assert engine.steps == steps
    assert ask(loop, "def").text() == "def"


def test_commands_run_between_steps_and_their_errors_are_their_own(loop: EngineLoop, engine: ScriptedEngine) -> None:
    def wrong() -> None:
        raise KeyError("x")

    assert loop.run(lambda: threading.current_thread().name).result(SECONDS) == "fastgen-engine"
    with pytest.raises(KeyError):
        loop.run(wrong).result(SECONDS)
    assert ask(loop, "abc").text() == "abc"


def test_a_cancelled_command_is_not_carried_out(loop: EngineLoop, engine: ScriptedEngine) -> None:
    gate = hold(engine)
    loop.submit([new(loop, "busy")]).result(SECONDS)
    cancelled: Future[None] = loop.submit([new(loop, "never")])
    assert cancelled.cancel()
    gate.set()
    assert ask(loop, "abc").text() == "abc"
    assert engine.added == ["request-0", "request-2"]


def test_many_threads(loop: EngineLoop) -> None:
    """300 requests from 10 threads, some aborted, some with stop strings: each ends once with its own text."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(30):
                text = f"<{number} {turn}>" * 3
                if turn % 3 == 0:
                    request = new(loop, text)
                    loop.submit([request])
                    loop.abort(request.request_id)
                    assert text.startswith(recorder(request).wait().text())
                elif turn % 3 == 1:
                    assert ask(loop, text, stop=">").text() == f"<{number} {turn}"
                else:
                    assert ask(loop, text).text() == text
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert failures == []
    assert loop._requests == {}


LEAVE = """
import threading, time
from fastgen.core.loop import EngineLoop, Submission
from fastgen.testing.scripted import ScriptedEngine
from fastgen.types import SamplingParams
engine = ScriptedEngine(None, script=lambda prompt, index: [1] * 10**6, on_step=lambda: time.sleep(0.01))
loop = EngineLoop(engine)
class Sink:
    def prompt_logprobs(self, entries): pass
    def chunk(self, chunk): pass
    def fail(self, error): print("failed:", error)
loop.submit([Submission("a", [1], SamplingParams(), Sink())]).result()
"""


def test_a_loop_nobody_closed_does_not_keep_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "failed: the engine was closed before the request ended\n"


def test_a_step_without_end_does_not_keep_the_interpreter_for_ever() -> None:
    script = f"import fastgen.core.loop as module; module.EXIT_SECONDS = 0.2{LEAVE.replace('0.01', '600')}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert loop_module.EXIT_SECONDS > 0.2
