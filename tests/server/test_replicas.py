"""Several engines as one: who runs what, all or none, and a dead one is routed round."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from fastgen.config import EngineConfig
from fastgen.core.loop import CallerGone, Submission
from fastgen.errors import EngineClosedError, FastgenError, InvalidRequestError
from fastgen.front.verbs import Verbs
from fastgen.server.gate import Gate
from fastgen.server.replicas import Affinity, Replicas
from fastgen.server.settings import ServerConfig
from fastgen.testing.children import wait_until
from fastgen.testing.scripted_worker import MODULE
from fastgen.types import Chunk, SamplingParams, TokenLogprob
from fastgen.wire.info import Pass

SECONDS = 20
CONFIG = EngineConfig()


@pytest.fixture(scope="module")
def two(scripted: str) -> Iterator[Replicas]:
    replicas = Replicas(scripted, CONFIG, ServerConfig(replicas=2), module=MODULE)
    try:
        replicas.start()
        yield replicas
    finally:
        replicas.close()


@pytest.fixture
def both(two: Replicas) -> Iterator[Replicas]:
    """Both engines, idle and ready."""
    wait_until(lambda: [r.state for r in two.replicas()] == ["ready", "ready"])
    yield two
    two.abort_all()
    wait_until(lambda: two.in_flight == 0)


@pytest.fixture
def verbs(both: Replicas) -> Verbs:
    return Verbs(both, tokenizer=both.tokenizer, config=CONFIG, max_model_len=10_000)


def outstanding(replicas: Replicas) -> list[int]:
    return [replica.outstanding_tokens for replica in replicas.replicas()]


def in_flight(replicas: Replicas) -> list[int]:
    return [0 if s.loop is None else s.loop.in_flight for s in replicas._supervisors]


def test_the_least_busy_engine_is_next(both: Replicas, verbs: Verbs) -> None:
    with ExitStack() as streams:
        for n in range(4):
            streams.enter_context(verbs.stream(f"SLOW {n} {'x' * 500}"))
        assert in_flight(both) == [2, 2]
        long = f"SLOW {'y' * 5000}"
        streams.enter_context(verbs.stream(long, max_new_tokens=len(long)))
        holder = in_flight(both).index(3)
        for n in range(4):
            streams.enter_context(verbs.stream(f"SLOW a{n} {'z' * 500}"))
        assert in_flight(both)[holder] == 3
        assert in_flight(both)[1 - holder] == 6
        assert outstanding(both)[holder] > outstanding(both)[1 - holder]


def test_the_same_beginning_goes_where_it_is_known(both: Replicas, verbs: Verbs) -> None:
    seen: Counter[int] = Counter()
    end = both.watch(lambda index, passes: seen.update({index: len(passes)}))
    beginning = "a beginning of more than one block: "
    for n in range(6):
        verbs(f"{beginning}{n}", max_new_tokens=3)
    assert len(seen) == 1
    end()


def test_one_big_batch_spreads(both: Replicas, verbs: Verbs) -> None:
    seen: Counter[int] = Counter()

    def watch(index: int, passes: Any) -> None:
        seen.update({index: sum(one.tokens for one in passes)})

    end = both.watch(watch)
    prompts = [f"{n} {'x' * (n % 7)} of many" for n in range(60)]
    answers = verbs(prompts, max_new_tokens=20)
    end()
    assert [answer.text for answer in answers] == [prompt[:20] for prompt in prompts]
    assert min(seen[0], seen[1]) > 0.6 * max(seen[0], seen[1])


def test_a_batch_with_the_same_beginning_spreads_too(both: Replicas, verbs: Verbs) -> None:
    seen: Counter[int] = Counter()
    end = both.watch(lambda index, passes: seen.update({index: sum(p.tokens for p in passes)}))
    verbs([f"{'the same beginning of all' * 8} {n}" for n in range(60)], max_new_tokens=100)
    end()
    assert min(seen[0], seen[1]) > 0.2 * max(seen[0], seen[1])


class Recorder:
    """A sink."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.over = threading.Event()

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        self.events.append(entries)

    def chunk(self, chunk: Chunk) -> None:
        assert not self.over.is_set()
        self.events.append(chunk)
        if chunk.usage is not None:
            self.over.set()

    def fail(self, error: FastgenError) -> None:
        self.events.append(error)
        self.over.set()


def test_all_or_none_over_both(both: Replicas) -> None:
    """The bad one is refused by one engine, while the other has begun with its share: nobody hears of that."""
    bad = 17
    sinks = [Recorder() for _ in range(30)]
    batch = [
        Submission(both.new_request_id(), [65 + n % 20] * (20_000 if n == bad else 40), SamplingParams(), sink)
        for n, sink in enumerate(sinks)
    ]
    with pytest.raises(InvalidRequestError, match=r"^prompt 17 of 30 ") as caught:
        both.submit(batch).result(SECONDS)
    assert caught.value.field == "prompt"
    wait_until(lambda: both.in_flight == 0)
    assert [sink.events for sink in sinks] == [[]] * 30

    # Negative control: without it they run, on both engines. New names: those of before may still be ending there.
    batch = [
        replace(new, request_id=both.new_request_id(), prompt_token_ids=new.prompt_token_ids[:40]) for new in batch
    ]
    shares = both._shares(batch, {s.index: s.loop for s in both._supervisors if s.loop is not None})
    assert set(shares) == {0, 1}
    both.submit(batch).result(SECONDS)
    assert all(sink.over.wait(SECONDS) for sink in sinks)
    assert all(len(sink.events) == 40 for sink in sinks)


