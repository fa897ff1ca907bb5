"""The pipeline's verbs, against an engine with written answers and against a tiny model."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastgen
from fastgen import api
from fastgen.core.collector import Collector, ResponseBuilder
from fastgen.core.loop import CallerGone
from fastgen.core.plugin import registered
from fastgen.core.policy import Sequence
from fastgen.errors import ConfigError, EngineClosedError, InvalidRequestError
from fastgen.front import ChunkStream, Pipeline
from fastgen.front.events import Doorbell
from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.scripted import ScriptedEngine
from fastgen.testing.tokenizers import byte_tokenizer
from fastgen.text import Tokenizer
from fastgen.types import Chunk, Response, SamplingParams

pytestmark = pytest.mark.slow


SECONDS = 20
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    """Answers with the prompt, one byte a step; choices after the first are longer."""
    return ScriptedEngine(tokenizer, script=lambda prompt, index: prompt + [ord("!")] * index)


@pytest.fixture
def pipe(engine: ScriptedEngine) -> Iterator[Pipeline]:
    with Pipeline(engine) as made:  # type: ignore[arg-type]
        yield made
    assert engine.closed


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def slow(engine: ScriptedEngine, steps: int = 10_000) -> None:
    """Answers without end, at a thousand tokens a second."""
    engine.script = lambda prompt, index: [ord("x")] * steps
    engine.on_step = lambda: time.sleep(0.001)


def same(response: Response, other: Response) -> bool:
    """Equal but for the request's name."""
    return replace(response, request_id="") == replace(other, request_id="")


# ---- completions -----------------------------------------------------------------------------------------------------


def test_one_prompt_one_response(pipe: Pipeline) -> None:
    response = pipe("hé")
    assert isinstance(response, Response)
    assert (response.text, response.prompt) == ("hé", "hé")
    assert response.token_ids == response.prompt_token_ids == list("hé".encode())
    assert (response.finish_reason, response.usage.total_tokens, response.logprobs) == ("length", 6, None)


def test_a_list_gives_a_list_in_its_order(pipe: Pipeline) -> None:
    texts = ["long " * 20, "b", "middle " * 5, "d"]
    assert [response.text for response in pipe(texts)] == texts
    assert [response.text for response in pipe(tuple(texts))] == texts
    assert [response.text for response in pipe(["one"])] == ["one"]
    assert pipe([]) == []


def test_token_ids_one_list_or_several(pipe: Pipeline) -> None:
    response = pipe(prompt_token_ids=[97, 98])
    assert (response.text, response.prompt, response.prompt_token_ids) == ("ab", None, [97, 98])
    assert [response.text for response in pipe(prompt_token_ids=[[97], [98, 99]])] == ["a", "bc"]
    assert pipe(prompt_token_ids=(97,)).text == "a"
    assert pipe(prompt_token_ids=np.array([97, 98])).text == "ab"
    assert [response.text for response in pipe(prompt_token_ids=torch.tensor([[97], [98]]))] == ["a", "b"]
    assert [response.text for response in pipe(prompt_token_ids=[np.array([97])])] == ["a"]
    assert pipe(prompt_token_ids=[97], add_special_tokens=False).prompt_token_ids == [97]


