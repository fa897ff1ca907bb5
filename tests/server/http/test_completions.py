"""Echo, scoring, lengths and counts of ``/v1/completions``."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import fastgen
from fastgen.server.http.logprobs import LOWEST, finite
from fastgen.testing.scripted import ScriptedEngine
from fastgen.types import StepOutput, TokenLogprob


def post(door: Any, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with door.http() as client:
            return await client.post(path, json=fields)

    return asyncio.run(ask())


def ok(door: Any, **fields: Any) -> Any:
    answer = post(door, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def hf_logprobs(directory: Path, ids: list[int]) -> Any:
    """Log-probabilities of all tokens at each place, by transformers: (places, vocabulary)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1).numpy()


def test_scoring_a_prompt_equals_transformers(door: Any, tiny: Path) -> None:
    ids = door.pipe.tokenizer.encode("scored")
    assert len(ids) == 6
    told = ok(door, prompt="scored", max_tokens=0, echo=True, logprobs=3)
    (choice,) = told["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "scored"
    assert choice["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == 0
    assert told["usage"]["total_tokens"] == 6
    assert logprobs["tokens"] == list("scored")
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    scores = hf_logprobs(tiny, ids)
    wanted = [scores[place, token] for place, token in enumerate(ids[1:])]
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], wanted, atol=1e-4)
    for place, top in enumerate(logprobs["top_logprobs"][1:]):
        best = np.sort(scores[place])[::-1][:3]
        assert max(top.values()) == pytest.approx(best[0], abs=1e-4)


