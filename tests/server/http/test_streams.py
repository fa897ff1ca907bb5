"""Server-sent events, byte by byte: what strict clients rely on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from fastgen.testing.scripted import ScriptedEngine
from fastgen.types import StepOutput

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me"}]}
TEXT: dict[str, Any] = {"prompt": "Tell me"}
PATHS = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}
both = pytest.mark.parametrize("path", PATHS)

KEYS = {
    "/v1/completions": {"id", "object", "created", "model", "choices", "system_fingerprint"},
    "/v1/chat/completions": {"id", "object", "created", "model", "choices", "system_fingerprint"},
}


def events(raw: bytes) -> Iterator[Any]:
    """The events of a stream, each exactly ``data: ...`` and an empty line; the end is ``[DONE]``."""
    assert raw.endswith(b"\n\n")
    for event in raw[:-2].split(b"\n\n"):
        assert event.startswith(b"data: ")
        assert b"\n" not in event
        data = event.removeprefix(b"data: ")
        yield "[DONE]" if data == b"[DONE]" else json.loads(data, parse_constant=pytest.fail)


def ask(door: Any, path: str, **fields: Any) -> list[Any]:
    async def post() -> list[Any]:
        async with door.http() as client:
            answer = await client.post(path, json={**PATHS[path], "stream": True, "max_tokens": 6, **fields})
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert "content-length" not in answer.headers
            assert answer.headers["cache-control"] == "no-cache"
            return list(events(answer.content))

    return asyncio.run(post())


@both
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("usage", [False, True])
def test_every_chunk_has_its_shape(door: Any, path: str, n: int, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    *chunks, done = ask(door, path, n=n, temperature=1.0, seed=5, **options)
    assert done == "[DONE]"
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert set(last["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
        assert last["usage"]["completion_tokens"] <= 6 * n
    heads = set()
    finished: dict[int, str] = {}
    begun: set[int] = set()
    for chunk in chunks:
        assert set(chunk) == KEYS[path] | ({"usage"} if usage else set())
        assert chunk.get("usage") is None
        heads.add((chunk["id"], chunk["created"], chunk["model"], chunk["object"]))
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in finished
        assert {"index", "logprobs", "finish_reason"} <= set(choice)
        if path == "/v1/chat/completions":
            assert ("role" in choice["delta"]) == (index not in begun)
        else:
            assert isinstance(choice["text"], str)
        begun.add(index)
        if choice["finish_reason"] is not None:
            finished[index] = choice["finish_reason"]
    assert len(heads) == 1
    assert set(finished) == set(range(n))
    assert set(finished.values()) <= {"stop", "length"}
    assert door.idle()


@both
def test_one_token(door: Any, path: str) -> None:
    *chunks, done = ask(door, path, max_tokens=1)
    assert done == "[DONE]"
    assert [one["choices"][0]["finish_reason"] for one in chunks][-1] == "length"
    assert len(chunks) == (2 if "chat" in path else 1)


@both
def test_a_stop_in_the_first_token(scripted: Any, engine: ScriptedEngine, path: str) -> None:
    engine.script = lambda prompt, index: list(b"stop and more")
    options = {"stream_options": {"include_usage": True}, "n": 2}
    *chunks, last, done = ask(scripted, path, max_tokens=50, stop=["s"], **options)
    assert done == "[DONE]"
    assert last["usage"]["completion_tokens"] == 2
    ends = [one["choices"][0] for one in chunks if one["choices"][0]["finish_reason"]]
    assert [(one["index"], one["finish_reason"], one["stop_reason"]) for one in ends] == [
        (0, "stop", "s"),
        (1, "stop", "s"),
    ]
    text = "".join(
        one["choices"][0].get("text") or one["choices"][0].get("delta", {}).get("content", "") for one in chunks
    )
    assert text == ""


@both
def test_choices_of_different_lengths(scripted: Any, engine: ScriptedEngine, path: str) -> None:
    engine.script = lambda prompt, index: [ord("x")] * (1 + 2 * index)
    *chunks, done = ask(scripted, path, max_tokens=50, n=3)
    assert done == "[DONE]"
    for index in range(3):
        own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
        text = "".join(one.get("text") or one.get("delta", {}).get("content", "") for one in own)
        assert text == "x" * (1 + 2 * index)
        assert [bool(one["finish_reason"]) for one in own] == [False] * (len(own) - 1) + [True]


@both
def test_held_text_makes_no_events(scripted: Any, engine: ScriptedEngine, path: str) -> None:
    """Three of the four bytes of a character, and the beginning of a stop string."""
    engine.script = lambda prompt, index: [ord("a"), *"🙂".encode(), *b"<en", ord("b")]
    *chunks, done = ask(scripted, path, max_tokens=50, stop="<end>")
    assert done == "[DONE]"
    texts = [one["choices"][0].get("text", one["choices"][0].get("delta", {}).get("content")) for one in chunks]
    assert [text for text in texts if text] == ["a", "🙂", "<enb"]
    assert len(chunks) == (4 if "chat" in path else 3)  # the role has a chunk of its own


def break_after(engine: ScriptedEngine, count: int, reason: str, index: int = 0) -> None:
    """Let one choice end with ``reason`` after ``count`` steps."""
    step = engine.step

    def broken() -> list[StepOutput]:
        outputs = step()
        for output in outputs:
            if engine.steps > count and output.index == index and output.finish_reason is None:
                engine.abort(output.request_id, output.index)
                output.token_id, output.finish_reason = None, reason  # type: ignore[assignment]
                output.error = "the logits are NaN" if reason == "error" else None
        return outputs

    engine.step = broken  # type: ignore[method-assign]


@both
@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_error_in_mid_stream(scripted: Any, engine: ScriptedEngine, path: str, reason: str) -> None:
    engine.script = lambda prompt, index: [ord("x")] * 20
    break_after(engine, 3, reason, index=1)
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = ask(scripted, path, max_tokens=50, n=2, **options)
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert ("NaN" in last["error"]["message"]) == (reason == "error")
    assert all(one["choices"] for one in chunks)
    assert scripted.admission.choices == 0


@both
@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 503)])
def test_an_error_without_a_stream(scripted: Any, engine: ScriptedEngine, path: str, reason: str, status: int) -> None:
    engine.script = lambda prompt, index: [ord("x")] * 20
    break_after(engine, 3, reason)

    async def post() -> None:
        async with scripted.http() as client:
            answer = await client.post(path, json={**PATHS[path], "max_tokens": 50})
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert "Traceback" not in answer.text

    asyncio.run(post())
    assert scripted.admission.choices == 0


@both
def test_an_engine_that_dies_in_mid_stream(scripted: Any, engine: ScriptedEngine, path: str) -> None:
    engine.script = lambda prompt, index: [ord("x")] * 20

    def die() -> None:
        if engine.steps == 4:
            raise RuntimeError("boom")

    engine.on_step = die
    *chunks, last = ask(scripted, path, max_tokens=50)
    assert chunks
    assert last["error"]["code"] == "unavailable"

    async def after() -> None:
        async with scripted.http() as client:
            assert (await client.post(path, json=PATHS[path])).status_code == 503
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "failed")
            assert (await client.get("/ready")).status_code == 503

    asyncio.run(after())


@both
def test_nothing_is_streamed_of_a_request_that_is_refused(door: Any, path: str) -> None:
    async def post() -> None:
        async with door.http() as client:
            for fields in ({"max_tokens": 600}, {"logit_bias": {"400": 1}}, {"stop_token_ids": [10**12]}):
                answer = await client.post(path, json={**PATHS[path], "stream": True, **fields})
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == next(iter(fields))

    asyncio.run(post())
    assert door.idle()