@pytest.mark.parametrize(
    ("arguments", "words", "field"),
    [
        ({}, "prompts .* or prompt_token_ids", "prompts"),
        ({"prompts": "a", "prompt_token_ids": [1]}, "one of the two", "prompts"),
        ({"prompts": 5}, "string or a list of strings", "prompts"),
        ({"prompts": b"a"}, "string or a list of strings", "prompts"),
        ({"prompts": [1, 2]}, r"prompt 0 of 2 .*token ids go into prompt_token_ids", "prompts"),
        ({"prompts": ["a", USER[0]]}, r"prompt 1 of 2 .*go to chat\(\)", "prompts"),
        ({"prompts": ""}, "the prompt is empty", "prompts"),
        ({"prompts": ["a", "", "b"]}, r"prompt 1 of 3 \(the first is 0\): the prompt is empty", "prompts"),
        ({"prompts": ["a", "b\ud800"]}, r"prompt 1 of 2 .*surrogate", "prompt"),
        ({"prompt_token_ids": []}, "is empty", "prompt_token_ids"),
        ({"prompt_token_ids": [[97], []]}, r"prompt 1 of 2 .*has 0 tokens", "prompt"),
        ({"prompt_token_ids": [97, [98]]}, "must be a list of ints", "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "must be a list of ints", "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "must be a list of ints", "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "must be a list of ints", "prompt_token_ids"),
        ({"prompt_token_ids": [97], "add_special_tokens": True}, "taken as they are", "add_special_tokens"),
        ({"prompts": "a", "temprature": 1}, "'temprature'.*Did you mean 'temperature'", "temprature"),
        ({"prompts": "a", "temperature": float("nan")}, "temperature", "temperature"),
        ({"prompts": "a", "max_new_tokens": "5"}, "max_new_tokens", "max_new_tokens"),
        ({"prompts": "a", "stop": ""}, "empty stop string", "stop"),
        ({"prompts": "a", "params": {"n": 2}}, "must be a SamplingParams", "params"),
        ({"prompts": ["a", "b" * 20_000]}, r"prompt 1 of 2 .*20000 tokens", "prompt"),
    ],
)
def test_what_cannot_run_is_refused_and_nothing_runs(
    pipe: Pipeline, engine: ScriptedEngine, arguments: dict[str, Any], words: str, field: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        pipe(**arguments)
    assert caught.value.field == field
    assert pipe("after").text == "after"
    assert engine.steps <= 6


def test_sampling_options_are_laid_over_params(pipe: Pipeline) -> None:
    params = SamplingParams(max_new_tokens=3, logprobs=0)
    response = pipe("abcdef", params, max_new_tokens=2)
    assert (response.text, len(response.logprobs)) == ("ab", 2)
    assert pipe("abcdef", params=params).text == "abc"


@pytest.mark.parametrize("stops", ["d", ["d"], ("x", "d")])
def test_b4_stop_takes_a_string_or_a_list(pipe: Pipeline, stops: Any) -> None:
    response = pipe("abcdef", stop=stops)
    assert (response.text, response.stop, response.finish_reason) == ("abc", "d", "stop")
    assert pipe("abcdef", stop=None).text == pipe("abcdef", stop=[]).text == "abcdef"


def test_logprobs_carry_the_text_of_their_tokens(pipe: Pipeline) -> None:
    response = pipe("aé", logprobs=1, prompt_logprobs=0)
    assert [entry.token for entry in response.logprobs] == ["a", "\ufffd", "\ufffd"]
    assert [entry.logprob for entry in response.logprobs] == [-97, -0xC3, -0xA9]
    assert response.logprobs[0].top[0].token == "a"
    assert [entry and entry.token for entry in response.prompt_logprobs] == [None, "\ufffd", "\ufffd"]


def test_special_tokens_in_the_answer(pipe: Pipeline) -> None:
    """258 is <pad>; 257 is <eos> and ends the answer."""
    ids = [97, 258, 98, 257, 99]
    response = pipe(prompt_token_ids=ids)
    assert (response.text, response.stop, response.token_ids) == ("ab", 257, ids[:4])
    assert pipe(prompt_token_ids=ids, skip_special_tokens=False).text == "a<pad>b"
    assert pipe(prompt_token_ids=ids, skip_special_tokens=False, include_stop=True).text == "a<pad>b<eos>"
    assert pipe(prompt_token_ids=ids, ignore_eos=True).text == "abc"


# ---- streams ---------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": ["ef"]},
    "stop kept": {"stop": ["ef"], "include_stop": True},
    "length": {"max_new_tokens": 4},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "n": {"n": 3, "stop": ["z!!"], "logprobs": 0},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_streamed_equals_whole(pipe: Pipeline, options: dict[str, Any]) -> None:
    text = "abc😀defz"
    stream = pipe.stream(text, **options)
    chunks = list(stream)
    whole = pipe(text, **options)
    assert same(stream.response(), whole)
    assert stream.prompt_logprobs == whole.prompt_logprobs
    for index, choice in enumerate(whole.choices):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert [token for chunk in own for token in chunk.token_ids] == choice.token_ids
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert (own[-1].stop, own[-1].error) == (choice.stop, choice.error)
    assert [chunk.usage for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.usage]
    assert same(asyncio.run(pipe.acall(text, **options)), whole)
    assert [replace(c, request_id="") for c in asyncio.run(collect(pipe.astream(text, **options)))] == [
        replace(c, request_id="") for c in chunks
    ]


async def collect(stream: Any) -> list[Chunk]:
    return [chunk async for chunk in stream]


def test_a_stream_is_refused_at_once(pipe: Pipeline, engine: ScriptedEngine) -> None:
    for arguments in ({"prompt": ""}, {"prompt": ["a", "b"]}, {"prompt": "a", "tmperature": 1}, {}):
        with pytest.raises(InvalidRequestError):
            pipe.stream(**arguments)
    assert engine.added == []


def aborted(engine: ScriptedEngine) -> bool:
    return len(engine.aborted) > 0 and not engine.has_work


def test_d8_closing_a_stream_early_aborts_it(pipe: Pipeline, engine: ScriptedEngine) -> None:
    slow(engine)
    stream = pipe.stream("a")
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    wait_until(lambda: aborted(engine))
    with pytest.raises(ValueError, match="not been read to its end"):
        stream.response()


@pytest.mark.parametrize("read", [0, 2])
def test_d8_dropping_a_stream_early_aborts_it(pipe: Pipeline, engine: ScriptedEngine, read: int) -> None:
    slow(engine)
    stream = pipe.stream("a")
    for _ in range(read):
        next(stream)
    del stream
    wait_until(lambda: aborted(engine))


def test_leaving_the_block_of_a_stream_aborts_it(pipe: Pipeline, engine: ScriptedEngine) -> None:
    slow(engine)
    with pipe.stream("a") as stream:
        next(stream)
    wait_until(lambda: aborted(engine))


def test_a_stream_that_was_read_is_not_aborted(pipe: Pipeline, engine: ScriptedEngine) -> None:
    with pipe.stream("abc") as stream:
        assert len(list(stream)) == 3
    assert pipe("x").text == "x"
    assert engine.aborted == []


# ---- pipelines that nobody holds but a stream ------------------------------------------------------------------------

HOLDERS: dict[str, Callable[[Callable[[], Pipeline]], list[Chunk]]] = {
    "stream": lambda make: list(make().stream("hi")),
    "chat": lambda make: list(make().chat(USER, stream=True)),
    "astream": lambda make: asyncio.run(collect(make().astream("hi"))),
    "achat": lambda make: asyncio.run(collect(make().achat(USER, stream=True))),
}


@contextmanager
def no_collection() -> Iterator[None]:
    """Only what nothing refers to goes away."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def first_of(stream: Any) -> Chunk:
    return asyncio.run(anext(stream)) if hasattr(stream, "__anext__") else next(stream)


@pytest.mark.parametrize("read", HOLDERS.values(), ids=HOLDERS)
def test_a_stream_keeps_its_pipeline(engine: ScriptedEngine, read: Callable[..., list[Chunk]]) -> None:
    slow(engine, steps=30)
    chunks = read(lambda: Pipeline(engine))  # type: ignore[arg-type]
    assert "".join(chunk.text for chunk in chunks) == "x" * 30
    wait_until(lambda: engine.closed)


@pytest.mark.parametrize("verb", ["stream", "astream"])
def test_a_stream_lets_go_of_its_pipeline(engine: ScriptedEngine, verb: str) -> None:
    """At its end, though it is kept for its response; and when it is dropped, without waiting for a collection."""
    slow(engine, steps=30)
    pipe = Pipeline(engine)  # type: ignore[arg-type]
    gone = weakref.ref(pipe)
    with no_collection():
        streams = [getattr(pipe, verb)("hi") for _ in range(3)]
        del pipe
        if verb == "stream":
            list(streams[0])
            first_of(streams[1])
        else:
            asyncio.run(collect(streams[0]))
        assert streams[0].response().text == "x" * 30
        assert gone() is not None
        del streams[1:]
        assert gone() is None
        wait_until(lambda: engine.closed)
    assert streams[0].response().text == "x" * 30


def test_closing_a_stream_lets_go_of_its_pipeline(engine: ScriptedEngine) -> None:
    slow(engine)
    stream = Pipeline(engine).stream("hi")  # type: ignore[arg-type]
    next(stream)
    stream.close()
    assert list(stream) == []
    wait_until(lambda: engine.closed)


def interrupt_soon(engine: ScriptedEngine) -> None:
    wait_until(lambda: engine.steps > 3)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.parametrize("verb", ["call", "batch", "stream"])
def test_ctrl_c_aborts_what_runs(pipe: Pipeline, engine: ScriptedEngine, verb: str) -> None:
    slow(engine)
    verbs: dict[str, Callable[[], object]] = {
        "call": lambda: pipe("a"),
        "batch": lambda: pipe(["a", "b"], progress=True),
        "stream": lambda: list(pipe.stream("a")),
    }
    threading.Thread(target=interrupt_soon, args=(engine,)).start()
    with pytest.raises(KeyboardInterrupt):
        verbs[verb]()
    wait_until(lambda: not engine.has_work)
    assert {name for name, _ in engine.aborted} == set(engine.added)


# ---- event loops -----------------------------------------------------------------------------------------------------


def test_async_verbs(pipe: Pipeline) -> None:
    async def main() -> None:
        one, several, ids, chat = await asyncio.gather(
            pipe.acall("one"),
            pipe.acall(["a", "b"]),
            pipe.acall(prompt_token_ids=[[99]]),
            pipe.achat(USER),
        )
        assert (one.text, [r.text for r in several], ids[0].text) == ("one", ["a", "b"], "c")
        assert chat.text == "[user]hi"  # the prompt again, up to <eos>
        chunks = await collect(pipe.achat(USER, stream=True))
        assert "".join(chunk.text for chunk in chunks) == chat.text

    asyncio.run(main())


def test_async_refusals(pipe: Pipeline, engine: ScriptedEngine) -> None:
    async def main() -> None:
        with pytest.raises(InvalidRequestError, match="prompt 1 of 2"):
            await pipe.acall(["a", ""])
        with pytest.raises(InvalidRequestError, match="Did you mean"):
            await collect(pipe.astream("a", temperatur=1))
        with pytest.raises(InvalidRequestError, match="empty"):
            await pipe.achat([])

    asyncio.run(main())
    assert engine.added == []


@pytest.mark.parametrize("verb", ["acall", "astream", "batch"])
def test_d8_cancelling_aborts(pipe: Pipeline, engine: ScriptedEngine, verb: str) -> None:
    slow(engine)

    async def main() -> None:
        task: asyncio.Task[Any] = asyncio.ensure_future(
            {"acall": lambda: pipe.acall("a"), "batch": lambda: pipe.acall(["a", "b"])}.get(
                verb, lambda: collect(pipe.astream("a"))
            )()
        )
        while engine.steps < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until(lambda: not engine.has_work)
    assert {name for name, _ in engine.aborted} == set(engine.added)


@pytest.mark.parametrize("how", ["break", "aclose", "block"])
def test_d8_leaving_an_async_stream_early_aborts_it(pipe: Pipeline, engine: ScriptedEngine, how: str) -> None:
    slow(engine)

    async def main() -> None:
        stream = pipe.astream("a")
        if how == "block":
            async with stream:
                await anext(stream)
        else:
            async for _ in stream:
                break
        if how == "aclose":
            await stream.aclose()
            assert [chunk async for chunk in stream] == []

    asyncio.run(main())
    wait_until(lambda: aborted(engine))


def test_an_async_stream_nobody_read_ran_nothing(pipe: Pipeline, engine: ScriptedEngine) -> None:
    pipe.astream("a")
    assert pipe("b").text == "b"
    assert len(engine.added) == 1


def test_an_event_loop_that_went_away_hurts_no_one(pipe: Pipeline, engine: ScriptedEngine) -> None:
    slow(engine, steps=300)
    events = asyncio.new_event_loop()
    stream = pipe.astream("a")
    events.run_until_complete(anext(stream))
    events.close()
    assert pipe("b").text == "x" * 300
    del stream


def test_an_event_loop_is_woken_once_for_all_that_is_there() -> None:
    """Each wake-up is a system call, and a step may have a token for hundreds of streams."""
    wakes, came, odd = [], [], []

    def from_another_thread(function: Callable[[], None]) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join(SECONDS)  # the event loop does nothing meanwhile

    def fail() -> None:
        raise ArithmeticError

    async def main() -> Doorbell:
        events, doorbell = asyncio.get_running_loop(), Doorbell.here()
        assert Doorbell.here() is doorbell
        wake = events.call_soon_threadsafe
        events.call_soon_threadsafe = lambda *args: wakes.append(args) or wake(*args)
        events.set_exception_handler(lambda _, context: odd.append(type(context["exception"])))
        for round in range(3):
            from_another_thread(lambda: [doorbell.call(came.append, place) for place in range(100)])
            from_another_thread(lambda: doorbell.call(fail))
            from_another_thread(lambda: [doorbell.call(came.append, place) for place in range(100, 200)])
            assert len(wakes) == round + 1
            while len(came) < 200 * (round + 1):
                await asyncio.sleep(0)
        return doorbell

    doorbell = asyncio.run(main())
    assert came == [*range(200)] * 3
    assert odd == [ArithmeticError] * 3
    with pytest.raises(CallerGone, match="Event loop is closed"):
        doorbell.call(came.append, 1)
    gc.collect()
    assert doorbell._events() is None, "a closed loop is not kept"


def test_calls_that_were_not_delivered_keep_no_event_loop() -> None:
    """The last of them may hold tasks, and so the loop; and nobody may come who calls once more."""
    events = asyncio.new_event_loop()

    async def ring() -> None:
        running = asyncio.get_running_loop()
        Doorbell.here().call(running.stop)
        running.stop()

    task = events.create_task(ring())
    events.run_forever()
    assert task.exception() is None
    del task
    events.close()
    kept = weakref.ref(events)
    assert kept() is events
    del events
    gc.collect()
    assert kept() is None


def test_an_async_stream_closed_while_it_begins_runs_nothing(
    pipe: Pipeline, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, closed = threading.Event(), threading.Event()
    encode = pipe.tokenizer.encode

    def wait(text: str, **options: Any) -> list[int]:
        begun.set()
        assert closed.wait(SECONDS)
        return encode(text, **options)

    async def main() -> None:
        stream = pipe.astream("a")
        reading = asyncio.ensure_future(collect(stream))
        await asyncio.to_thread(begun.wait, SECONDS)
        await stream.aclose()
        closed.set()
        assert await reading == []

    monkeypatch.setattr(pipe.tokenizer, "encode", wait)
    asyncio.run(main())
    assert pipe.stats() == 0
    assert engine.added == []


@pytest.mark.parametrize("how", ["break", "cancel", "kept"])
def test_a_caller_who_left_is_not_worth_a_warning(
    pipe: Pipeline, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The event loop is closed before the request's next event: a broken-off stream, a cancelled call, and a stream
    that is neither read nor dropped."""
    slow(engine)
    caplog.set_level(logging.DEBUG)
    steps, kept = threading.Semaphore(0), []
    engine.on_step = lambda: steps.acquire(timeout=SECONDS) and None

    async def in_step(number: int) -> None:
        while engine.steps < number:
            await asyncio.sleep(0.001)
        for _ in range(10):  # what was on its way has come
            await asyncio.sleep(0)

    async def main() -> None:
        stream = pipe.astream("a")
        task = asyncio.ensure_future(pipe.acall("a") if how == "cancel" else anext(stream))
        await in_step(1)
        if how != "cancel":
            steps.release()
            assert (await task).text == "x"
            await in_step(2)
        if how == "kept":
            kept.append(stream)

    asyncio.run(main())
    engine.on_step = lambda: None
    steps.release(2)
    wait_until(lambda: aborted(engine))
    assert pipe.stats() > 0
    assert pipe.loop._requests == {}
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert any("Event loop is closed" in record.getMessage() for record in caplog.records)


def test_threads_and_event_loops_at_once(pipe: Pipeline) -> None:
    failures: list[BaseException] = []

    async def talk(number: int) -> None:
        texts = [f"{number}-{turn}-" * 5 for turn in range(10)]
        assert [r.text for r in await asyncio.gather(*(pipe.acall(text) for text in texts))] == texts
        for text in texts:
            assert "".join([chunk.text async for chunk in pipe.astream(text)]) == text

    def work(number: int) -> None:
        try:
            if number % 2:
                asyncio.run(talk(number))
                return
            for turn in range(10):
                text = f"{number} {turn} " * 4
                assert pipe(text).text == text
                assert "".join(chunk.text for chunk in pipe.stream(text)) == text
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert failures == []


# ---- chats -----------------------------------------------------------------------------------------------------------


def test_b6_one_code_path_for_chats(pipe: Pipeline, tokenizer: Tokenizer) -> None:
    response = pipe.chat(USER, ignore_eos=True)
    assert response.prompt == tokenizer.render_chat(USER)
    assert response.prompt_token_ids == tokenizer.encode_chat(USER) == response.token_ids
    stream = pipe.chat(USER, SamplingParams(ignore_eos=True), stream=True)
    assert isinstance(stream, ChunkStream)
    assert "".join(chunk.text for chunk in stream) == response.text
    assert same(stream.response(), response)


def test_b6_the_request_may_override_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_tokenizer(tmp_path, add_bos=True))
    with Pipeline(ScriptedEngine(tokenizer)) as pipe:  # type: ignore[arg-type]
        assert pipe("a").prompt_token_ids == [256, 97]
        assert pipe("a", add_special_tokens=False).prompt_token_ids == [97]
        assert pipe.chat(USER).prompt_token_ids.count(256) == 1
        assert pipe.chat(USER, add_special_tokens=True).prompt_token_ids.count(256) == 2
        assert pipe("").prompt_token_ids == [256]


def test_b7_chat_options_reach_the_template(pipe: Pipeline) -> None:
    template = "{{ messages | length }}{{ tools | tojson if tools }}{{ style }}{{ add_generation_prompt }}"
    response = pipe.chat(USER, template=template, tools=[{"a": 1}], template_variables={"style": "!"})
    assert response.prompt == '1[{"a": 1}]!True'
    messages = [*USER, {"role": "assistant", "content": "Sure"}]
    assert pipe.chat(messages, continue_final_message=True).prompt.endswith("[assistant]Sure")
    assert pipe.chat(messages, add_generation_prompt=False).prompt.endswith("Sure<eos>")


@pytest.mark.parametrize(
    ("messages", "options", "words", "field"),
    [
        ([], {}, "empty", "messages"),
        ("hi", {}, "list of dicts", "messages"),
        (USER, {"enable_thinking": True}, "template_variables", "enable_thinking"),
        (USER, {"template": "{{ raise_exception('not today') }}"}, "not today", "messages"),
        (USER, {"template_variables": {"tools": []}}, "may not set 'tools'", "tools"),
        (USER, {"add_generation_prompt": True, "continue_final_message": True}, "choose one", "continue_final_message"),
    ],
)
def test_chats_that_are_refused(
    pipe: Pipeline, engine: ScriptedEngine, messages: Any, options: dict[str, Any], words: str, field: str
) -> None:
    for stream in (False, True):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            pipe.chat(messages, stream=stream, **options)
        assert caught.value.field == field
    assert engine.added == []


def test_without_tokenizer() -> None:
    with Pipeline(ScriptedEngine(None)) as pipe:  # type: ignore[arg-type]
        response = pipe(prompt_token_ids=[5, 6])
        assert (response.text, response.token_ids) == ("", [5, 6])
        for verb in (lambda: pipe("a"), lambda: pipe.chat(USER)):
            with pytest.raises(InvalidRequestError, match="without a tokenizer; give prompt_token_ids"):
                verb()
        with pytest.raises(InvalidRequestError, match="stop strings cannot be found"):
            pipe(prompt_token_ids=[5], stop="a")


# ---- life ------------------------------------------------------------------------------------------------------------


def test_a_closed_pipeline_says_so(pipe: Pipeline) -> None:
    assert not pipe.closed
    pipe.close()
    pipe.close()
    assert pipe.closed
    for verb in (lambda: pipe("a"), lambda: pipe.stream("a"), lambda: pipe.chat(USER), pipe.stats):
        with pytest.raises(EngineClosedError, match="closed"):
            verb()
    with pytest.raises(EngineClosedError, match="closed"):
        asyncio.run(pipe.acall("a"))


def test_closing_ends_those_who_wait(pipe: Pipeline, engine: ScriptedEngine) -> None:
    slow(engine)
    errors: list[BaseException] = []

    def wait(verb: Callable[[], object]) -> None:
        with pytest.raises(EngineClosedError, match="closed before") as caught:
            verb()
        errors.append(caught.value)

    verbs = [lambda: pipe("a"), lambda: list(pipe.stream("b")), lambda: asyncio.run(pipe.acall("c"))]
    threads = [threading.Thread(target=wait, args=(verb,)) for verb in verbs]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(engine.added) == 3)
    pipe.close()
    for thread in threads:
        thread.join(SECONDS)
    assert len(errors) == 3