def test_echo_with_an_answer(door: Any) -> None:
    plain = ok(door, prompt=["Hello", "Grüße"], max_tokens=4, logprobs=1, n=2, temperature=1, seed=2)
    told = ok(door, prompt=["Hello", "Grüße"], max_tokens=4, logprobs=1, n=2, temperature=1, seed=2, echo=True)
    for index, (choice, without) in enumerate(zip(told["choices"], plain["choices"], strict=True)):
        prompt = ["Hello", "Grüße"][index // 2]
        length = len(prompt.encode())
        assert choice["index"] == index
        assert choice["text"] == prompt + without["text"]
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == length + 4
        assert logprobs["token_logprobs"][length:] == pytest.approx(without["logprobs"]["token_logprobs"], abs=1e-4)
        assert logprobs["text_offset"][length:] == [
            offset + len(prompt) for offset in without["logprobs"]["text_offset"]
        ]
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    # ü and ß are two bytes, two tokens, each: both begin where the character does.
    assert told["choices"][2]["logprobs"]["text_offset"][:7] == [0, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("most", [0, 3])
def test_a_streamed_echo_equals_a_whole_one(door: Any, most: int) -> None:
    fields = {"prompt": [[72, 101], [72, 105]], "max_tokens": most, "echo": True, "logprobs": 2, "n": 2}

    async def stream() -> list[Any]:
        async with door.openai() as client:
            return [one async for one in await client.completions.create(model="tiny", stream=True, **fields)]  # type: ignore[call-overload]

    chunks = asyncio.run(stream())
    for choice in ok(door, **fields)["choices"]:
        own = [one.choices[0] for one in chunks if one.choices[0].index == choice["index"]]
        assert "".join(one.text for one in own) == choice["text"]
        assert own[-1].finish_reason == choice["finish_reason"]
        for name in ("tokens", "text_offset"):
            assert [entry for one in own for entry in getattr(one.logprobs, name)] == choice["logprobs"][name]


def test_an_echo_of_ids_is_their_text(door: Any) -> None:
    (choice,) = ok(door, prompt=[72, 105, 257], max_tokens=0, echo=True, skip_special_tokens=False)["choices"]
    assert choice["text"] == "Hi<eos>"
    assert choice["logprobs"] is None


def test_prompt_logprobs_of_our_own(door: Any) -> None:
    (choice,) = ok(door, prompt="Hi", max_tokens=1, prompt_logprobs=1)["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["105"]["decoded_token"] == "i"
    assert any(one["rank"] == 1 for one in second.values())
    chat = post(
        door, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], prompt_logprobs=0, max_tokens=1
    )
    assert chat.json()["choices"][0]["prompt_logprobs"][0] is None


def test_numbers_that_json_does_not_have() -> None:
    assert finite(-math.inf) == finite(math.nan) == LOWEST == -9999.0
    assert finite(-12.5) == -12.5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_impossible_tokens_are_written_as_a_number(
    scripted: Any, engine: ScriptedEngine, path: str, stream: bool
) -> None:
    step = engine.step

    def impossible() -> list[StepOutput]:
        outputs = step()
        for output in outputs:
            token = TokenLogprob(65, -math.inf, 9)
            output.logprob = replace(token, top=(token, TokenLogprob(66, math.nan, 1)))
            if output.prompt_logprobs:
                output.prompt_logprobs = [None, *[output.logprob] * (len(output.prompt_logprobs) - 1)]
        return outputs

    engine.step = impossible  # type: ignore[method-assign]
    fields: dict[str, Any] = {"prompt": "Hi", "echo": True, "logprobs": 2}
    if "chat" in path:
        fields = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    answer = post(scripted, path, max_tokens=2, prompt_logprobs=1, stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    for word in ("NaN", "Infinity", "inf"):
        assert word not in answer.text
    assert "-9999.0" in answer.text


@pytest.mark.parametrize("n", [1, 3, 128])
def test_more_choices_than_run_at_once(door: Any, n: int) -> None:
    """Two do."""
    told = ok(door, prompt="Hello", max_tokens=2, n=n, temperature=1.0, seed=1)
    assert [one["index"] for one in told["choices"]] == list(range(n))
    assert told["usage"]["completion_tokens"] == 2 * n
    assert door.idle()


def test_one_choice_too_many(door: Any) -> None:
    answer = post(door, prompt="Hello", max_tokens=2, n=129)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"


def test_more_choices_than_are_ever_let_in(make: Any) -> None:
    door = make(max_queue=3)  # and two that run
    assert post(door, prompt="x", max_tokens=1, n=5).status_code == 200
    answer = post(door, prompt=["x", "y", "z"], max_tokens=1, n=2)
    assert answer.status_code == 400
    assert "6 choices" in answer.json()["error"]["message"]
    long = post(make(max_waiting_tokens=10), prompt="x" * 11, max_tokens=1)
    assert long.status_code == 400
    assert long.json()["error"]["param"] == "prompt"


LIMIT = 16
LENGTHS: list[Any] = [None, 0, 1, 2, -1, True, "5", 1.5]


@pytest.mark.parametrize("tokens", [0, 15, 16, 17])
def test_lengths_at_the_limit(make: Any, tiny: Path, tokens: int) -> None:
    with fastgen.pipeline(tiny, num_blocks=16, max_model_len=LIMIT) as pipe:
        door = make(pipe)
        for most in LENGTHS:
            answer = post(door, prompt="x" * tokens, max_tokens=most)
            possible = tokens == 15 and most in (None, 1) and most is not True
            assert answer.status_code == (200 if possible else 400), (tokens, most, answer.text)
            if possible:
                assert answer.json()["usage"]["completion_tokens"] == 1
            elif tokens >= LIMIT and most in (None, 1, 2) and most is not True:
                assert str(tokens) in answer.json()["error"]["message"]
                assert str(LIMIT) in answer.json()["error"]["message"]


def test_tokens_and_back(door: Any) -> None:
    text = "Grüße 🙂"
    told = post(door, "/tokenize", prompt=text, return_token_strs=True).json()
    assert told["tokens"] == door.pipe.tokenizer.encode(text)
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 512
    assert told["token_strs"][0] == "G"
    assert post(door, "/detokenize", tokens=told["tokens"]).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    chat = post(door, "/tokenize", messages=messages).json()
    assert chat["tokens"] == door.pipe.tokenizer.encode_chat(messages)
    assert post(door, "/detokenize", tokens=[257], skip_special_tokens=True).json() == {"prompt": ""}
    assert post(door, "/detokenize", tokens=[257]).json() == {"prompt": "<eos>"}
    for fields in ({}, {"prompt": "x", "messages": messages}, {"prompt": 3}, {"prompt": "x", "model": "y"}):
        assert post(door, "/tokenize", **fields).status_code == (404 if "model" in fields else 400)
    refused = post(door, "/tokenize", prompt="x", add_generation_prompt=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_generation_prompt")
    for bad in ([259], [-1], [10**12], [True], ["a"], [1.5], 3):
        assert post(door, "/detokenize", tokens=bad).status_code == 400


@pytest.mark.parametrize("bad", [-1, 259, 10**12, "abc", "1.5", 1.5, True, None])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "prompt"])
def test_ids_outside_the_vocabulary_are_refused(door: Any, field: str, bad: Any) -> None:
    values = {"logit_bias": {str(bad): 1}, "stop_token_ids": [bad], "prompt": [72, bad]}
    fields = {"prompt": "x", "max_tokens": 2, field: values[field]}
    answer = post(door, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)


def test_neighbours_of_refused_requests_keep_their_text(door: Any) -> None:
    wanted = door.pipe("Hello", max_new_tokens=40).text
    bad = [{"logit_bias": {"259": 1}}, {"stop_token_ids": [-1]}, {"prompt": [10**12]}, {"n": 0}]

    async def ask() -> None:
        async with door.http() as client:
            healthy = asyncio.create_task(client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 40}))
            for _ in range(5):
                for fields in bad:
                    answer = await client.post("/v1/completions", json={"prompt": "x", **fields})
                    assert answer.status_code == 400
            assert (await healthy).json()["choices"][0]["text"] == wanted

    asyncio.run(ask())
