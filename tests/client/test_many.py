"""One client for many: threads, event loops, batches; and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastgen.client import Client
from fastgen.errors import EngineClosedError, InvalidRequestError
from fastgen.front import Pipeline
from fastgen.testing.doors import Served, wait_until
from fastgen.testing.scripted import ScriptedEngine

pytestmark = pytest.mark.slow

Open = Callable[..., Served]


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fastgen-client"]


def test_many_threads(served: Served, client: Client, pipe: Pipeline) -> None:
    texts = [f"prompt {index}" for index in range(24)]
    expected = [pipe(text, max_new_tokens=3).token_ids for text in texts]

    def ask(text: str) -> list[int]:
        if text.endswith(("1", "5")):
            return [token for chunk in client.stream(text, max_new_tokens=3) for token in chunk.token_ids]
        if text.endswith("2"):
            return asyncio.run(client.acall(text, max_new_tokens=3)).token_ids
        return client(text, max_new_tokens=3).token_ids

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(ask, texts)) == expected
    wait_until(served.idle)


def test_a_batch_is_bounded_and_keeps_its_order(scripted: Open, engine: ScriptedEngine) -> None:
    engine.script = lambda prompt, index: prompt
    served = scripted()
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, served.admission.choices)
        time.sleep(0.001)

    engine.on_step = look
    texts = [f"{'long ' * (index % 3)}{index}" for index in range(20)]
    with Client(served.address, concurrency=3) as client:
        assert [response.text for response in client(texts)] == texts
        assert most == 3
        most = 0
        assert [response.text for response in client.with_options(concurrency=1)(texts[:4])] == texts[:4]
        assert most == 1


def test_one_bad_prompt_ends_the_batch(scripted: Open, engine: ScriptedEngine) -> None:
    served = scripted()
    with Client(served.address) as client:
        with pytest.raises(InvalidRequestError, match=r"prompt 2 of 3 \(the first is 0\): .*20000 tokens") as error:
            client(["a", "b", "c" * 20_000], max_new_tokens=9_000)
        assert error.value.field == "prompt"
        wait_until(lambda: not served.admission.choices and not engine.has_work)
        assert {name for name, _ in engine.aborted} == set(engine.added)


def test_a_bar_shows_how_far_a_batch_is(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    client(["a", "b"], max_new_tokens=2, progress=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "4 tokens" in shown
    client(["a", "b"], max_new_tokens=2)
    client(["a", "b"], max_new_tokens=2, progress=False)
    assert capsys.readouterr().err == ""


def test_a_client_that_is_dropped_or_closed_leaves_nothing(served: Served) -> None:
    gc.collect()
    wait_until(lambda: len(client_threads()) <= 1)  # the session's
    threads, files = len(client_threads()), _open_files()
    for index in range(20):
        made = Client(served.address)
        assert made("a", max_new_tokens=1).usage.completion_tokens == 1
        if index % 2:
            made.close()
        stream = made.stream("a", max_new_tokens=400) if not index % 2 else None
        del made, stream
    wait_until(lambda: len(client_threads()) <= threads)
    wait_until(served.idle)
    wait_until(lambda: _open_files() <= files + 2)
    unused = Client(served.address)
    assert len(client_threads()) <= threads
    unused.close()


def _open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_stream_outlives_its_client_object(served: Served) -> None:
    stream = Client(served.address).stream("a", max_new_tokens=20)
    gc.collect()
    assert sum(len(chunk.token_ids) for chunk in stream) == 20


def test_a_fork_says_that_it_is_one(client: Client) -> None:
    client("a", max_new_tokens=1)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            client("a")
        except EngineClosedError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        assert b"forked" in said.read()
    os.waitpid(child, 0)