def test_an_engine_that_dies_says_what_of(pipe: Pipeline, engine: ScriptedEngine) -> None:
    def explode() -> None:
        raise MemoryError("no more")

    engine.on_step = explode
    for _ in range(2):
        with pytest.raises(EngineClosedError, match="MemoryError: no more"):
            pipe("a")


def test_a_dropped_pipeline_ends_its_thread(tokenizer: Tokenizer) -> None:
    before = threading.active_count()
    engines = [ScriptedEngine(tokenizer) for _ in range(20)]
    for engine in engines:
        made = Pipeline(engine)  # type: ignore[arg-type]
        assert made("a").text == "a"
        gone = weakref.ref(made)
        del made
        assert gone() is None
    wait_until(lambda: all(engine.closed for engine in engines) and threading.active_count() <= before)


def test_stats_are_read_between_steps(pipe: Pipeline) -> None:
    pipe("abc")
    assert pipe.stats() == 3


def test_progress_on_a_terminal_only(
    pipe: Pipeline, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(["a", "b"])
    assert capsys.readouterr().err == ""
    pipe(["a", "b"], progress=True)
    assert "2/2" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    pipe("one")
    assert capsys.readouterr().err == ""
    pipe(["a", "b"])
    assert "2/2" in capsys.readouterr().err
    pipe(["a", "b"], progress=False)
    assert capsys.readouterr().err == ""


# ---- a real engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "num_blocks": 64, "progress": False}


@pytest.fixture(scope="module")
def real(tiny: Path) -> Iterator[Pipeline]:
    with fastgen.pipeline(tiny, **OPTIONS) as made:
        yield made


def test_tiny_greedy_ids_equal_transformers(real: Pipeline, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    texts = ["Hello", "DeepSpeed is", "a😀"]
    for response in real(texts, max_new_tokens=12, temperature=0.0, ignore_eos=True, skip_special_tokens=False):
        prompt = torch.tensor([response.prompt_token_ids])
        out = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert response.token_ids == out[0, prompt.shape[1] :].tolist()
        assert response.text == real.tokenizer.decode(response.token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 3, "temperature": 1.0, "seed": 5}, {"logprobs": 2, "prompt_logprobs": 1}],
    ids=["greedy", "sampled", "scored"],
)
def test_tiny_streamed_equals_whole(real: Pipeline, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 20, "cache_salt": str(options), **options}
    stream = real.stream("The capital", **{**options, "cache_salt": f"{options} streamed"})
    list(stream)
    whole = real("The capital", **options)
    assert same(stream.response(), whole)
    if "logprobs" in options:
        assert all(len(entry.top) == 2 for entry in whole.logprobs)
        assert [entry is None for entry in whole.prompt_logprobs] == [True] + [False] * 10
        assert [entry.token for entry in whole.prompt_logprobs[1:]] == list("he capital")


