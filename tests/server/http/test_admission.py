"""Limits on what is in flight: E7 of the field cases, and the counts themselves."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from contextlib import suppress
from typing import Any

import pytest

from fastgen.errors import InvalidRequestError, OverloadedError
from fastgen.server.admission import Admission, DrainingError
from fastgen.server.settings import ServerConfig
from fastgen.testing.scripted import ScriptedEngine


def admission(most: int = 4, tokens: int = 100) -> Admission:
    return Admission(ServerConfig(max_queue=most - 1, max_waiting_tokens=tokens), max_sequences=1)


def test_what_enters_leaves() -> None:
    limits = admission()
    with limits.enter(choices=3, prompt_tokens=10) as entry:
        entry.add(prompt_tokens=5)
        assert (limits.choices, limits.prompt_tokens) == (3, 15)
        with limits.enter(choices=1):
            assert limits.choices == 4
        entry.leave()
        assert (limits.choices, limits.prompt_tokens) == (0, 0)
    assert (limits.choices, limits.prompt_tokens) == (0, 0)


def test_what_is_refused_is_not_counted() -> None:
    limits = admission()
    with limits.enter(choices=3, prompt_tokens=60):
        with pytest.raises(OverloadedError, match="full") as raised:
            limits.enter(choices=2)
        assert 1 <= raised.value.retry_after <= 60
        with pytest.raises(OverloadedError, match="prompt tokens"):
            limits.enter(choices=1, prompt_tokens=41)
        with limits.enter(choices=1) as entry, pytest.raises(OverloadedError, match="prompt tokens"):
            entry.add(prompt_tokens=41)
        assert (limits.choices, limits.prompt_tokens) == (3, 60)
        assert limits.refused == 3


def test_what_can_never_enter_is_told_so() -> None:
    limits = admission()
    for choices, tokens in ((5, 0), (1, 101)):
        with pytest.raises(InvalidRequestError, match="split it"):
            limits.enter(choices=choices, prompt_tokens=tokens)
    with limits.enter(choices=2) as entry, pytest.raises(InvalidRequestError, match="split it"):
        entry.add(prompt_tokens=101)
    assert limits.choices == 0


def test_draining() -> None:
    async def drain() -> None:
        limits = admission()
        assert await limits.wait_idle()
        entry = limits.enter(choices=2)
        limits.drain()
        assert limits.draining
        with pytest.raises(DrainingError):
            limits.enter()
        entry.add(prompt_tokens=3)  # what is in goes on
        assert not await limits.wait_idle(0.01)
        asyncio.get_running_loop().call_later(0.01, entry.leave)
        assert await limits.wait_idle(20)

    asyncio.run(drain())


def test_counts_after_a_thousand_random_entries() -> None:
    limits, draw, inside = admission(10, 1000), random.Random(0), []
    for _ in range(1000):
        if inside and draw.random() < 0.5:
            inside.pop(draw.randrange(len(inside))).leave()
            continue
        with suppress(OverloadedError):
            inside.append(limits.enter(choices=draw.randint(1, 5), prompt_tokens=draw.randint(0, 400)))
        assert limits.choices == sum(one.choices for one in inside) <= 10
        assert limits.prompt_tokens == sum(one.prompt_tokens for one in inside) <= 1000
    for one in inside:
        one.leave()
    assert (limits.choices, limits.prompt_tokens) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_ten_at_once_where_three_fit(make: Any, pipe: Any, engine: ScriptedEngine, scripted: Any, stream: bool) -> None:
    """One slot and a queue of two."""
    settings = ServerConfig(max_queue=2)
    scripted.admission.most_choices = settings.max_queue + 1
    engine.script = lambda prompt, index: [ord("x")] * 50
    engine.on_step = lambda: time.sleep(0.002)

    async def ask() -> list[Any]:
        async with scripted.http() as client:
            body = {"prompt": "x", "max_tokens": 50, "stream": stream}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(10)))

    answers = asyncio.run(ask())
    assert sorted(one.status_code for one in answers) == [200] * 3 + [429] * 7
    for one in answers:
        if one.status_code == 429:
            assert int(one.headers["retry-after"]) >= 1
            assert one.json()["error"]["type"] == "rate_limit_error"
    assert scripted.admission.choices == 0


def test_a_stream_nobody_reads_leaves(scripted: Any) -> None:
    """A response object that is never sent."""
    from fastgen.front.prompts import completion_call
    from fastgen.server.http.run import start
    from fastgen.server.native import admit
    from fastgen.types import SamplingParams

    async def drop() -> None:
        entry = admit(scripted.service, scripted.admission, choices=1)
        call = completion_call("x", None, SamplingParams(), scripted.pipe.tokenizer)
        run = await start(scripted.service, entry, call)
        assert scripted.admission.choices == 1
        del run, entry
        gc.collect()

    asyncio.run(drop())
    assert scripted.admission.choices == 0