def test_a_dead_engine_takes_its_own_requests_only(both: Replicas, verbs: Verbs) -> None:
    with ThreadPoolExecutor(8) as pool:
        prompts = [f"SLOW {n} {'x' * 60}" for n in range(8)]
        futures = [pool.submit(verbs, prompt) for prompt in prompts]
        wait_until(lambda: both.in_flight == 8 and all(outstanding(both)))
        killed = both.replicas()[1]
        assert killed.pid is not None
        loop = both._supervisors[1].loop
        assert loop is not None
        doomed = loop.in_flight
        assert 0 < doomed < 8
        os.kill(killed.pid, signal.SIGKILL)
        wait_until(lambda: both.replicas()[1].state == "restarting")
        assert both.state == "ready"
        answered = verbs([f"{n} goes round it" for n in range(4)], max_new_tokens=10)
        assert [a.text for a in answered] == [f"{n} goes round it"[:10] for n in range(4)]
        texts, errors = [], []
        for future, prompt in zip(futures, prompts, strict=True):
            error = future.exception(SECONDS)
            if error is None:
                assert future.result().text == prompt
                texts.append(prompt)
            else:
                assert isinstance(error, EngineClosedError)
                assert "process died before the request ended" in str(error)
                errors.append(error)
        assert (len(errors), len(texts)) == (doomed, 8 - doomed)
    wait_until(lambda: both.replicas()[1].state == "ready")
    assert both.replicas()[1].restarts == 1
    seen: set[int] = set()
    end = both.watch(lambda index, passes: seen.add(index))
    verbs([f"{n} again" for n in range(20)], max_new_tokens=4)
    end()
    assert seen == {0, 1}


def test_watching_goes_on_after_a_restart(both: Replicas, verbs: Verbs) -> None:
    passes: list[Pass] = []
    end = both.watch(lambda index, new: passes.extend(new))
    verbs("one", max_new_tokens=3)
    assert passes
    end()
    count = len(passes)
    verbs("two", max_new_tokens=3)
    assert len(passes) == count


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_affinity_finds_the_longest_beginning() -> None:
    affinity, params = Affinity(4), SamplingParams()
    affinity.remember(list(range(8)), params, 0)
    affinity.remember([*range(4), 9, 9, 9, 9], params, 1)
    assert affinity.find(list(range(100)), params) == 0
    assert affinity.find([*range(4), 7], params) == 1  # it saw this block last
    assert affinity.find([0, 1, 2], params) is None  # less than a block
    assert affinity.find([5, 1, 2, 3, 4], params) is None
    for other in (SamplingParams(lora="x"), SamplingParams(cache_salt="x")):
        assert affinity.find(list(range(8)), other) is None


def test_affinity_is_bounded() -> None:
    affinity, params = Affinity(1, most=10), SamplingParams()
    for n in range(50):
        affinity.remember([n], params, n)
    assert [affinity.find([n], params) for n in (0, 39, 40, 49)] == [None, None, 40, 49]
    affinity.forget(45)
    assert affinity.find([45], params) is None
    assert affinity.find([46], params) == 46


def guarded(gate: Gate, *sinks: Any) -> list[Any]:
    return [gate.guard(Submission(f"r{n}", [1], SamplingParams(), sink)).sink for n, sink in enumerate(sinks)]


def test_a_gate_keeps_order_and_passes_on_later() -> None:
    gate, recorder = Gate(lambda request_id: None), Recorder()
    (sink,) = guarded(gate, recorder)
    events: list[Any] = [Chunk("r0", 0, str(n)) for n in range(4)]
    sink.prompt_logprobs([None])
    sink.chunk(events[0])
    assert recorder.events == []
    gate.open()
    assert recorder.events == [[None], events[0]]
    sink.chunk(events[1])
    assert recorder.events == [[None], events[0], events[1]]


def test_a_gate_that_is_shut_lets_nothing_through() -> None:
    gate, recorder = Gate(lambda request_id: None), Recorder()
    (sink,) = guarded(gate, recorder)
    sink.chunk(Chunk("r0", 0, "kept"))
    gate.shut()
    with pytest.raises(CallerGone):
        sink.chunk(Chunk("r0", 0, "late"))
    assert recorder.events == []


def test_a_sink_that_fails_at_the_gate_hurts_no_other() -> None:
    aborted: list[str] = []
    gate, recorder = Gate(aborted.append), Recorder()

    class Broken(Recorder):
        def chunk(self, chunk: Chunk) -> None:
            raise CallerGone

    broken, sink = guarded(gate, Broken(), recorder)
    for one in (broken, broken, sink):
        one.chunk(Chunk("r", 0, ""))
    gate.open()
    assert aborted == ["r0"]
    assert len(recorder.events) == 1
    with pytest.raises(CallerGone):
        broken.chunk(Chunk("r", 0, ""))