def test_tiny_b3_stop_strings_end_at_their_token(real: Pipeline) -> None:
    """Whatever the model says, stopping at a piece of it gives the beginning of the same answer."""
    free = real("abc", max_new_tokens=30, ignore_eos=True, n=2, temperature=1.0, seed=1)
    tail = free.choices[0].text[10:13]
    held = real("abc", max_new_tokens=30, ignore_eos=True, n=2, temperature=1.0, seed=1, stop=[tail])
    for before, after in zip(free.choices, held.choices, strict=True):
        assert after.text == before.text.split(tail)[0]
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
    assert held.finish_reason == "stop"
    assert len(held.token_ids) < 30
    assert held.usage.completion_tokens == sum(len(choice.token_ids) for choice in held.choices)
    assert real.stats().running == 0


def test_tiny_refused_batch_leaves_nothing(real: Pipeline) -> None:
    before = real.stats()
    with pytest.raises(InvalidRequestError, match="prompt 1 of 3"):
        real(prompt_token_ids=[[97], [10**6], [98]])
    wait_until(lambda: real.stats().waiting == real.stats().running == 0)
    after = real.stats()
    assert (after.tokens, after.used_blocks) == (before.tokens, 0)


def test_tiny_abort_frees_its_blocks(real: Pipeline) -> None:
    stream = real.stream("abc", max_new_tokens=400, ignore_eos=True)
    next(stream)
    stream.close()
    wait_until(lambda: real.stats().used_blocks == 0)
    assert len(real("abc", max_new_tokens=5, ignore_eos=True).token_ids) == 5


