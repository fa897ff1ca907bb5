"""Random and mutated requests: each gets one answer in a known shape, and the server is the same afterwards."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import fastgen

pytestmark = pytest.mark.slow

AT_ONCE = 8
LARGE = 70_000
"""More bytes than are read in the event loop."""
SECONDS = 120.0
USER = {"role": "user", "content": "Tell me"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "temperature": 0.8, "seed": 3, "n": 2, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "echo": True, "stop": ["x"], "stream": True}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "logit_bias": {"65": 5}, "top_p": 0.9, "top_k": 5}),
    ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", {"messages": [USER], "stream": True, "max_completion_tokens": 3, "stop": "y"}),
    ("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "content": None}], "tools": [TOOL]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
    ("/tokenize", {"prompt": "text", "return_token_strs": True}),
    ("/tokenize", {"messages": [USER], "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/fastgen/generate", {"prompt": "Hi", "params": {"max_new_tokens": 3, "logprobs": 1}}),
    ("/v1/fastgen/generate", {"messages": [USER], "params": {"n": 2}, "stream": True}),
]
FIELDS = sorted({name for _, body in SEEDS for name in body} | {"min_p", "stop_token_ids", "ignore_eos", "priority"})
FIELDS += ["response_format", "guided_json", "tool_choice", "chat_template", "model", "best_of", "suffix", "min_tokens"]
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 15, 63, 64, 10**6, 2**31, 2**63, -(2**63), 10**30, 0.0, 0.5, -1e-9, 1e300, 2.5),
    *("", "x", "Hello", "5", "NaN", "\u0000", "🙂", "ß" * 50, "{{ messages }}", "{% for i in range(9) %}", "../../x"),
    *([], [[]], [0], [[0]], ["a"], ["a", 1], [None], [True], [-1], [259], [[1, "a"]], [{}], ["x"] * 70),
    *({}, {"a": 1}, {"1": 1}, {"-1": 5}, {"abc": 0}, {"type": "json_object"}, {"type": "json_schema"}, {"role": "x"}),
    *({"type": "object", "properties": {}}, {"type": "text", "text": None}, {"include_usage": 1}, "auto", "required"),
]
KNOWN = {200, 400, 404, 405, 413, 415, 429}


class Maker:
    """Requests, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def request(self) -> dict[str, Any]:
        path, body = copy.deepcopy(self.draw.choice(SEEDS))
        for _ in range(self.draw.choice((0, 1, 1, 1, 2, 3))):
            self.mutate(body)
        if self.draw.random() < 0.1:
            self.enlarge(body)
        raw = json.dumps(body, ensure_ascii=self.draw.random() < 0.5).encode()
        if self.draw.random() < 0.05:
            raw += b" " * LARGE
        if self.draw.random() < 0.15:
            raw = self.garble(raw)
        method = "POST" if self.draw.random() < 0.97 else self.draw.choice(("GET", "PUT", "DELETE", "PATCH"))
        if self.draw.random() < 0.02:
            path += self.draw.choice(("/", "/x", "?a=1", "%00", "/../models"))
        kind = "application/json" if self.draw.random() < 0.97 else self.draw.choice(("text/plain", "", "a/b; c"))
        return {"method": method, "url": path, "content": raw, "headers": {"Content-Type": kind}}

    def mutate(self, body: dict[str, Any]) -> None:
        kind = self.draw.random()
        if kind < 0.1 and body:
            del body[self.draw.choice(sorted(body))]
        elif kind < 0.15:
            body[self.draw.choice(("promt", "", "params", "__class__", "n ", "\u202e"))] = self.value()
        elif kind < 0.4 and body:
            holder = self.draw.choice([one for one in containers(body) if one])
            key = self.draw.choice(sorted(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key] = self.value()
        else:
            body[self.draw.choice(FIELDS)] = self.value()

    def enlarge(self, body: dict[str, Any]) -> None:
        kind = self.draw.randrange(5)
        if kind == 0:
            body[self.draw.choice(FIELDS)] = [self.value()] * 20_000
        elif kind == 1:
            body[self.draw.choice(FIELDS)] = {str(key): self.value() for key in range(10_000)}
        elif kind == 2:
            body[self.draw.choice(FIELDS)] = self.draw.choice("xß🙂") * LARGE
        elif kind == 3:
            body.update({f"{name}{key}": 1 for key, name in enumerate(FIELDS * 300)})
        else:
            body["x" * LARGE] = None

    def value(self) -> Any:
        value = copy.deepcopy(self.draw.choice(JUNK))
        return value if self.draw.random() < 0.9 else self.draw.choice(([value], {"x": value}, [value] * 3))

    def garble(self, raw: bytes) -> bytes:
        data = bytearray(raw)
        for _ in range(self.draw.randint(1, 4)):
            place = self.draw.randrange(len(data) or 1)
            match self.draw.randrange(4):
                case 0:
                    del data[place:]
                case 1:
                    data[place : place + 1] = bytes([self.draw.randrange(256)])
                case 2:
                    data[place:place] = self.draw.choice(
                        (b"NaN", b"\\ud800", b"}", b"[" * 200, b"\xff", b'"a":', b"1e999")
                    )
                case _:
                    data[place:place] = data[: self.draw.randrange(40)]
        return bytes(data)


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def check(answer: httpx.Response) -> None:
    assert answer.status_code in KNOWN
    kind = answer.headers["content-type"]
    if kind.startswith("text/event-stream"):
        *blocks, rest = answer.text.split("\n\n")
        assert rest == ""
        lines = [block.split("\n")[-1].removeprefix("data: ") for block in blocks]
        if not blocks[0].startswith("event: "):  # OpenAI's
            assert lines.pop() == "[DONE]"
        events = [json.loads(line, parse_constant=pytest.fail) for line in lines]
        assert all(event.get("error") is None for event in events)
        if blocks[0].startswith("event: "):
            assert events[-1]["usage"]
        else:
            choices = [choice for event in events for choice in event["choices"]]
            ended = [choice["index"] for choice in choices if choice["finish_reason"]]
            assert sorted(ended) == sorted({choice["index"] for choice in choices})
        return
    body = json.loads(answer.content, parse_constant=pytest.fail)
    if answer.status_code != 200:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["message"]
        assert "Traceback" not in answer.text


@pytest.fixture(scope="module")
def small(make: Callable[..., Any], tiny: Path) -> Iterator[Any]:
    """Short answers at most."""
    with fastgen.pipeline(tiny, num_blocks=40, max_model_len=64, max_sequences=4) as pipe:
        yield make(pipe, max_queue=24, max_sequences=4)


async def attack(door: Any, seed: int, count: int) -> Counter[int]:
    maker, seen = Maker(seed), Counter[int]()
    healthy = {"prompt": "Hello", "max_tokens": 12, "seed": 4, "temperature": 1.0}
    wanted = (await asyncio.to_thread(door.pipe, "Hello", max_new_tokens=12, seed=4, temperature=1.0)).text
    requests = iter([maker.request() for _ in range(count)])
    async with door.http() as client:

        async def work() -> None:
            for number, request in enumerate(requests):
                answer = await asyncio.wait_for(client.request(**request), SECONDS)
                try:
                    check(answer)
                except BaseException as error:
                    raise AssertionError(f"{request}\n{answer.status_code} {answer.text[:2000]}") from error
                seen[answer.status_code] += 1
                if number % 20 == 0:
                    answer = await client.post("/v1/completions", json=healthy)
                    assert answer.status_code == 429 or answer.json()["choices"][0]["text"] == wanted

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        assert (await client.post("/v1/completions", json=healthy)).json()["choices"][0]["text"] == wanted
    return seen


def run(door: Any, seed: int, count: int) -> None:
    seen = asyncio.run(attack(door, seed, count))
    assert seen.total() == count
    assert seen[200] > count / 20  # the fuzzer gets somewhere
    assert seen[400] > count / 4
    assert door.idle()
    assert door.admission.prompt_tokens == 0


def test_five_hundred(small: Any) -> None:
    run(small, seed=1, count=500)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2, 12))
def test_ten_thousand(small: Any, seed: int) -> None:
    run(small, seed, count=1000)
