"""Streams over a connection: ended early by whoever has enough, and from the other side."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fastgen.client import Client, RequestTimeoutError, over_grpc
from fastgen.errors import EngineClosedError
from fastgen.testing.doors import Served, wait_until
from fastgen.testing.scripted import ScriptedEngine

pytestmark = pytest.mark.slow

Open = Callable[..., Served]

ENDLESS: dict[str, Any] = {"max_new_tokens": 9_000}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def gone(engine: ScriptedEngine) -> Callable[[], bool]:
    """Whether every request that was added has been aborted, and none runs."""
    return lambda: {name for name, _ in engine.aborted} == set(engine.added) and not engine.has_work


def test_the_first_chunk_comes_before_the_last_is_made(scripted: Open, engine: ScriptedEngine) -> None:
    with Client(scripted().address) as client, client.stream("a", max_new_tokens=100) as stream:
        next(stream)
        assert engine.has_work
        with pytest.raises(ValueError, match="not been read to its end"):
            stream.response()
        assert len(list(stream)) == 99
        assert stream.response().usage.completion_tokens == 100
        assert list(stream) == []


@pytest.mark.parametrize("how", ["close", "with", "drop", "unread"])
def test_ending_a_stream_early_ends_its_request(scripted: Open, gone: Callable[[], bool], how: str) -> None:
    served = scripted()
    with Client(served.address) as client:
        stream = client.stream("a", **ENDLESS)
        if how != "unread":
            next(stream)
        assert not gone()
        if how == "close":
            stream.close()
            stream.close()
            assert list(stream) == []
        elif how == "with":
            with stream:
                next(stream)
        gc.disable()  # without help from the collector
        try:
            del stream
            wait_until(gone)
        finally:
            gc.enable()
        wait_until(lambda: not served.admission.choices)


def test_ending_async_streams_early(scripted: Open, gone: Callable[[], bool]) -> None:
    served = scripted()

    async def run(client: Client) -> None:
        async for _ in client.astream("a", **ENDLESS):
            break
        async with client.achat(USER, stream=True, **ENDLESS) as stream:
            await anext(stream)
        assert [chunk async for chunk in stream] == []
        waiting = client.astream("b", **ENDLESS)

        async def read() -> None:
            async for _ in waiting:
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        never = client.astream("c", **ENDLESS)  # not asked for a chunk: not sent
        await never.aclose()
        await asyncio.to_thread(wait_until, gone)

    with Client(served.address) as client:
        asyncio.run(run(client))
        wait_until(lambda: not served.admission.choices)


def test_a_loop_that_closes_with_a_stream_open_ends_the_request(scripted: Open, gone: Callable[[], bool]) -> None:
    with Client(scripted().address) as client:
        kept = []

        async def run() -> None:
            stream = client.astream("a", **ENDLESS)
            await anext(stream)
            kept.append(stream)

        asyncio.run(run())
        wait_until(gone)
        kept.clear()


def test_cancelling_a_call_ends_its_requests(scripted: Open, gone: Callable[[], bool], engine: ScriptedEngine) -> None:
    served = scripted()

    async def run(client: Client) -> None:
        for call in (lambda: client.acall(["a", "b", "c"], **ENDLESS), lambda: client.achat(USER, **ENDLESS)):
            engine.added.clear()
            engine.aborted.clear()
            task = asyncio.create_task(call())  # type: ignore[arg-type]
            await asyncio.to_thread(wait_until, lambda: engine.has_work)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until, gone)

    with Client(served.address) as client:
        asyncio.run(run(client))
        wait_until(lambda: not served.admission.choices)


def test_a_server_that_goes_in_mid_stream(scripted: Open) -> None:
    served = scripted()
    with Client(served.address, timeout=30) as client:
        streams = [client.stream("a", **ENDLESS) for _ in range(3)]
        for stream in streams:
            next(stream)
        answer: list[BaseException] = []

        def ask() -> None:
            try:
                client("b", **ENDLESS)
            except BaseException as error:
                answer.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: served.admission.choices == 4)
        served.stop()
        for stream in streams:
            with pytest.raises(EngineClosedError):
                list(stream)
            with pytest.raises(ValueError, match="not been read"):
                stream.response()
            assert list(stream) == []
        asking.join(30)
        assert [type(error) for error in answer] == [EngineClosedError]


def test_an_engine_that_goes_in_mid_stream(scripted: Open) -> None:
    served = scripted()
    with Client(served.address, timeout=30) as client:
        stream = client.stream("a", **ENDLESS)
        next(stream)
        served.pipe.close()
        with pytest.raises(EngineClosedError, match="the engine was closed"):
            list(stream)
        assert not client.health()
        with pytest.raises(EngineClosedError):
            client.with_options(retries=0)("a")


def test_closing_the_client_ends_what_runs(scripted: Open, gone: Callable[[], bool]) -> None:
    served = scripted()
    client = Client(served.address)
    stream = client.stream("a", **ENDLESS)
    next(stream)

    async def run() -> None:
        task = asyncio.create_task(client.acall("b", **ENDLESS))
        await asyncio.to_thread(wait_until, lambda: served.admission.choices == 2)
        await client.aclose()
        with pytest.raises(EngineClosedError, match="the client was closed"):
            await task

    asyncio.run(run())
    with pytest.raises(EngineClosedError, match="the client was closed"):
        list(stream)
    wait_until(gone)
    assert client.closed
    client.close()
    for call in (client, client.stream, lambda prompt: client.chat(USER), lambda prompt: client.model_info()):
        with pytest.raises(EngineClosedError, match="the client was closed"):
            call("a")


def test_the_timeout_is_of_the_whole_call(scripted: Open, gone: Callable[[], bool]) -> None:
    served = scripted()
    with Client(served.address, timeout=0.5) as client:
        for call in (
            lambda: client("a", **ENDLESS),
            lambda: client(["a", "b"], **ENDLESS),
            lambda: list(client.stream("a", **ENDLESS)),
            lambda: client.chat(USER, **ENDLESS),
        ):
            with pytest.raises(RequestTimeoutError, match=r"within 0\.5 s"):
                call()
            with pytest.raises(TimeoutError):  # the same, by its other name
                call()
        wait_until(gone)
        assert client.with_options(timeout=None)("a", max_new_tokens=3).usage.completion_tokens == 3


def test_a_slow_reader_holds_up_nobody(scripted: Open, engine: ScriptedEngine) -> None:
    engine.on_step = lambda: None
    with Client(scripted().address) as client:
        slow = client.stream("a", max_new_tokens=2_000)
        next(slow)
        assert client("b", max_new_tokens=100).usage.completion_tokens == 100
        assert len(list(slow)) == 1_999


@pytest.mark.thorough
@pytest.mark.parametrize("scripted", ["grpc"], indirect=True)
def test_a_long_silence_is_no_reason_to_part(
    scripted: Open, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks whether the server lives, and the server does not mind. (With grpcio's own limits it would hang
    up at the third time, and it takes pings at most every 10 s.)"""
    often = [(name, 10_000 if name == "grpc.keepalive_time_ms" else value) for name, value in over_grpc.OPTIONS]
    monkeypatch.setattr(over_grpc, "OPTIONS", tuple(often))
    engine.on_step = lambda: time.sleep(60) if engine.steps == 2 else None
    with Client(scripted().address) as client:
        assert client("a", max_new_tokens=3).usage.completion_tokens == 3
