"""What is sent again, how often and when: against servers that refuse by a script and count."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn

import grpc
import pytest

from fastgen.client import (
    AuthenticationError,
    Client,
    OverloadedError,
    RequestTimeoutError,
    ServerUnreachableError,
)
from fastgen.client.errors import NotBegun
from fastgen.client.retry import LONGEST_WAIT, Deadline, retrying
from fastgen.errors import EngineClosedError, FastgenError, InvalidRequestError, RequestFailedError
from fastgen.front import Pipeline
from fastgen.testing.doors import open_door
from fastgen.types import Chunk, Completion, Response, Usage
from fastgen.wire import documents, proto
from fastgen.wire.requests import StreamStart

pytestmark = pytest.mark.slow

ANSWER = Response("r", [97], [Completion(0, "b", [98], "length")], Usage(1, 1), "a")
EVENTS = [StreamStart("r", [97], "a"), Chunk("r", 0, "b", [98], finish_reason="length", usage=Usage(1, 1))]


@dataclass
class Refusal:
    """One answer of a server, for either protocol."""

    http: int
    grpc: grpc.StatusCode
    retry_after: str | None = None
    code: str | None = None


FULL = Refusal(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "0", "rate_limit_exceeded")
STARTING = Refusal(503, grpc.StatusCode.UNAVAILABLE, "0", "unavailable")
LOST = Refusal(503, grpc.StatusCode.UNAVAILABLE, None, "engine_closed")
WRONG = Refusal(400, grpc.StatusCode.INVALID_ARGUMENT, None, "invalid_value")
UNKNOWN = Refusal(404, grpc.StatusCode.NOT_FOUND, None, "model_not_found")
NO_KEY = Refusal(401, grpc.StatusCode.UNAUTHENTICATED, None, "invalid_api_key")
BROKEN = Refusal(500, grpc.StatusCode.INTERNAL, None, "internal_error")
TOO_LARGE = Refusal(413, grpc.StatusCode.RESOURCE_EXHAUSTED, None, "request_too_large")


@dataclass
class Script:
    """What a server answers: its refusals in turn, then the answer."""

    refusals: list[Refusal] = field(default_factory=list)
    calls: int = 0
    address: str = ""
    headers: list[dict[str, str]] = field(default_factory=list)

    def next(self) -> Refusal | None:
        self.calls += 1
        return self.refusals.pop(0) if self.refusals else None


@contextmanager
def http_server(script: Script) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            script.headers.append(dict(self.headers))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            refusal = script.next()
            if refusal is not None:
                error = {"message": "no", "type": "t", "param": "prompt", "code": refusal.code}
                self._send(refusal.http, json.dumps({"error": error}).encode(), refusal.retry_after)
            elif body["stream"]:
                self._send(200, b"".join(b"event: x\ndata: %s\n\n" % documents.encode(event) for event in EVENTS))
            else:
                self._send(200, documents.encode(ANSWER))

        def _send(self, status: int, data: bytes, retry_after: str | None = None) -> None:
            self.send_response(status)
            if retry_after is not None:
                self.send_header("Retry-After", retry_after)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    script.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def grpc_server(script: Script) -> Iterator[None]:
    def refuse(context: grpc.ServicerContext, refusal: Refusal) -> NoReturn:
        metadata = [("fastgen-field", "prompt")]
        if refusal.retry_after is not None:
            metadata.append(("retry-after", refusal.retry_after))
        context.set_trailing_metadata(tuple(metadata))
        context.abort(refusal.grpc, "no")

    def generate(_: bytes, context: grpc.ServicerContext) -> bytes:
        script.headers.append({key: str(value) for key, value in context.invocation_metadata()})
        refusal = script.next()
        if refusal is not None:
            refuse(context, refusal)
        return proto.response_message(ANSWER).SerializeToString()

    def stream(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        refusal = script.next()
        if refusal is not None:
            refuse(context, refusal)
        yield from (proto.event_message(event).SerializeToString() for event in EVENTS)

    server = grpc.server(ThreadPoolExecutor(4))
    methods: dict[str, Any] = {
        "Generate": grpc.unary_unary_rpc_method_handler(generate),
        "GenerateStream": grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(proto.SERVICE, methods)])
    script.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


@pytest.fixture(params=["grpc", "http"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr("fastgen.client.retry.FIRST_WAIT", 0.01)
    made = Script()
    with (grpc_server if request.param == "grpc" else http_server)(made):
        yield made


Ask = Callable[[Client], Response]


def _streamed(client: Client) -> Response:
    stream = client.stream("a")
    list(stream)
    return stream.response()


def _async(client: Client) -> Response:
    return asyncio.run(client.acall("a"))


@pytest.fixture(params=[lambda client: client("a"), _streamed, _async], ids=["whole", "streamed", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    asked: Ask = request.param
    return asked


# ---- what is sent again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [FULL, STARTING], ids=["full", "starting"])
def test_what_was_not_begun_is_sent_again(script: Script, ask: Ask, refusal: Refusal) -> None:
    script.refusals = [refusal] * 3
    with Client(script.address, retries=3) as client:
        assert ask(client) == ANSWER
    assert script.calls == 4


@pytest.mark.parametrize(
    ("refusal", "kind"), [(FULL, OverloadedError), (STARTING, EngineClosedError)], ids=["full", "starting"]
)
@pytest.mark.parametrize("retries", [0, 2])
def test_but_not_without_end(
    script: Script, ask: Ask, refusal: Refusal, kind: type[FastgenError], retries: int
) -> None:
    script.refusals = [refusal] * 9
    with Client(script.address, retries=retries) as client, pytest.raises(kind, match="no"):
        ask(client)
    assert script.calls == retries + 1


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (LOST, EngineClosedError),
        (WRONG, InvalidRequestError),
        (UNKNOWN, InvalidRequestError),
        (NO_KEY, AuthenticationError),
        (BROKEN, RequestFailedError),
        (TOO_LARGE, InvalidRequestError),
    ],
    ids=["lost", "wrong", "unknown", "no key", "broken", "too large"],
)
def test_what_may_have_begun_or_is_wrong_is_not(
    script: Script, ask: Ask, refusal: Refusal, kind: type[FastgenError]
) -> None:
    script.refusals = [refusal] * 9
    with Client(script.address, retries=5) as client, pytest.raises(kind, match="no") as error:
        ask(client)
    assert script.calls == 1
    if refusal is WRONG:
        assert isinstance(error.value, InvalidRequestError)
        assert error.value.field == "prompt"


def test_a_batch_retries_each_of_its_own(script: Script) -> None:
    script.refusals = [FULL] * 4
    with Client(script.address, retries=4, concurrency=2) as client:
        assert client(["a", "b", "c"]) == [ANSWER] * 3
    assert script.calls == 7


def test_retry_after_is_honoured(script: Script, ask: Ask) -> None:
    script.refusals = [Refusal(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "1")]
    with Client(script.address) as client:
        began = time.monotonic()
        assert ask(client) == ANSWER
        assert time.monotonic() - began >= 1
    assert script.calls == 2


def test_no_wait_beyond_the_timeout(script: Script, ask: Ask) -> None:
    script.refusals = [Refusal(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "600")]
    with Client(script.address, timeout=20) as client, pytest.raises(OverloadedError) as error:
        ask(client)
    assert error.value.retry_after == 600
    assert script.calls == 1


def test_the_key_goes_with_every_call(script: Script) -> None:
    with Client(script.address, api_key="secret") as client:
        client("a")
    assert {key.lower(): value for key, value in script.headers[0].items()}["authorization"] == "Bearer secret"


# ---- nobody there ----------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_nobody_listens(ask: Ask, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.client.retry.FIRST_WAIT", 0.01)
    with Client(f"{scheme}127.0.0.1:{free_port()}", retries=2) as client:
        for kind in (ServerUnreachableError, EngineClosedError, ConnectionError):  # all the same one
            with pytest.raises(kind, match="no server answers at"):
                ask(client)
        assert client.health() is False
        with pytest.raises(ServerUnreachableError):
            client.model_info()


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_a_server_that_comes_late_or_again_is_found(door: Any, pipe: Pipeline) -> None:
    settings: dict[str, Any] = {"port": free_port(), "grpc_port": free_port()}
    address = f"localhost:{settings['grpc_port']}" if door == "grpc" else f"http://localhost:{settings['port']}"
    with Client(address, retries=20, timeout=60) as client, ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            late = thread.submit(client, "a", max_new_tokens=2)
            time.sleep(0.3)
            assert not late.done()
            with open_door(pipe, door, **settings):
                assert late.result(60).usage.completion_tokens == 2
                assert client.health()
            assert not client.health()


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_server_that_accepts_and_says_nothing(ask: Ask, scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"{scheme}127.0.0.1:{mute.getsockname()[1]}"
        with Client(address, timeout=0.3) as client:
            with pytest.raises((RequestTimeoutError, ServerUnreachableError)):
                ask(client)
            assert client.health() is False


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_server_of_another_kind(scheme: str) -> None:
    """One that answers every connection with something else, and is gone."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        stopping = threading.Event()

        def babble() -> None:
            other.settimeout(0.05)
            while not stopping.is_set():
                try:
                    connection, _ = other.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(b"220 mail ready\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        try:
            with (
                Client(f"{scheme}127.0.0.1:{other.getsockname()[1]}", retries=0, timeout=5) as client,
                pytest.raises((EngineClosedError, RequestTimeoutError)),
            ):
                client("a")
        finally:
            stopping.set()
            thread.join()


# ---- the waits -------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, luck: float) -> None:
        self.now = 100.0
        self.waits: list[float] = []
        monkeypatch.setattr("fastgen.client.retry.asyncio.sleep", self._sleep)
        monkeypatch.setattr("fastgen.client.retry.time.monotonic", lambda: self.now)
        monkeypatch.setattr("fastgen.client.retry.random.uniform", lambda low, high: low + luck * (high - low))

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


async def _never(retry_after: float | None = None) -> NoReturn:
    raise NotBegun(EngineClosedError("no"), retry_after)


def test_waits_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, luck=1)
    with pytest.raises(EngineClosedError):
        asyncio.run(retrying(_never, 8, Deadline(None)))
    assert clock.waits == [0.25, 0.5, 1, 2, 4, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]


def test_waits_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, luck=0)
    with pytest.raises(EngineClosedError):
        asyncio.run(retrying(_never, 3, Deadline(None)))
    assert clock.waits == [0.125, 0.25, 0.5]


@pytest.mark.parametrize("luck", [0, 1])
def test_never_earlier_than_the_server_asks(monkeypatch: pytest.MonkeyPatch, luck: float) -> None:
    clock = Clock(monkeypatch, luck=luck)
    with pytest.raises(EngineClosedError):
        asyncio.run(retrying(lambda: _never(5), 6, Deadline(None)))
    assert len(clock.waits) == 6
    assert min(clock.waits) >= 5
    assert max(clock.waits) <= LONGEST_WAIT


def test_the_deadline_counts_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, luck=1)
    with pytest.raises(EngineClosedError):
        asyncio.run(retrying(_never, 8, Deadline(1.0)))
    assert clock.waits == [0.25, 0.5]  # a third of 1 s would end after it
