"""Health, versions, request ids, CORS, and the API's description."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

import fastgen
from fastgen.testing.scripted import ScriptedEngine


def send(door: Any, method: str, path: str, **options: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with door.http() as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


def test_a_working_server(door: Any) -> None:
    assert send(door, "GET", "/health").json() == {"status": "ready", "detail": ""}
    assert send(door, "GET", "/ready").status_code == 200
    assert send(door, "GET", "/version").json() == {"version": fastgen.__version__}


def test_a_server_that_starts_or_ends(make: Any) -> None:
    door = make()
    door.service.backend.starting = True
    for path in ("/health", "/ready"):
        answer = send(door, "GET", path)
        assert (answer.status_code, answer.json()["status"]) == (503, "starting")
        assert "loaded" in answer.json()["detail"]
    refused = send(door, "POST", "/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503
    assert "starting" in refused.json()["error"]["message"]
    door.service.backend.starting = False
    door.admission.drain()
    assert send(door, "GET", "/health").status_code == 200
    answer = send(door, "GET", "/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")
    refused = send(door, "POST", "/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


def test_a_failed_server(scripted: Any) -> None:
    scripted.pipe.close()
    for draining in (False, True):
        for path in ("/health", "/ready"):
            answer = send(scripted, "GET", path)
            assert (answer.status_code, answer.json()["status"]) == (503, "failed")
            assert answer.json()["detail"]
        if not draining:
            assert send(scripted, "POST", "/v1/completions", json={"prompt": "x"}).status_code == 503
            scripted.admission.drain()
    assert send(scripted, "POST", "/v1/completions", json={"prompt": "x"}).status_code == 503


@pytest.mark.parametrize("given", ["abc-1.2_3:4", "x" * 128])
def test_a_sane_request_id_is_kept(door: Any, given: str) -> None:
    answer = send(
        door, "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": given}
    )
    assert answer.headers["x-request-id"] == given
    assert answer.json()["id"] == f"cmpl-{given}"


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "<script>", "a\tb", "é"])
def test_another_one_is_not(door: Any, given: str) -> None:
    answers = [send(door, "GET", "/health", headers={"X-Request-Id": given.encode()}) for _ in range(2)]
    made = [one.headers["x-request-id"] for one in answers]
    assert given not in made
    assert made[0] != made[1]


def test_cors(make: Any) -> None:
    door = make(cors_origin=("https://a.example", "https://b.example"))
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    for origin, allowed in (("https://b.example", True), ("https://evil.example", False)):
        answer = send(door, "OPTIONS", "/v1/completions", headers={"Origin": origin, **preflight})
        assert (answer.status_code == 200) == allowed
        assert (answer.headers.get("access-control-allow-origin") == origin) == allowed
        answer = send(door, "GET", "/v1/models", headers={"Origin": origin})
        assert (answer.headers.get("access-control-allow-origin") == origin) == allowed
        assert answer.headers["x-request-id"]
    anywhere = make(cors_origin="*")
    answer = send(anywhere, "GET", "/v1/models", headers={"Origin": "https://any.example"})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


def test_no_cors_unless_asked_for(door: Any) -> None:
    answer = send(door, "GET", "/v1/models", headers={"Origin": "https://a.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_names(make: Any) -> None:
    door = make(served_model_name=("big", "small"))
    assert [one["id"] for one in send(door, "GET", "/v1/models").json()["data"]] == ["big", "small"]
    fields = {"prompt": "x", "max_tokens": 1}
    for asked, told in ((None, "big"), ("big", "big"), ("small", "small")):
        answer = send(door, "POST", "/v1/completions", json={**fields, "model": asked})
        assert answer.json()["model"] == told
    assert send(door, "POST", "/v1/completions", json={**fields, "model": "tiny"}).status_code == 404


def test_an_adapter_is_a_model(scripted: Any, engine: ScriptedEngine) -> None:
    used = []
    add = engine.add

    def watched(*args: Any, **options: Any) -> str:
        used.append(args[1].lora)
        return add(*args, **options)

    engine.add = watched  # type: ignore[method-assign]
    (base, adapter) = send(scripted, "GET", "/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("scripted", None)
    assert (adapter["id"], adapter["parent"]) == ("polite", "scripted")
    for name in ("polite", "scripted"):
        answer = send(scripted, "POST", "/v1/completions", json={"prompt": "x", "model": name, "max_tokens": 1})
        assert answer.json()["model"] == name
    assert used == ["polite", None]


def test_docs_can_be_left_out(make: Any) -> None:
    door = make(docs=False, metrics=False, page=False)
    for path in ("/docs", "/openapi.json", "/redoc", "/metrics", "/"):
        assert send(door, "GET", path).status_code == 404


def test_metrics_count_what_came_through_this_door(make: Any) -> None:
    door = make()
    assert send(door, "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
    text = send(door, "GET", "/metrics").text
    assert 'vllm:generation_tokens_total{model_name="tiny"} 3.0' in text


def test_the_description_names_every_field(door: Any) -> None:
    told = send(door, "GET", "/openapi.json").json()
    body = told["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionRequest"}
    schema = told["components"]["schemas"]["CompletionRequest"]
    assert schema["additionalProperties"] is False
    assert {"prompt", "max_tokens", "top_k", "logit_bias"} <= set(schema["properties"])