class Exits:
    """A plugin that reads its options with argparse, which leaves by SystemExit."""

    @api.hookimpl
    def fastgen_logits_processors(self) -> list[Any]:
        return [api.LogitsProcessorSpec("exits", self.make)]

    def make(self, options: dict[str, Any], *, vocab_size: int, prompt_token_ids: list[int]) -> Any:
        if "after" not in options:
            argparse.ArgumentParser("exits").parse_args(["--unknown"])

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) == options["after"]:
                raise options["error"](2)
            return logits

        return process


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.fixture(scope="module")
def exits(tiny: Path) -> Iterator[Pipeline]:
    with registered(Exits(), name="exits"), fastgen.pipeline(tiny, **OPTIONS) as made:
        yield made


@pytest.mark.parametrize("prompts", ["a", ["a", "b"]], ids=["one", "several"])
def test_tiny_e8_a_processor_that_exits_while_it_is_made(exits: Pipeline, prompts: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"'exits' refused its options \{\}: it called sys.exit\(2\)"
    ) as caught:
        exits(prompts, logits_processors={"exits": {}})
    assert caught.value.field == "logits_processors"
    assert len(exits("a", max_new_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize(
    ("error", "words"), [(SystemExit, "it called sys.exit(2)"), (Unspeakable, "Unspeakable, whose text")]
)
def test_tiny_e8_a_processor_that_exits_ends_its_own_request(
    exits: Pipeline, error: type[BaseException], words: str
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    stream = exits.stream("abc", **options)
    bad = exits("a", logits_processors={"exits": {"after": 2, "error": error}}, **options)
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", 2)
    assert bad.error is not None
    assert bad.error.startswith(f"logits processor 'exits' failed: {words}")
    assert len(list(stream)) == 8
    assert stream.response().finish_reason == "length"


def test_tiny_nothing_is_left_behind(real: Pipeline) -> None:
    """200 random requests, of which some are refused, aborted, dropped unread, cancelled or fail."""
    rng = random.Random(0)
    kept: list[Any] = []

    def sampling() -> dict[str, Any]:
        stop = [rng.choice("abcdefg")] if rng.random() < 0.3 else []
        return {
            "max_new_tokens": rng.randint(1, 12),
            "n": rng.choice([1, 1, 3]),
            "temperature": 1.5,
            "stop": stop,
            "prompt_logprobs": rng.choice([None, 1]),
        }

    async def cancelled(text: str) -> None:
        task = asyncio.ensure_future(real.acall(text, **sampling()))
        await asyncio.sleep(rng.random() * 0.005)
        task.cancel()

    async def left(text: str) -> None:
        async for _ in real.astream(text, **sampling()):
            break

    for turn in range(200):
        text = "".join(rng.choices("abc ", k=rng.randint(1, 20)))
        match turn % 8:
            case 0:
                real(text, **sampling())
            case 1:
                real.stream(text, **sampling())
            case 2:
                next(real.stream(text, **sampling()))
            case 3:
                kept.append(real.stream(text, **sampling()))
            case 4:
                real.stream(text, **sampling()).close()
            case 5:
                asyncio.run(cancelled(text))
            case 6:
                asyncio.run(left(text))
            case 7:
                with pytest.raises(InvalidRequestError, match="prompt 1 of 2"):
                    real(prompt_token_ids=[[97], [10**6]])
    for stream in kept:
        list(stream)
    assert len({stream.response().request_id for stream in kept}) == 25
    del stream, kept
    wait_until(lambda: real.loop._requests == {} and not real.engine.has_work)
    stats = real.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    assert real.engine._requests == {}
    assert real.loop._commands.empty()
    gc.collect()
    left_over = [one for one in gc.get_objects() if type(one) in (Collector, ResponseBuilder, Sequence)]
    assert left_over == []


def test_engine_options_are_checked(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_batch_tokens'"):
        fastgen.pipeline(tiny, max_batch_token=5)


@pytest.mark.slow
def test_tiny_interpreter_leaves_an_unclosed_pipeline(tiny: Path) -> None:
    code = f"import fastgen; pipe = fastgen.pipeline({str(tiny)!r}, num_blocks=64, threads=1)\n"
    code += "stream = pipe.stream('abc', max_new_tokens=500, ignore_eos=True); next(stream); print('out')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "")


@pytest.mark.slow
def test_a_forked_process_is_told_and_does_not_hang(tmp_path):
    """gunicorn's preload and multiprocessing's fork get here; the engine's thread does not."""
    script = textwrap.dedent("""
        import os, signal, sys, fastgen
        from fastgen.testing.checkpoints import tiny_llama
        pipe = fastgen.pipeline(tiny_llama(sys.argv[1]), device="cpu", num_blocks=64, progress=False)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                pipe("a", max_new_tokens=2)
            except fastgen.EngineClosedError as error:
                os._exit(7 if "forked" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(pipe("a", max_new_tokens=2, ignore_eos=True).token_ids) == 2
    """)
    command = [sys.executable, "-c", script, str(tmp_path / "tiny")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
