"""What one request can take from all others: the event loop, memory, connections, a place in a queue."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from pydantic import BaseModel, ValidationError

from fastgen import errors
from fastgen.errors import ConfigError, InvalidRequestError, did_you_mean
from fastgen.front.prompts import Call, Prompt
from fastgen.server.admission import MOST_PROMPT_LOGPROBS, Admission
from fastgen.server.aside import LARGE_BYTES, LARGE_ENTRIES
from fastgen.server.http import connections
from fastgen.server.http.generate import GenerateBody
from fastgen.server.http.schemas import ChatRequest, CompletionRequest, DetokenizeRequest
from fastgen.server.settings import ServerConfig
from fastgen.testing.scripted import ScriptedEngine
from fastgen.types import SamplingParams

TEXT, CHAT, OWN = "/v1/completions", "/v1/chat/completions", "/v1/fastgen/generate"
USER = [{"role": "user", "content": "Tell me"}]
BODIES: dict[str, dict[str, Any]] = {TEXT: {"prompt": "Tell me"}, CHAT: {"messages": USER}, OWN: {"prompt": "Tell me"}}
PRINTED = "import sys; from fastgen.server.http.body import parse_json\ntry: parse_json(sys.stdin.buffer.read())\n"
PRINTED += "except Exception as error: print(error)"


def send(door: Any, path: str, **body: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with door.http() as client:
            return await client.post(path, json=body)

    return asyncio.run(ask())


def told(answer: httpx.Response) -> list[Any]:
    """The whole answer, or the events of a stream."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# ---- the event loop --------------------------------------------------------------------------------------------------


def test_many_keys_of_which_one_comes_twice() -> None:
    """Looked for with the square of their number, it would take an hour."""
    raw = "{" + "".join(f'"k{number}":1,' for number in range(300_000)) + '"k299999":2}'
    came = subprocess.run([sys.executable, "-c", PRINTED], input=raw.encode(), capture_output=True, timeout=120)
    assert came.stdout.decode().strip().endswith("the key 'k299999' comes twice in one object")


@pytest.mark.parametrize(
    ("model", "field", "wrong"),
    [
        (CompletionRequest, "stop_token_ids", "x"),
        (CompletionRequest, "stop_token_ids", -1),
        (CompletionRequest, "guided_choice", 1),
        (ChatRequest, "messages", 1),
        (ChatRequest, "tools", 1),
        (ChatRequest, "modalities", 1),
        (DetokenizeRequest, "tokens", -1),
        (GenerateBody, "prompt_token_ids", "x"),
        (GenerateBody, "messages", "x"),
    ],
)
def test_a_long_list_has_one_error(model: type[BaseModel], field: str, wrong: object) -> None:
    body = {"prompt": "x"} if "prompt" in model.model_fields else {}
    body = {"messages": USER} if model is ChatRequest else body
    with pytest.raises(ValidationError) as raised:
        model.model_validate({**body, field: [wrong] * 1000})
    assert raised.value.error_count() == 1


