"""What is wrong with a request, told in the shape clients parse, whatever it is."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

PATH = "/v1/completions"
GOOD = {"prompt": "x", "max_tokens": 1}


def send(door: Any, method: str = "POST", path: str = PATH, **options: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with door.http() as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


def raw(door: Any, body: bytes, kind: str = "application/json", path: str = PATH) -> httpx.Response:
    return send(door, path=path, content=body, headers={"Content-Type": kind})


def error(answer: httpx.Response, status: int) -> Any:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert "Traceback" not in answer.text
    assert answer.headers["x-request-id"]
    return body["error"]


BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not JSON"),
    "truncated": (b'{"prompt": "x"', "not JSON"),
    "array": (b'["x"]', "an array"),
    "string": (b'"x"', "a string"),
    "null": (b"null", "null"),
    "number": (b"3", "a number"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', "NaN"),
    "Infinity": (b'{"prompt": "x", "temperature": -Infinity}', "Infinity"),
    "1e999": (b'{"prompt": "x", "temperature": 1e999}', "too large"),
    "twice": (b'{"prompt": "x", "prompt": "y"}', "'prompt' comes twice"),
    "twice inside": (b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}', "'1' comes twice"),
    "UTF-8": (b'{"prompt": "\xff"}', "not UTF-8"),
    "UTF-16": ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
    "BOM": (b'\xef\xbb\xbf{"prompt": "x"}', "not JSON"),
    "surrogate": (b'{"prompt": "\\ud800"}', "surrogate"),
    "surrogate key": (b'{"prompt": "x", "\\udfff": 1}', "surrogate"),
    "deep": (b'{"prompt": "x", "response_format": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001, "nested too deeply"),
    "deep enough": (b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}", "nested too deeply"),
    "digits": (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "too long"),
    "comment": (b'{"prompt": "x"} // y', "not JSON"),
    "two": (b'{"prompt": "x"}{}', "not JSON"),
    "control": (b'{"prompt": "a\nb"}', "not JSON"),
}


@pytest.mark.parametrize(("body", "words"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/fastgen/generate"])
def test_bodies_that_are_no_json(door: Any, body: bytes, words: str, path: str) -> None:
    assert words in error(raw(door, body, path=path), 400)["message"]


def test_a_whole_surrogate_pair_is_a_character(door: Any) -> None:
    assert raw(door, b'{"prompt": "\\ud83d\\ude42", "max_tokens": 1}').status_code == 200


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_other_types_are_refused(door: Any, kind: str) -> None:
    """A browser sends these across origins without asking."""
    assert "application/json" in error(raw(door, json.dumps(GOOD).encode(), kind), 415)["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"])
def test_json_by_its_names(door: Any, kind: str) -> None:
    assert raw(door, json.dumps(GOOD).encode(), kind).status_code == 200


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"logprobs": 101}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"min_tokens": 1, "min_new_tokens": 2}, "min_tokens"),
    ({"min_tokens": 3, "max_tokens": 2}, None),  # type: ignore[list-item]
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"best_of": 0}, "best_of"),
    ({"model": 1}, "model"),
    ({"prioritty": 1}, "prioritty"),
    ({"logits_processors": {"nosuch": {}}}, "logits_processors"),
    ({"guided_regex": "["}, "guided_regex"),
    ({"response_format": {"type": "poem"}}, "response_format"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=str)
def test_wrong_values_name_their_field(door: Any, fields: dict[str, Any], param: str | None) -> None:
    told = error(send(door, json={**GOOD, **fields}), 400)
    assert param is None or told["param"] is None or told["param"].startswith(param), told
    word = (param or "min_tokens").partition(".")[0]
    assert word in told["message"] or word.replace("_", " ").rstrip("s") in told["message"]
    assert len(told["message"]) <= 2000


HARMLESS = {
    "user": "someone",
    "store": False,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "suffix": "",
    "best_of": 1,
    "prompt_cache_key": "x",
    "safety_identifier": "x",
    "n": None,
    "stop": None,
    "stream": None,
    "logit_bias": None,
    "temperature": None,
    "seed": None,
}


def test_fields_without_a_meaning_change_nothing(door: Any) -> None:
    plain = send(door, json={**GOOD, "max_tokens": 6}).json()["choices"]
    assert send(door, json={**GOOD, "max_tokens": 6, **HARMLESS}).json()["choices"] == plain
    messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6}
    more = {"modalities": ["text"], "parallel_tool_calls": True, "verbosity": "medium", "reasoning_effort": None}
    path = "/v1/chat/completions"
    assert (
        send(door, path=path, json={**messages, **more, "user": "u"}).json()["choices"]
        == send(door, path=path, json=messages).json()["choices"]
    )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1/models/%ff%00", 404),
        ("TRACE", "/tokenize", 405),
    ],
)
def test_no_such_route(door: Any, method: str, path: str, status: int) -> None:
    answer = send(door, method, path)
    error(answer, status)
    assert ("allow" in answer.headers) == (status == 405)


def test_unexpected_errors_are_ours(
    door: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret words")

    monkeypatch.setattr("fastgen.server.http.completions._prepare", broken)
    answer = send(door, json=GOOD, headers={"X-Request-Id": "mine-1"})
    told = error(answer, 500)
    assert "secret" not in answer.text
    assert told["type"] == "server_error"
    assert answer.headers["x-request-id"] == "mine-1"
    assert "secret words" in caplog.text  # for who runs the server
    assert door.admission.choices == 0


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_counted_after_a_refusal(door: Any, stream: bool) -> None:
    for fields in ({"prompt": ""}, {"max_tokens": 600}, {"prompt": ["a", ""]}, {"prompt": [[1], [999]]}):
        error(send(door, json={**GOOD, **fields, "stream": stream}), 400)
    assert door.idle()
    assert door.admission.prompt_tokens == 0


@pytest.mark.parametrize(
    "key", [None, "Bearer wrong", "Bearer ", "Basic cmlnaHQ=", "right", "Bearer right x", "Bearer ü"]
)
def test_without_a_key(make: Any, key: str | None) -> None:
    door = make(api_key="right", cors_origin="https://a.example")
    headers = {} if key is None else {"Authorization": key.encode("latin-1")}
    for method, path in (
        ("POST", PATH),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/nope"),
        ("GET", "/docs"),
    ):
        answer = send(door, method, path, headers={**headers, "Origin": "https://a.example"})
        assert error(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
    for path in ("/health", "/ready"):
        assert send(door, "GET", path).status_code == 200
    assert send(door, json=GOOD, headers={"Authorization": "bearer right"}).status_code == 200


def exchange(url: str, *parts: bytes, until_closed: bool = False) -> bytes:
    """Send bytes and read the beginning of the answer, or all there is until the other side closes."""
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has heard enough
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
                if not until_closed and b"\r\n\r\n" in answer:
                    break
        except ConnectionResetError:
            pass
        return answer


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_a_body_announced_as_too_large_is_not_read(make: Any, serve: Any) -> None:
    with serve(make(max_request_size="1KiB")) as live:
        answer = exchange(live.url, HEAD + b"Content-Length: 67108864\r\n\r\n", b"{")
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer.lower()


def test_a_body_in_chunks_is_not_read_beyond_the_limit(make: Any, serve: Any) -> None:
    with serve(make(max_request_size="1KiB")) as live:
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        # The end never comes: who waits for it never answers.
        answer = exchange(live.url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk, until_closed=True)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"max_request_size" in answer
        with httpx.Client(base_url=live.url) as client:
            assert client.post(PATH, json=GOOD).status_code == 200
            assert client.post(PATH, json={"prompt": "x", "max_tokens": 1, "user": "u" * 1100}).status_code == 413


def test_a_length_that_is_no_number(make: Any, serve: Any) -> None:
    with serve(make(max_request_size="1KiB")) as live:
        for length in (b"-1", b"1e3", b"9" * 30):
            answer = exchange(live.url, HEAD + b"Content-Length: " + length + b"\r\n\r\n")
            assert answer.split()[1] in (b"400", b"413")
