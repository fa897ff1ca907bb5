"""The route of fastgen's own, as bytes on the wire; ``tests/client`` compares its answers with the pipeline's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from fastgen.types import Response
from fastgen.wire import documents

pytestmark = pytest.mark.slow

URL = "/v1/fastgen/generate"


def post(door: Any, body: Any, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with door.http() as client:
            how = {"content": body} if isinstance(body, bytes) else {"json": body}
            headers = {"Content-Type": "application/json"}
            return await client.post(URL, **how, **{"headers": headers, **options})

    return asyncio.run(run())


def events(answer: httpx.Response) -> list[tuple[str, Any]]:
    """Strictly: a name and a line of data each, and nothing else."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "), parse_constant=_refuse)))
    return found


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_the_whole_answer(door: Any) -> None:
    answer = post(door, {"prompt": "hé", "params": {"max_new_tokens": 3, "logprobs": 1, "prompt_logprobs": 1, "n": 2}})
    assert answer.status_code == 200
    found = json.loads(answer.text, parse_constant=_refuse)
    assert found["prompt"] == "hé"
    assert found["prompt_logprobs"][0] is None
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    response = documents.read_response(answer.content)
    assert response.usage.completion_tokens == 6
    assert documents.encode(response) == answer.content
    assert door.idle()


def test_e8_a_form_that_cannot_be_kept_is_refused_at_the_door(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an engine hears of it: its loop would wait for the check."""
    handed_in: list[object] = []
    monkeypatch.setattr(door.service.verbs.loop, "submit", handed_in.append)
    params = {"max_new_tokens": 3, "logits_processors": {"guided": {"json_schema": {"type": "nonsense"}}}}
    answer = post(door, {"prompt": "a", "params": params})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logits_processors"
    assert not handed_in


def test_a_stream(door: Any) -> None:
    body = {"prompt": "hé", "params": {"max_new_tokens": 3, "prompt_logprobs": 0}, "stream": True}
    came = events(post(door, body))
    assert [name for name, _ in came] == ["prompt", "prompt_logprobs", "chunk", "chunk", "chunk"]
    assert came[0][1]["prompt"] == "hé"
    assert [data["usage"] is None for _, data in came[2:]] == [True, True, False]
    assert came[-1][1]["finish_reason"] == "length"
    assert door.idle()


def test_ids_and_messages(door: Any) -> None:
    params = {"max_new_tokens": 2}
    assert post(door, {"prompt_token_ids": [97], "params": params}).json()["prompt"] is None
    chat = {"messages": [{"role": "user", "content": "a"}], "template_variables": {"x": 1}, "params": params}
    assert "a" in post(door, chat).json()["prompt"]
    assert post(door, {"prompt": "a", "params": {**params, "seed": None, "n": None}, "model": None}).status_code == 200


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        (b"{", "not JSON", None),
        (b"[]", "must be a JSON object", None),
        (b'{"prompt": "a", "params": {"temperature": NaN}}', "NaN is no number", None),
        (b'{"prompt": "a", "prompt": "b"}', "comes twice", None),
        (b'{"prompt": "\\ud800"}', "surrogate", None),
        ({}, "give one of", "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt and prompt_token_ids", "prompt"),
        ({"prompt": ""}, "the prompt is empty", "prompts"),
        ({"prompt": "a", "promt": 1}, "Did you mean 'prompt'", "promt"),
        ({"prompt": "a", "max_new_tokens": 1}, "unknown field 'max_new_tokens'", "max_new_tokens"),
        ({"prompt": "a", "tools": []}, "goes with messages", "tools"),
        ({"prompt": 5}, "prompt", "prompt"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids", "prompt_token_ids.0"),
        ({"prompt_token_ids": [10**12]}, "1000000000000", "prompt_token_ids"),
        ({"prompt_token_ids": [10**40]}, "1000000", "prompt_token_ids"),
        ({"prompt": "a", "stream": "yes"}, "stream", "stream"),
        ({"prompt": "a", "params": []}, "params", "params"),
        ({"prompt": "a", "params": {"temprature": 1}}, "Did you mean 'temperature'", "temprature"),
        ({"prompt": "a", "params": {"nobody": None}}, "unknown option 'nobody'", "nobody"),
        ({"prompt": "a", "params": {"n": 0}}, "n: ", "n"),
        ({"prompt": "a", "params": {"n": True}}, "n: ", "n"),
        ({"prompt": "a", "params": {"logit_bias": {"1.5": 1}}}, "logit_bias", "logit_bias.1.5.[key]"),
        ({"prompt": "a", "params": {"logit_bias": {"300": 1}}}, "logit_bias names", "logit_bias"),
        ({"messages": []}, "messages is empty", "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "template": "{{ 1 }}"}, "name of one", "template"),
    ],
)
def test_bad_bodies(door: Any, body: Any, words: str, param: str | None) -> None:
    answer = post(door, body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert words in error["message"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    if isinstance(body, dict) and "stream" not in body:
        assert post(door, {**body, "stream": True}).json() == answer.json()  # a status, not an event
    assert door.idle()


def test_an_unknown_model(door: Any) -> None:
    answer = post(door, {"prompt": "a", "model": "tony"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "Did you mean 'tiny'" in answer.json()["error"]["message"]


def test_an_engine_that_is_not_ready_may_be_asked_again(door: Any) -> None:
    door.service.backend.starting = True
    try:
        answer = post(door, {"prompt": "a"})
    finally:
        door.service.backend.starting = False
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


def test_an_engine_that_goes_ends_the_stream_with_an_error(scripted: Any, engine: Any) -> None:
    engine.script = lambda prompt, index: [97] * 9_000

    def end() -> None:
        if engine.steps == 20:
            raise RuntimeError("the step is broken")

    engine.on_step = end
    came = events(post(scripted, {"prompt": "a", "params": {"max_new_tokens": 9_000}, "stream": True}))
    assert [name for name, _ in came][-2:] == ["chunk", "error"]
    assert "the step is broken" in came[-1][1]["error"]["message"]
    answer = post(scripted, {"prompt": "a"})
    assert answer.status_code == 503


def test_an_engine_that_goes_before_the_answer_says_that_it_had_begun(scripted: Any, engine: Any) -> None:
    engine.script = lambda prompt, index: [97] * 9_000

    def end() -> None:
        if engine.steps == 20:
            raise RuntimeError("the step is broken")

    engine.on_step = end
    answer = post(scripted, {"prompt": "a", "params": {"max_new_tokens": 9_000}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request(live: Any, until: Any, stream: bool) -> None:
    body = {"prompt": "a", "params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": stream}

    async def run() -> None:
        async with httpx.AsyncClient(base_url=live.url) as client:
            task = asyncio.create_task(client.post(URL, json=body))
            await asyncio.to_thread(until, lambda: live.admission.choices == 1)
            task.cancel()

    asyncio.run(run())
    until(live.idle)


def test_the_description_is_of_the_answers(door: Any) -> None:
    described = door.app.openapi()["paths"][URL]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(described["properties"]) == set(Response.__dataclass_fields__)
    assert "$ref" not in json.dumps(described)
    answer = post(door, {"prompt": "a", "params": {"max_new_tokens": 2, "logprobs": 1, "prompt_logprobs": 1}})
    msgspec.json.decode(answer.content, type=Response)  # by a reader that knows the classes alone
    params = door.app.openapi()["components"]["schemas"]["GenerateBody"]["properties"]["params"]
    assert "temperature" in json.dumps(params)