def test_names_are_compared_up_to_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    real = errors.get_close_matches

    def spy(word: str, *args: Any, **options: Any) -> list[str]:
        lengths.append(len(word))
        return real(word, *args, **options)

    monkeypatch.setattr(errors, "get_close_matches", spy)
    assert did_you_mean("promt" + "x" * 10**6, ["prompt"]) == ""
    assert did_you_mean("promt", ["prompt"]) == " Did you mean 'prompt'?"
    assert max(lengths) <= 100


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[threading.Thread]]:
    """Spies on a function: the threads it is called in."""

    def spy(name: str) -> list[threading.Thread]:
        seen: list[threading.Thread] = []
        module_name, _, attribute = name.rpartition(".")
        module = importlib.import_module(module_name)
        real = getattr(module, attribute)

        def called(*args: Any, **options: Any) -> Any:
            seen.append(threading.current_thread())
            return real(*args, **options)

        monkeypatch.setattr(module, attribute, called)
        return seen

    return spy


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_large_body_is_read_in_a_thread(door: Any, threads: Any, path: str, large: bool) -> None:
    parsed = threads("fastgen.server.http.body.parse_json")
    checked = threads("fastgen.server.http.body._validated")
    answer = send(door, path, **BODIES[path], nosuch="x" * (LARGE_BYTES if large else 10))
    assert answer.status_code == 400
    assert (parsed[0] is threading.main_thread()) is not large
    assert (checked[0] is threading.main_thread()) is not large


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "writer"),
    [
        (TEXT, "completions._Choice"),
        (CHAT, "chat.chat_logprobs"),
        (OWN, "generate.documents.encode"),
    ],
)
def test_a_large_answer_is_written_in_a_thread(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, path: str, writer: str, stream: bool, large: bool
) -> None:
    """Large by the log-probabilities of its prompt, which come at its beginning; a chat's by its own."""
    name, _, attribute = f"fastgen.server.http.{writer}".rpartition(".")
    holder = importlib.import_module("fastgen.wire.documents" if path == OWN else name)
    real, seen = getattr(holder, attribute), []

    def called(*args: Any, **options: Any) -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return real(*args, **options)

    monkeypatch.setattr(holder, attribute, called)
    size = LARGE_ENTRIES if large else 1
    if path == CHAT:
        monkeypatch.setattr("fastgen.server.http.chat.LARGE_ENTRIES", 0 if large else 10**6)
        monkeypatch.setattr("fastgen.server.http.sse.LARGE_ENTRIES", 0 if large else 10**6)
        body: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": 1, "max_tokens": 4}
    elif path == TEXT:
        body = {"prompt": "x" * size, "prompt_logprobs": 1, "max_tokens": 2}
    else:
        body = {"prompt": "x" * size, "params": {"prompt_logprobs": 1, "max_new_tokens": 2}}
    told(send(scripted, path, **body, stream=stream))
    assert (False in seen) is large
    if not stream:
        assert (True in seen) is not large


def test_tokens_are_told_in_a_thread(door: Any, threads: Any) -> None:
    seen = threads("fastgen.server.http.tokens.json_response")
    answer = send(door, "/tokenize", prompt="x" * 100, return_token_strs=True).json()
    assert len(answer["token_strs"]) == answer["count"]
    assert send(door, "/detokenize", tokens=[65, 66]).status_code == 200
    assert len(seen) == 2
    assert threading.main_thread() not in seen


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_log_probabilities_of_the_prompt_come_once(door: Any, path: str, stream: bool) -> None:
    """With its first choice, and not with each."""
    more = {"prompt": ["ab", "abc"]} if path == TEXT else {}
    body = {**BODIES[path], "n": 3, "temperature": 1.0, "max_tokens": 3, "prompt_logprobs": 1, "stream": stream, **more}
    choices = [choice for event in told(send(door, path, **body)) for choice in event["choices"]]
    having = [choice for choice in choices if "prompt_logprobs" in choice]
    assert sorted(choice["index"] for choice in having) == ([0, 3] if path == TEXT else [0])
    assert all(choice["prompt_logprobs"][0] is None and choice["prompt_logprobs"][1] for choice in having)


