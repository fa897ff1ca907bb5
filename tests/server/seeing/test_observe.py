"""What is measured of requests, against a loop whose tokens come when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from fastgen.core.loop import CallerGone, EngineLoop, Sink, Submission
from fastgen.errors import EngineClosedError, FastgenError, InvalidRequestError
from fastgen.front.verbs import Verbs
from fastgen.server.observe import Ended, Observed
from fastgen.server.tally import SIZES, Histogram, one_two_five
from fastgen.testing.scripted import ScriptedEngine
from fastgen.types import Chunk, FinishReason, SamplingParams, TokenLogprob, Usage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """A loop that runs nothing by itself."""

    closed = False

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}
        self.aborted: list[str] = []
        self.answer: BaseException | None = None
        self.submitted: list[Submission] = []

    def new_request_id(self) -> str:
        return f"r{len(self.submitted)}"

    def submit(self, submissions: Sequence[Submission]) -> Future[None]:
        if isinstance(self.answer, EngineClosedError):
            raise self.answer
        self.submitted += submissions
        future: Future[None] = Future()
        if self.answer is not None:
            future.set_exception(self.answer)
        else:
            self.sinks |= {one.request_id: one.sink for one in submissions}
            future.set_result(None)
        return future

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Kept:
    """A sink that keeps what comes."""

    def __init__(self, gone_after: int | None = None) -> None:
        self.events: list[object] = []
        self.gone_after = gone_after

    def _take(self, event: object) -> None:
        self.events.append(event)
        if self.gone_after is not None and len(self.events) >= self.gone_after:
            raise CallerGone("away")

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        self._take(entries)

    def chunk(self, chunk: Chunk) -> None:
        self._take(chunk)

    def fail(self, error: FastgenError) -> None:
        self._take(error)


class Told:
    """A tracer."""

    def __init__(self) -> None:
        self.ended: dict[str, list[Ended]] = {}

    def begin(self, submission: Submission):  # type: ignore[no-untyped-def]
        return self.ended.setdefault(submission.request_id, []).append


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def steps() -> Steps:
    return Steps()


def token(request: str, index: int = 0, *, reason: FinishReason | None = None, usage: Usage | None = None) -> Chunk:
    return Chunk(request, index, "x", [7], finish_reason=reason, usage=usage)


def submit(loop: Observed, sink: Sink, prompt: int = 5, **params: object) -> str:
    request_id = loop.new_request_id()
    loop.submit([Submission(request_id, list(range(prompt)), SamplingParams(**params), sink)]).result()
    return request_id


def test_times_and_counts_of_a_request(steps: Steps, clock: Clock) -> None:
    told = Told()
    loop, sink = Observed(steps, clock=clock, tracer=told), Kept()
    name = submit(loop, sink, prompt=5, max_new_tokens=4)
    assert loop.in_flight == 1
    sent = []
    for after, reason in ((0.3, None), (0.1, None), (0.25, None), (0.05, "stop")):
        clock.now += after
        last = Usage(5, 4, cached_tokens=2) if reason else None
        sent.append(token(name, reason=reason, usage=last))  # type: ignore[arg-type]
        steps.sinks[name].chunk(sent[-1])
    assert sink.events == sent
    tally = loop.tally()
    assert loop.in_flight == 0
    assert tally.first_token.total == pytest.approx(0.3)
    assert (tally.first_token.count, tally.gap.count, tally.whole.count) == (1, 3, 1)
    assert tally.gap.total == pytest.approx(0.4)
    assert tally.whole.total == pytest.approx(0.7)
    assert tally.answering.total == pytest.approx(0.4)
    assert tally.mean_gap.total == pytest.approx(0.4 / 3)
    assert (tally.prompt_tokens, tally.answer_tokens, tally.cached_tokens) == (5, 4, 2)
    assert (tally.prompt_lengths.total, tally.answer_lengths.total, tally.max_tokens.total) == (5, 4, 4)
    assert tally.ended == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    (ended,) = told.ended[name]
    assert ended.reasons == ("stop",)
    assert ended.first_token == pytest.approx(0.3)
    assert ended.seconds == pytest.approx(0.7)
    assert ended.usage == Usage(5, 4, 2)
    assert dict(tally.gap.at((0.05, 0.1, 0.3))) == {"0.05": 1, "0.1": 2, "0.3": 3, "+Inf": 3}


def test_several_choices_have_gaps_of_their_own(steps: Steps, clock: Clock) -> None:
    loop, sink = Observed(steps, clock=clock), Kept()
    name = submit(loop, sink, n=2)
    for after, index in ((1.0, 0), (0.5, 1), (1.0, 0), (2.0, 1)):
        clock.now += after
        steps.sinks[name].chunk(token(name, index))
    tally = loop.tally()
    assert tally.first_token.total == pytest.approx(1.0)
    assert tally.first_token.count == 1
    assert tally.gap.total == pytest.approx(1.5 + 3.0)
    steps.sinks[name].chunk(Chunk(name, 0, "", finish_reason="length"))
    assert loop.in_flight == 1
    steps.sinks[name].chunk(Chunk(name, 1, "", finish_reason="abort", usage=Usage(5, 4)))
    tally = loop.tally()
    assert loop.in_flight == 0
    assert (tally.ended["length"], tally.ended["abort"]) == (1, 1)
    assert (tally.whole.count, tally.choices.total, tally.answer_tokens) == (1, 2, 4)


def test_chunks_without_tokens_count_for_nothing(steps: Steps, clock: Clock) -> None:
    loop = Observed(steps, clock=clock)
    name = submit(loop, Kept())
    steps.sinks[name].chunk(Chunk(name, 0, "held text"))
    tally = loop.tally()
    assert (tally.first_token.count, tally.answer_tokens, tally.prompt_tokens) == (0, 0, 0)


def test_a_caller_who_goes_away_ends_the_request_once(steps: Steps, clock: Clock) -> None:
    told = Told()
    loop = Observed(steps, clock=clock, tracer=told)
    name = submit(loop, Kept(gone_after=2))
    steps.sinks[name].chunk(token(name))
    with pytest.raises(CallerGone):
        steps.sinks[name].chunk(token(name))
    assert loop.in_flight == 0
    assert loop.tally().ended["abort"] == 1
    assert [one.reasons for one in told.ended[name]] == [("abort",)]
    logprobs = submit(loop, Kept(gone_after=1))
    with pytest.raises(CallerGone):
        steps.sinks[logprobs].prompt_logprobs([None])
    assert loop.tally().ended["abort"] == 2


def test_an_engine_that_dies_ends_every_open_choice(steps: Steps, clock: Clock) -> None:
    loop, sink = Observed(steps, clock=clock), Kept()
    name = submit(loop, sink, n=3)
    steps.sinks[name].chunk(Chunk(name, 1, "", finish_reason="stop"))
    steps.sinks[name].fail(EngineClosedError("it died"))
    assert isinstance(sink.events[-1], EngineClosedError)
    assert loop.in_flight == 0
    assert (loop.tally().ended["error"], loop.tally().ended["stop"]) == (2, 1)


@pytest.mark.parametrize("answer", [InvalidRequestError("no"), EngineClosedError("closed")])
def test_what_the_loop_refuses_never_ran(steps: Steps, clock: Clock, answer: FastgenError) -> None:
    told = Told()
    loop = Observed(steps, clock=clock, tracer=told)
    steps.answer = answer
    with pytest.raises(type(answer)):
        submit(loop, Kept())
    assert (loop.in_flight, loop.refused) == (0, 1)
    assert loop.tally().whole.count == 0
    assert [one.error for one in told.ended["r0"]] == [str(answer)]


def test_a_tracer_that_raises_hurts_nobody(steps: Steps, clock: Clock) -> None:
    class Broken:
        def begin(self, submission: Submission):  # type: ignore[no-untyped-def]
            return lambda ended: 1 / 0

    loop, sink = Observed(steps, clock=clock, tracer=Broken()), Kept()
    name = submit(loop, sink)
    steps.sinks[name].chunk(token(name, reason="stop", usage=Usage(5, 1)))
    assert len(sink.events) == 1


def test_recent_forgets(steps: Steps, clock: Clock) -> None:
    loop = Observed(steps, clock=clock)

    def one(first: float) -> None:
        name = submit(loop, Kept())
        clock.now += first
        steps.sinks[name].chunk(token(name, reason="stop", usage=Usage(5, 1)))

    one(0.5)
    assert loop.recent(30).first_token.percentile(0.5) == pytest.approx(0.5, rel=0.06)
    clock.now += 100
    assert loop.recent(30).first_token.count == 0  # although nobody looked meanwhile
    for _ in range(200):
        one(0.25)
    recent = loop.recent(30)
    assert 30 <= recent.seconds <= 33
    assert recent.first_token.count == pytest.approx(30 / 0.25, abs=8)
    assert recent.answer_tokens == recent.first_token.count
    assert loop.tally().first_token.count == 201


def test_percentiles_are_numpys_within_their_buckets() -> None:
    values = np.random.default_rng(0).lognormal(-3, 1.5, 5000)
    histogram = Histogram()
    for value in values:
        histogram.add(float(value))
    for share in (0.01, 0.5, 0.95, 0.99):
        assert histogram.percentile(share) == pytest.approx(np.quantile(values, share), rel=0.06)
    assert histogram.total == pytest.approx(values.sum())
    assert Histogram().percentile(0.5) is None
    counts, edges = np.histogram(values, bins=[0, 0.01, 0.1, 1, 10, np.inf])
    cumulated = dict(histogram.at((0.01, 0.1, 1.0, 10.0)))
    assert list(cumulated.values()) == list(np.cumsum(counts))
    assert list(map(float, cumulated)) == list(edges[1:])


def test_edges_for_lengths() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(99) == (1, 2, 5, 10, 20, 50)
    assert set(one_two_five(10**6)) <= set(SIZES)


def test_threads_that_ended_are_not_forgotten(steps: Steps, clock: Clock) -> None:
    loop = Observed(steps, clock=clock)

    def deliver() -> None:
        name = submit(loop, Kept())
        steps.sinks[name].chunk(token(name, reason="stop", usage=Usage(5, 1)))

    for _ in range(5):
        thread = threading.Thread(target=deliver)
        thread.start()
        thread.join()
    deliver()
    tally = loop.tally()
    assert (tally.ended["stop"], tally.answer_tokens) == (6, 6)
    assert len(loop._tallies._of_threads) <= 2


def test_answers_are_those_of_the_loop_itself() -> None:
    """Through verbs, over an engine's own thread."""
    script = lambda prompt, index: [token + index for token in prompt]  # noqa: E731
    plain, observed = (EngineLoop(ScriptedEngine(None, script=script)) for _ in range(2))
    looked = Observed(observed)
    engine = ScriptedEngine(None)
    params = {"n": 2, "max_new_tokens": 3, "logprobs": 1, "prompt_logprobs": 1}
    try:
        answers = [
            Verbs(loop, tokenizer=None, config=engine.config, max_model_len=100)(
                prompt_token_ids=[[1, 2, 3, 4], [5, 6]], **params
            )
            for loop in (plain, looked)
        ]
        assert answers[0] == answers[1]
        tally = looked.tally()
        assert (tally.answer_tokens, tally.prompt_tokens, sum(tally.ended.values())) == (2 * 3 + 2 * 2, 6, 4)
        assert looked.in_flight == 0
        assert not looked.closed
    finally:
        plain.close()
        observed.close()
    assert looked.closed
