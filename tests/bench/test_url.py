"""Servers that speak OpenAI's API: what is sent, how tokens are counted, and what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastgen.bench.drive import Request
from fastgen.bench.protocol import Workload
from fastgen.bench.synthetic import with_clients
from fastgen.bench.url import UrlTarget, check_url
from fastgen.errors import ConfigError, RequestFailedError

Chunks = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]
Serve = Callable[[Chunks], Any]


def text(piece: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": reason}]}


def usage(tokens: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens, **details}}


def plain(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A chunk a token, the last one with the reason; then the usage: vLLM's way."""
    for number in range(body["max_tokens"]):
        yield text("a", "length" if number + 1 == body["max_tokens"] else None)
    yield usage(body["max_tokens"])


def at_once(*outs: int) -> Workload:
    return Workload("w", "W", [Request([row + 5, 6, 7], out) for row, out in enumerate(outs)])


def run(server: Any, work: Workload) -> tuple[Any, int]:
    ticks: list[int] = []
    result = UrlTarget("it", server.url).run(work, ticks.append)
    return result, sum(ticks)


def test_what_is_sent(serve: Serve) -> None:
    server = serve(plain)
    target = UrlTarget("it", server.url, api_key="secret")
    target.run(at_once(4), lambda _: None)
    (body,) = server.bodies
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["temperature"], body["stream"], body["ignore_eos"]) == (4, 0, True, True)
    assert body["model"] == "the-model"
    assert body["stream_options"] == {"include_usage": True}
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in target.note
    assert UrlTarget("it", server.url, model="mine").note.count("mine") == 1


def split(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A last chunk that says why, and holds nothing: OpenAI's way."""
    for _ in range(body["max_tokens"]):
        yield text("a")
    yield text("", "length")
    yield usage(body["max_tokens"])


def partial_letters(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Half a letter gives no text."""
    for number in range(body["max_tokens"]):
        yield text("" if number % 2 else "é")
    yield text("", "length")
    yield usage(body["max_tokens"])


def silent(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """No usage at all."""
    for _ in range(body["max_tokens"]):
        yield text("a")


def numbered(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Several tokens a chunk, with their ids."""
    left = list(range(body["max_tokens"]))
    while left:
        chunk = text("abc")
        chunk["choices"][0]["token_ids"] = left[:3]
        left = left[3:]
        yield chunk
    yield usage(body["max_tokens"])


def counted(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Several tokens a chunk, with a running usage."""
    for total in range(2, body["max_tokens"] + 2, 2):
        now = min(total, body["max_tokens"])
        yield {**text("ab"), "usage": {"completion_tokens": now}}


@pytest.mark.parametrize("chunks", [plain, split, partial_letters, silent, numbered, counted])
def test_tokens_are_counted(serve: Serve, chunks: Chunks) -> None:
    result, ticked = run(serve(chunks), at_once(7, 1, 12))
    assert [len(line.times) for line in result.lines] == [7, 1, 12]
    assert ticked == 20
    assert result.inexact == 0
    assert all(line.times == sorted(line.times) for line in result.lines)


def test_ids_are_kept_where_they_are_told(serve: Serve) -> None:
    assert run(serve(numbered), at_once(7))[0].tokens == [list(range(7))]
    assert run(serve(plain), at_once(7))[0].tokens == [[]]


def test_unnumbered_tokens_are_spread_over_their_chunks_and_told(serve: Serve) -> None:
    def lumps(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for _ in range(2):
            yield text("abc")
            time.sleep(0.05)
        yield usage(6)

    result, ticked = run(serve(lumps), at_once(6))
    times = result.lines[0].times
    assert times[0] == times[1] == times[2] < times[3] == times[4] == times[5]
    assert (result.inexact, ticked) == (1, 6)


def test_a_warm_cache_is_noticed(serve: Serve) -> None:
    def warm(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield text("a")
        yield usage(1, cached=2)

    assert run(serve(warm), at_once(1, 1))[0].cached == 4


def test_clients(serve: Serve) -> None:
    def slow(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for chunk in plain(body):
            time.sleep(0.01)
            yield chunk

    closed, opened = serve(slow), serve(slow)
    result, _ = run(closed, with_clients(at_once(*[2] * 9), 3))
    assert closed.most == 3
    assert [len(line.times) for line in result.lines] == [2] * 9
    run(opened, at_once(*[2] * 9))
    assert opened.most > 3


def test_a_request_waits_for_its_condition(serve: Serve) -> None:
    def slow(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for chunk in plain(body):
            yield chunk
            time.sleep(0.02)

    work = Workload("w", "W", [Request([1], 6), Request([2], 1, at=0.01, after=((0, 3),))])
    first, second = run(serve(slow), work)[0].lines
    assert second.sent >= first.times[2] + 0.01
    assert second.times[0] < first.times[5] + 1.0


def test_too_few_tokens(serve: Serve) -> None:
    def stops(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield text("a", "stop")
        yield usage(1)

    with pytest.raises(RequestFailedError, match=r"gave 1 tokens for request 0, 5 were asked for.*ignore_eos"):
        run(serve(stops), at_once(5))


def test_refusals_are_repeated(serve: Serve) -> None:
    server = serve(plain)
    server.status = 503
    with pytest.raises(RequestFailedError, match=r"answered 503.*the model is busy"):
        run(server, at_once(1, 1))


def test_an_error_in_the_stream(serve: Serve) -> None:
    with pytest.raises(RequestFailedError, match="out of memory"):
        run(serve(lambda _: iter([text("a"), {"error": {"message": "out of memory"}}])), at_once(3))


def test_nobody_there(serve: Serve) -> None:
    server = serve(plain)
    server.close()
    with pytest.raises(ConfigError, match=r"cannot reach http://127\.0\.0\.1"):
        UrlTarget("it", server.url)
    with pytest.raises(RequestFailedError, match="broke off"):
        UrlTarget("it", server.url, model="m").run(at_once(1), lambda _: None)


def test_no_model_is_listed(serve: Serve) -> None:
    server = serve(plain)
    server.models = {"data": []}
    with pytest.raises(ConfigError, match="lists no model; name one with --url-model"):
        UrlTarget("it", server.url)


@pytest.mark.parametrize(
    ("given", "name", "url"),
    [
        ("http://127.0.0.1:8000/v1", "127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("vllm=http://host/v1/", "vllm", "http://host/v1"),
        ("a=https://host/v1/completions", "a", "https://host/v1"),
        ("http://host/v1?key=a", "host", "http://host/v1?key=a"),
    ],
)
def test_addresses(given: str, name: str, url: str) -> None:
    assert check_url(given) == (name, url)


@pytest.mark.parametrize("given", ["localhost:8000", "name=", "ftp://host/v1", "http://"])
def test_bad_addresses(given: str) -> None:
    with pytest.raises(ConfigError, match=r"give a server's address"):
        check_url(given)