def test_they_come_though_the_first_token_has_no_text(scripted: Any, engine: ScriptedEngine) -> None:
    engine.script = lambda prompt, index: [*"é".encode(), *b"abc"]
    body = {"messages": USER, "max_tokens": 5, "prompt_logprobs": 0, "stream": True}
    events = told(send(scripted, CHAT, **body))
    assert sum("prompt_logprobs" in choice for event in events for choice in event["choices"]) == 1
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "éabc"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_too_many_log_probabilities_of_a_prompt(
    door: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    monkeypatch.setattr("fastgen.server.admission.MOST_PROMPT_LOGPROBS", 60)
    asked = {"params": {"prompt_logprobs": 99}} if path == OWN else {"prompt_logprobs": 99}
    answer = send(door, path, **BODIES[path], **asked, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "prompt_logprobs"
    assert "60" in error["message"]
    assert door.idle()
    assert door.admission.prompt_tokens == 0


def test_an_echo_has_them_with_each_choice(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.server.admission.MOST_PROMPT_LOGPROBS", 60)
    body = {"prompt": "abcdefgh", "max_tokens": 1, "echo": True, "logprobs": 2, "temperature": 1.0}
    assert send(door, TEXT, **body, n=2).status_code == 200
    answer = send(door, TEXT, **body, n=3)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logprobs"
    assert "prompt_logprobs" not in answer.json()["error"]["message"]


def test_the_bound_by_itself() -> None:
    admission = Admission(ServerConfig(), 8)

    def enter(tokens: int, top: int | None) -> None:
        with admission.enter() as entry:
            entry.add_call(Call([Prompt([1] * tokens)], SamplingParams(prompt_logprobs=top), single=True))
            assert admission.prompt_tokens == tokens

    enter(MOST_PROMPT_LOGPROBS // 101, 100)
    enter(100_000, None)
    with pytest.raises(InvalidRequestError) as raised:
        enter(MOST_PROMPT_LOGPROBS // 101 + 1, 100)
    assert raised.value.field == "prompt_logprobs"


def test_bodies_are_bounded_together(scripted: Any, engine: ScriptedEngine, make: Any, until: Any) -> None:
    go = threading.Event()
    engine.script = lambda prompt, index: [97] * 5
    engine.on_step = lambda: go.wait(60)  # type: ignore[assignment]
    app = make(scripted.pipe, max_request_size=1000, info=scripted.service.info, max_sequences=64)
    body = {"prompt": "x", "max_tokens": 2, "user": "u" * 900}

    async def ask() -> tuple[list[httpx.Response], httpx.Response]:
        async with app.http() as client, asyncio.timeout(60):
            tasks = [asyncio.ensure_future(client.post(TEXT, json=body)) for _ in range(20)]
            while sum(task.done() for task in tasks) < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            go.set()
            return list(await asyncio.gather(*tasks)), await client.post(TEXT, json=body)

    try:
        answers, after = asyncio.run(ask())
    finally:
        go.set()
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 3
    assert all(answer.status_code == 200 for answer in answers if answer not in refused)
    assert all(answer.headers["retry-after"] == "1" and "bytes" in answer.text for answer in refused)
    assert after.status_code == 200


# ---- connections -----------------------------------------------------------------------------------------------------


@contextmanager
def bounded(door: Any, until: Any) -> Iterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        door.app, http=connections.BoundedProtocol, log_config=None, lifespan="off", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    return socket.create_connection((address.hostname, address.port), timeout=20)


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET /health HTTP/1.1\r\nHost: x\r\nA: "])
def test_a_client_that_asks_for_nothing_is_hung_up_on(
    make: Any, until: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with bounded(make(), until) as url, connect(url) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""  # within the socket's timeout


def test_nor_can_it_after_a_request(make: Any, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with bounded(make(), until) as url, connect(url) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        came = connection.recv(10_000)
        assert came.startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /vers")  # uvicorn's own limit is for those that send nothing
        while data := connection.recv(10_000):
            came += data
        assert came.count(b"HTTP/1.1") == 1


def test_a_body_and_an_answer_may_take_longer(
    scripted: Any, engine: ScriptedEngine, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    body = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    waits = threading.Event()
    engine.on_step = lambda: waits.wait(0.2)  # type: ignore[assignment]
    with bounded(scripted, until) as url, connect(url) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:5])
        waits.wait(0.5)
        connection.sendall(body[5:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_connections_are_bounded(make: Any, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
    with bounded(make(), until) as url:
        with connect(url) as first, connect(url) as second:
            for one in (first, second):
                one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert one.recv(1000).startswith(b"HTTP/1.1 200")
            answer = httpx.get(f"{url}/health")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "unavailable"

        def free() -> bool:
            return httpx.get(f"{url}/health").status_code == 200

        until(free)


# ---- places in a queue -----------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_a_chat_with_tools_does_not_wait_for_schemas(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("fastgen.server.http.structure.in_thread", never)
    body = {"messages": USER, "max_tokens": 4, "response_format": {"type": "text"}}
    assert send(scripted, CHAT, **body, tools=[TOOL]).status_code == 200
    assert send(scripted, CHAT, **body).status_code == 200

    async def required() -> None:  # control: this one does
        async with scripted.http() as client, asyncio.timeout(0.5):
            await client.post(CHAT, json={**body, "tools": [TOOL], "tool_choice": "required"})

    with pytest.raises(TimeoutError):
        asyncio.run(required())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_client_that_goes_gives_its_place_up(
    scripted: Any, serve: Any, until: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """While its schema waits to be looked at."""

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("fastgen.server.http.structure.in_thread", never)
    body = json.dumps({**BODIES[path], "stream": stream, "guided_regex": "a"}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with serve(scripted) as live:
        with connect(live.url) as connection:
            connection.sendall(head.encode() + body)
            until(lambda: live.admission.choices == 1)
        until(lambda: live.admission.choices == 0)


# ---- one answer for one thing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_a_model_may_not_be_named_as_an_adapter(scripted: Any, make: Any, own: bool) -> None:
    info = scripted.service.info
    options = {"info": replace(info, name="polite")} if own else {"info": info, "served_model_name": ("a", "polite")}
    with pytest.raises(ConfigError, match=r"'polite'.*served_model_name"):
        make(scripted.pipe, **options)
    make(scripted.pipe, info=replace(info, name="polite"), served_model_name="a")


def test_the_doors_refuse_in_the_same_words(scripted: Any) -> None:
    answers = [send(scripted, path, **body, model="plite") for path, body in BODIES.items()]
    assert {answer.status_code for answer in answers} == {404}
    (error,) = {json.dumps(answer.json()) for answer in answers}
    assert "Did you mean 'polite'?" in error
    texts = {
        send(scripted, path, messages=USER, **{field: "{{ 1 }}"}).json()["error"]["message"].removeprefix(field)
        for path, field in ((CHAT, "chat_template"), (OWN, "template"))
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("path", "broken"),
    [
        (TEXT, "fastgen.server.http.completions._Writer.chunk"),
        (CHAT, "fastgen.server.http.chat._Writer.chunk"),
        (OWN, "fastgen.server.http.generate.Chunk"),
    ],
)
def test_what_nobody_foresaw_is_the_last_event(
    scripted: Any,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    broken: str,
) -> None:
    monkeypatch.setattr(broken, None)  # calling it, or asking for its instances, raises a TypeError
    answer = send(scripted, path, **BODIES[path], stream=True)
    (*_, last) = told(answer)
    assert last["error"]["code"] == "internal_error"
    assert "NoneType" not in answer.text
    assert "TypeError" in caplog.text
    assert ("event: error" in answer.text) is (path == OWN)
    assert scripted.admission.choices == 0
    assert not engine.has_work or engine.aborted


def test_seeds_are_any_of_64_bits(door: Any) -> None:
    def text(seed: int) -> str:
        answer = send(door, TEXT, prompt="Hello", max_tokens=12, temperature=1.0, seed=seed)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    assert text(-5) == text(-5)
    assert len({text(seed) for seed in (-(2**63), -5, -6, 5, 2**63 - 6)}) >= 4
    assert text(7) == door.pipe("Hello", max_new_tokens=12, temperature=1.0, seed=7).text
    chat = {"messages": USER, "max_tokens": 2, "seed": -1}
    assert send(door, CHAT, **chat).status_code == 200
