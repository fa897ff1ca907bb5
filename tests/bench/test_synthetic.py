"""Drawn workloads: the distributions they claim, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from fastgen.bench.drive import Arrivals, Request
from fastgen.bench.protocol import Workload
from fastgen.bench.synthetic import fastgen_workload, poisson, with_clients
from fastgen.errors import ConfigError


@pytest.mark.parametrize(("prompt", "out"), [(1200, 60), (2600, 128)])
def test_lengths_are_the_paper_s(prompt: int, out: int) -> None:
    work = fastgen_workload(f"fastgen-{prompt}-{out}", vocabulary=99, requests=4000)
    prompts = np.array([len(request.prompt) for request in work.requests])
    outs = np.array([request.out for request in work.requests])
    # Whole numbers towards zero take half a token off the mean; five standard errors of room.
    assert prompts.mean() == pytest.approx(prompt - 0.5, abs=5 * 0.3 * prompt / 4000**0.5)
    assert outs.mean() == pytest.approx(out - 0.5, abs=5 * 0.3 * out / 4000**0.5)
    assert outs.std() == pytest.approx(0.3 * out, rel=0.06)
    assert np.median(prompts) == pytest.approx(prompt, rel=0.03)
    assert prompts.max() <= 4000
    if prompt == 1200:  # 2600's tail is cut at 4000
        assert prompts.std() == pytest.approx(0.3 * prompt, rel=0.06)
    assert min(outs.min(), prompts.min()) >= 1
    assert max(max(request.prompt) for request in work.requests) == 98
    assert abs(np.corrcoef(prompts, outs)[0, 1]) < 0.08


def test_512_requests_unless_told() -> None:
    assert len(fastgen_workload("fastgen-10-5", vocabulary=9).requests) == 512


def test_scale_is_of_lengths_and_is_told() -> None:
    work = fastgen_workload("fastgen-1200-60", vocabulary=99, scale=0.1, requests=2000)
    assert np.mean([len(request.prompt) for request in work.requests]) == pytest.approx(119.5, rel=0.03)
    assert np.mean([request.out for request in work.requests]) == pytest.approx(5.5, rel=0.05)
    assert work.about["length_scale"] == 0.1
    assert max(len(request.prompt) for request in work.requests) <= 400


def test_seeds() -> None:
    one, same, other = (fastgen_workload("fastgen-100-9", vocabulary=99, seed=seed, requests=8) for seed in (1, 1, 2))
    assert one == same
    assert one.requests != other.requests


def test_no_mean_below_a_token() -> None:
    with pytest.raises(ConfigError, match=r"mean lengths of 12 and 0.6 tokens.*greater --scale"):
        fastgen_workload("fastgen-1200-60", vocabulary=9, scale=0.01)


def at_once(count: int) -> Workload:
    return Workload("w", "W", [Request([1], 1) for _ in range(count)])


def test_poisson_arrivals() -> None:
    work = poisson(at_once(20_000), 4.0, seed=3)
    at = np.array([request.at for request in work.requests])
    gaps = np.diff(at)
    assert at[0] == 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)  # exponential: as wide as its mean
    counts = np.bincount(at.astype(int))[:-1]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1)  # Poisson: variance is the mean
    assert (work.rate, work.clients) == (4.0, None)
    assert poisson(at_once(9), 4.0, seed=3).requests == work.requests[:9]
    assert poisson(at_once(9), 4.0, seed=4).requests != work.requests[:9]


def test_a_rate_changes_the_pace_alone() -> None:
    slow, fast = poisson(at_once(50), 1.0), poisson(at_once(50), 2.0)
    np.testing.assert_allclose([r.at for r in slow.requests], [2 * r.at for r in fast.requests])


def test_clients_start_one_by_one() -> None:
    work = with_clients(at_once(20), 8)
    starts = [request.at for request in work.requests]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-1] <= 8 * 0.01
    arrivals = Arrivals(work.requests, work.clients)
    assert [row for row, _ in arrivals.due(1.0)] == list(range(8))
    assert with_clients(at_once(20), 8) == work


def test_more_clients_than_requests() -> None:
    work = with_clients(at_once(3), 8)
    assert len(Arrivals(work.requests, work.clients).due(1.0)) == 3


@pytest.mark.parametrize("apply", [lambda work: with_clients(work, 2), lambda work: poisson(work, 1.0)])
def test_arrivals_of_its_own_stand(apply: object) -> None:
    work = Workload("mine", "Mine", [Request([1], 2), Request([1], 1, after=((0, 1),))])
    with pytest.raises(ConfigError, match="mine says itself when its requests arrive"):
        apply(work)
