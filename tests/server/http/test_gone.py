"""Clients that go away, read slowly, or send half of a request."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from fastgen.server.http.body import read_json
from fastgen.testing.scripted import ScriptedEngine

ENDLESS = 9000
paths = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


def fields(path: str, stream: bool, **more: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    return {**asked, "stream": stream, "max_tokens": ENDLESS, **more}


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        yield connection


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.fixture
def endless(scripted: Any, engine: ScriptedEngine) -> Any:
    """Answers with a token a millisecond, for ever."""
    engine.script = lambda prompt, index: [ord("x")] * ENDLESS
    engine.on_step = lambda: time.sleep(0.001)
    return scripted


def ended(door: Any, engine: ScriptedEngine) -> bool:
    return not engine.has_work and door.admission.choices == 0 and door.admission.prompt_tokens == 0


@paths
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_ends_its_request(
    endless: Any, engine: ScriptedEngine, serve: Any, until: Any, path: str, stream: bool, n: int
) -> None:
    with serve(endless) as live:
        with connected(live.url) as connection:
            connection.sendall(request(path, fields(path, stream, n=n)))
            until(lambda: engine.steps > 5)
            assert live.admission.choices == n
            if stream:
                assert connection.recv(10)
        until(lambda: ended(live, engine))
        assert engine.aborted
        with httpx.Client(base_url=live.url) as client:
            assert client.post(path, json=fields(path, False, max_tokens=2)).status_code == 200


@paths
def test_the_official_client_closes_a_stream(
    endless: Any, engine: ScriptedEngine, serve: Any, until: Any, path: str
) -> None:
    with serve(endless) as live, live.sync_openai() as client:
        create = client.chat.completions.create if "chat" in path else client.completions.create
        with create(**{**fields(path, True), "model": "scripted"}) as stream:
            next(iter(stream))
        until(lambda: ended(live, engine))


def test_a_batch_goes_with_its_client(endless: Any, engine: ScriptedEngine, serve: Any, until: Any) -> None:
    with serve(endless) as live:
        with connected(live.url) as connection:
            connection.sendall(request("/v1/completions", {**fields("", True), "prompt": ["a", "b", "c"], "n": 2}))
            until(lambda: engine.steps > 5)
            assert live.admission.choices == 6
        until(lambda: ended(live, engine))


def test_one_who_waits_in_the_queue_leaves_it(make: Any, serve: Any, until: Any) -> None:
    """Two run at once here."""
    with serve(make()) as live:
        body = {"prompt": "x", "max_tokens": 400, "n": 2, "ignore_eos": True, "stream": True}
        with connected(live.url) as first:
            first.sendall(request("/v1/completions", body))
            until(lambda: live.pipe.stats().running == 2)
            with connected(live.url) as second:
                second.sendall(request("/v1/completions", body))
                until(lambda: live.admission.choices == 4 or live.idle())
        until(live.idle)
        assert live.pipe.stats().running == 0


def test_a_slow_reader_holds_up_nobody(endless: Any, engine: ScriptedEngine, serve: Any, until: Any) -> None:
    engine.on_step = lambda: None
    with serve(endless) as live, connected(live.url) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        slow.sendall(request("/v1/completions", fields("", True, logprobs=5)))
        until(lambda: engine.steps > 100)
        with httpx.Client(base_url=live.url, timeout=20) as client:
            answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 50})
            assert answer.json()["choices"][0]["text"] == "x" * 50
        # The engine has ended its answer, which waits to be read; then all of it comes.
        until(lambda: not engine.has_work)
        received = b""
        while b"[DONE]" not in received[-40:]:
            data = slow.recv(65536)
            assert data
            received += data
        assert received.count(b"data: ") == ENDLESS + 1
        until(lambda: ended(live, engine))


@pytest.mark.parametrize("end", ["closed", "kept"])
def test_half_a_body(make: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(f"{read_json.__module__}.BODY_SECONDS", 0.3)
    with serve(make()) as live:
        with connected(live.url) as connection:
            connection.sendall(request("/v1/completions", {"prompt": "x" * 100})[:-20])
            if end == "kept":
                answer = b""
                while data := connection.recv(65536):
                    answer += data
                assert answer.startswith(b"HTTP/1.1 408")
        with httpx.Client(base_url=live.url, timeout=20) as client:
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert live.idle()


def test_cancelling_in_process_ends_the_request(endless: Any, engine: ScriptedEngine, until: Any) -> None:
    async def ask() -> None:
        async with endless.http() as client:
            task = asyncio.create_task(client.post("/v1/completions", json=fields("", False)))
            while engine.steps < 5:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())
    until(lambda: ended(endless, engine))
