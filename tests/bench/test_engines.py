"""fastgen and transformers as rows of a benchmark: exactly the work, however it arrives, and honest times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastgen.bench.drive import Request
from fastgen.bench.engines import FastgenEngine, TransformersEngine
from fastgen.bench.protocol import Settings, Workload
from fastgen.bench.synthetic import poisson, with_clients
from fastgen.errors import ConfigError, InvalidRequestError

pytestmark = pytest.mark.slow

END = 8  # as in conftest.py


@pytest.fixture(scope="module")
def expected(tiny: Path, eighteen: Workload) -> list[list[int]]:
    """Every request alone, by the argmax of transformers' logits: no padding, no cache, no generate."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    answers = []
    for request in eighteen.requests:
        ids = list(request.prompt)
        for _ in range(request.out):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(request.prompt) :])
    return answers


@pytest.mark.parametrize("engine_class", [FastgenEngine, TransformersEngine])
def test_engine_does_exactly_the_work(
    tiny: Path,
    eighteen: Workload,
    expected: list[list[int]],
    engine_class: type[FastgenEngine] | type[TransformersEngine],
) -> None:
    ticks: list[int] = []
    engine = engine_class(Settings(tiny, threads=1))
    first, second = engine.run(eighteen, ticks.append), engine.run(eighteen, lambda _: None)
    alone = engine.run(with_clients(eighteen, 1), lambda _: None)
    engine.close()
    engine.close()
    assert first.tokens == second.tokens == alone.tokens == expected
    assert sum(ticks) == eighteen.output_tokens
    assert 0 < first.first_token <= first.wall
    for run in (first, alone):
        for line, answer in zip(run.lines, expected, strict=True):
            assert len(line.times) == len(answer)
            assert line.times == sorted(line.times)
            assert line.sent < line.times[0]
    ends = [(line.sent, line.times[-1]) for line in alone.lines]
    assert all(end <= sent for (_, end), (sent, _) in pairwise(ends)), "one stream: no request before the last is done"


def test_end_tokens_are_among_the_expected(expected: list[list[int]]) -> None:
    """Else the test above would not show that end tokens are ignored."""
    assert any(END in answer[:-1] for answer in expected)


def test_arrivals_change_when_and_not_what(tiny: Path, eighteen: Workload, expected: list[list[int]]) -> None:
    engine = FastgenEngine(Settings(tiny, threads=1))
    for work in (with_clients(eighteen, 4), poisson(eighteen, 200.0)):
        run = engine.run(work, lambda _: None)
        assert run.tokens == expected
        for line, request in zip(run.lines, work.requests, strict=True):
            assert line.sent >= request.at
    engine.close()


def test_passes_account_for_every_token(tiny: Path, eighteen: Workload) -> None:
    engine = FastgenEngine(Settings(tiny, threads=1, options=(("max_batch_tokens", 16),)))
    run = engine.run(eighteen, lambda _: None)
    engine.close()
    assert run.budget == 16
    assert sum(one.prompt for one in run.passes) == eighteen.prompt_tokens - run.cached
    assert sum(one.decode for one in run.passes) == eighteen.output_tokens - len(eighteen.requests)
    assert max(one.prompt + one.decode for one in run.passes) == 16
    assert all(a.start + a.seconds <= b.start for a, b in pairwise(run.passes))
    assert run.passes[-1].running == run.passes[-1].waiting == 0
    assert max(one.waiting for one in run.passes) > 0


def test_no_run_finds_another_s_prefixes(tiny: Path) -> None:
    work = Workload("one", "One", [Request(list(range(3, 60)) * 2, 2)])
    engine = FastgenEngine(Settings(tiny, threads=1))
    assert [engine.run(work, lambda _: None).cached for _ in range(2)] == [0, 0]
    engine.close()


def test_prefixes_found_within_a_run_are_told(tiny: Path) -> None:
    request = Request(list(range(3, 60)), 2)
    work = with_clients(Workload("twice", "Twice", [request, request]), 1)
    engine = FastgenEngine(Settings(tiny, threads=1))
    assert engine.run(work, lambda _: None).cached == 48  # whole blocks of 16 before the last token
    engine.close()


def test_transformers_refuses_what_it_cannot_take_in(tiny: Path, eighteen: Workload) -> None:
    engine = TransformersEngine(Settings(tiny, threads=1))
    for work in (with_clients(eighteen, 4), poisson(eighteen, 1.0)):
        with pytest.raises(ConfigError, match="generate takes no requests in while others run"):
            engine.run(work, lambda _: None)
    engine.close()


def test_a_bad_prompt_is_refused_before_the_first_one_runs(tiny: Path, eighteen: Workload) -> None:
    engine = FastgenEngine(Settings(tiny, threads=1))
    work = replace(eighteen, requests=[*eighteen.requests, Request([40000], 1)])
    with pytest.raises(InvalidRequestError, match="40000"):
        engine.run(work, lambda _: None)
    assert engine._engine.stats().passes == 0
    engine.close()
