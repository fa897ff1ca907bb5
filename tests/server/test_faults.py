"""Real engines that meet what plugins, operating systems and prompts do to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen.config import EngineConfig
from fastgen.errors import EngineClosedError
from fastgen.front.verbs import Verbs
from fastgen.server.replicas import Replicas
from fastgen.server.settings import ServerConfig
from fastgen.testing.answers import alike
from fastgen.testing.children import Holdings, wait_until
from fastgen.types import Response

pytestmark = pytest.mark.slow

SECONDS = 60
CONFIG = EngineConfig(device="cpu", threads=1, num_blocks=128, max_batch_tokens=16, max_sequences=8)
LONG: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def replicas(tiny: Path, faults: None) -> Iterator[Replicas]:
    made = Replicas(str(tiny), CONFIG, ServerConfig(step_timeout=3.0, max_restarts=20))
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def verbs(replicas: Replicas) -> Verbs:
    wait_until(lambda: replicas.state == "ready", SECONDS)
    assert replicas.tokenizer is not None
    return Verbs(replicas, tokenizer=replicas.tokenizer, config=CONFIG, max_model_len=512)


def slowly(seconds: float) -> dict[str, Any]:
    return {"logits_processors": {"sleeps": {"seconds": seconds}}}


def kill(replicas: Replicas) -> None:
    pid = replicas.replicas()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_killed_in_prefill(replicas: Replicas, verbs: Verbs) -> None:
    with ThreadPoolExecutor(1) as pool:
        neighbour = verbs.stream("a", **slowly(0.1), **LONG)  # makes passes slow
        next(neighbour)
        prompt = "x" * 480  # 32 passes
        waiting = pool.submit(verbs, prompt, max_new_tokens=8)
        loop = replicas._supervisors[0].loop
        assert loop is not None
        seen: list[int] = []
        loop.watch(lambda passes: seen.extend(p.tokens for p in passes))
        wait_until(lambda: 16 in seen)  # a pass filled with a piece of it
        kill(replicas)
        with pytest.raises(EngineClosedError, match=r"died before the request ended"):
            waiting.result(SECONDS)
        with pytest.raises(EngineClosedError):
            list(neighbour)


def answered_with(fault: dict[str, Any]) -> Callable[[Replicas, Verbs], object]:
    def plant(_: Replicas, verbs: Verbs) -> object:
        return verbs("culprit", logits_processors=fault, **LONG)

    return plant


FAULTS: dict[str, tuple[Callable[[Replicas, Verbs], object], str]] = {
    "killed": (lambda replicas, verbs: kill(replicas), "died before the request ended"),
    "leaves": (answered_with({"leaves": {"after": 2, "code": 7}}), "died before the request ended"),
    "breaks": (answered_with({"breaks": {"after": 2}}), "RuntimeError: the step is broken"),
    "stuck": (answered_with({"sleeps": {"after": 2, "seconds": 3600}}), r"took more than 3 seconds \(step_timeout\)"),
}


@pytest.mark.parametrize(("fault", "words"), FAULTS.values(), ids=FAULTS)
def test_everybody_hears_in_mid_stream(
    replicas: Replicas, verbs: Verbs, fault: Callable[[Replicas, Verbs], object], words: str
) -> None:
    before = verbs("the same again", max_new_tokens=12, cache_salt="here")
    restarts = replicas.replicas()[0].restarts
    with ThreadPoolExecutor(4) as pool:
        streams = [verbs.stream(f"neighbour {n}", **slowly(0.01), **LONG) for n in range(2)]
        for stream in streams:
            next(stream)
        whole: Future[Response] = pool.submit(verbs, "whole", **slowly(0.01), **LONG)
        culprit = pool.submit(fault, replicas, verbs)
        for stream in streams:
            with pytest.raises(EngineClosedError, match=words):
                list(stream)
        for waiting in (whole, culprit):
            error = waiting.exception(SECONDS)
            assert error is None or isinstance(error, EngineClosedError)
        assert isinstance(whole.exception(), EngineClosedError)
    wait_until(lambda: replicas.state == "ready" and replicas.replicas()[0].restarts == restarts + 1, SECONDS)
    after = verbs("the same again", max_new_tokens=12, cache_salt="here")
    assert replace(after, request_id=before.request_id) == before


def test_a_processor_that_raises_ends_its_own_request(replicas: Replicas, verbs: Verbs) -> None:
    alone = verbs("a healthy neighbour", max_new_tokens=40, ignore_eos=True, cache_salt="alone")
    restarts = replicas.replicas()[0].restarts
    with ThreadPoolExecutor(4) as pool:
        beside = pool.submit(verbs, "a healthy neighbour", max_new_tokens=40, ignore_eos=True, cache_salt="beside")
        bad = [verbs("bad", logits_processors={"raises": {"after": n}}, **LONG) for n in range(5)]
        assert [(answer.finish_reason, len(answer.token_ids)) for answer in bad] == [("error", n) for n in range(5)]
        assert all("a fault of the plugin" in str(answer.error) for answer in bad)
        assert beside.result(SECONDS).choices == alone.choices
    assert replicas.replicas()[0].restarts == restarts
    assert replicas.state == "ready"


def test_any_replica_answers_as_the_pipeline_does(tiny: Path) -> None:
    before = Holdings()
    prompts = [f"{n}: {'abc' * n}" for n in range(16)]
    options: dict[str, Any] = {"max_new_tokens": 12, "n": 2, "temperature": 1.0, "seed": 4, "logprobs": 2}
    replicas = Replicas(str(tiny), CONFIG, ServerConfig(replicas=2))
    try:
        info = replicas.start()
        seen: set[int] = set()
        replicas.watch(lambda index, passes: seen.add(index))
        verbs = Verbs(replicas, tokenizer=replicas.tokenizer, config=CONFIG, max_model_len=info.max_model_len)
        theirs = verbs(prompts, **options)
        assert seen == {0, 1}
    finally:
        replicas.close()
    with fastgen.pipeline(tiny, CONFIG, progress=False) as pipe:
        ours = pipe(prompts, **options)
    assert alike(theirs, ours)
    assert Holdings() == before
