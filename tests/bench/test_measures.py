"""Percentiles, moving averages and service levels, against numpy, pandas and timelines made by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fastgen.bench.drive import Request, Timeline
from fastgen.bench.measures import Sla, distribution, ema, gaps_while_reading, keeps, measures
from fastgen.bench.protocol import Run, Workload


@pytest.mark.parametrize("span", [2, 16, 40])
def test_moving_average_is_pandas(span: int) -> None:
    values = np.random.default_rng(0).exponential(0.1, 200).tolist()
    np.testing.assert_allclose(ema(values, span), pd.Series(values).ewm(span=span).mean())


def test_span_is_the_paper_s() -> None:
    values = [0.1] * 5 + [1.0]
    assert ema(values)[-1] == pytest.approx(pd.Series(values).ewm(span=16).mean().iloc[-1])
    assert ema([]) == []


def test_percentiles_are_numpy_s() -> None:
    values = np.random.default_rng(1).exponential(1.0, 77).tolist()
    spread = distribution(values)
    assert spread is not None
    for share in (50, 90, 95, 99):
        assert spread[f"p{share}"] == pytest.approx(np.percentile(values, share))
    assert spread["max"] == max(values)
    assert spread["mean"] == pytest.approx(np.mean(values))
    assert distribution([]) is None


def steady(first: float, gap: float, tokens: int, sent: float = 0.0) -> Timeline:
    return Timeline(sent, [sent + first + gap * token for token in range(tokens)])


def test_first_token_in_time() -> None:
    sla = Sla(prompt_rate=512, rate=4)
    assert keeps(steady(2.0, 0.1, 9), 1024, sla)  # just in time is in time
    assert not keeps(steady(2.001, 0.1, 9), 1024, sla)
    assert keeps(steady(2.0, 0.1, 9, sent=5.0), 1024, sla)  # from its arrival


def test_gaps_under_the_rate() -> None:
    sla = Sla(rate=4)
    assert keeps(steady(0.1, 0.24, 30), 512, sla)
    assert not keeps(steady(0.1, 0.26, 30), 512, sla)
    assert not keeps(Timeline(0.0, [0.25, 0.5]), 512, sla)  # exactly 1 / rate is too slow
    assert keeps(steady(0.1, 9.9, 1), 512, sla)  # one token has no gaps


def test_the_average_forgives_a_stall_that_earlier_tokens_paid_for() -> None:
    late = Timeline(0.0, np.cumsum([0.1] + [0.1] * 20 + [1.0] + [0.1] * 20).tolist())
    early = Timeline(0.0, np.cumsum([0.1] + [0.1] * 2 + [1.0] + [0.1] * 20).tolist())
    assert keeps(late, 512, Sla(rate=4))
    assert not keeps(early, 512, Sla(rate=4))
    assert not keeps(late, 512, Sla(rate=6))


def deepspeed_rule(line: Timeline, prompt: int, rate: float) -> bool:
    """As DeepSpeedExamples states it, with pandas and times per token."""
    times = np.diff([line.sent, *line.times]).tolist()
    if prompt / 512 < times[0]:
        return False
    if len(times) == 1:
        return True
    return all(average < 1.0 / rate for average in pd.Series(times[1:]).ewm(span=16).mean())


def test_the_rule_is_deepspeed_s_on_random_timelines() -> None:
    draw = np.random.default_rng(3)
    verdicts = []
    for _ in range(400):
        sent, count = draw.uniform(0, 9), int(draw.integers(1, 60))
        gaps = draw.exponential(draw.choice([0.05, 0.15, 0.2, 0.3]), count)
        line, prompt = Timeline(sent, (sent + np.cumsum(gaps)).tolist()), int(draw.integers(20, 300))
        for rate in (2, 4, 6):
            assert keeps(line, prompt, Sla(rate=rate)) == deepspeed_rule(line, prompt, rate)
            verdicts.append(keeps(line, prompt, Sla(rate=rate)))
    assert 0.1 < np.mean(verdicts) < 0.9


def test_effective_throughput_by_hand() -> None:
    """Three of four keep 2/s, one of them keeps 6/s; the makespan is 10 s from the first arrival."""
    lines = [
        steady(0.5, 0.1, 5, sent=1.0),
        steady(0.5, 0.3, 5, sent=1.0),
        steady(0.5, 0.4, 5, sent=1.0),
        steady(8.0, 0.25, 5, sent=2.0),
    ]
    work = Workload("w", "W", [Request([1] * 512, 5)] * 4)
    figures = measures(Run(lines), work, [Sla(rate=rate) for rate in (2, 6)])
    assert figures["wall"] == pytest.approx(10.0)
    assert figures["sla_2_effective"] == pytest.approx(0.3)
    assert figures["sla_2_kept"] == 0.75
    assert figures["sla_6_effective"] == pytest.approx(0.1)
    assert figures["request_rate"] == pytest.approx(0.4)
    assert figures["output_rate"] == pytest.approx(2.0)
    assert figures["total_rate"] == pytest.approx((4 * 512 + 20) / 10)
    assert figures["first_token_max"] == pytest.approx(8.0)
    assert figures["latency_max"] == pytest.approx(9.0)
    assert figures["any_first_token"] == pytest.approx(0.5)


def test_scaled_level() -> None:
    assert Sla(512, 4).scaled(0.5) == Sla(256, 2)


def interference() -> tuple[Run, Workload]:
    stream = Timeline(0.0, [1.0, 2.0, 5.0, 9.0, 10.0, 10.5])
    long = [Timeline(4.0, [6.0]), Timeline(6.0, [9.5])]
    work = Workload("w", "W", [Request([1], 6), Request([1], 1, group="long"), Request([1], 1, group="long")])
    return Run([stream, *long]), work


def test_gaps_while_long_prompts_are_read() -> None:
    """Read from 4.0 to 9.5: the gaps ending at 5, 9 and 10 overlap, those before and after do not."""
    run, work = interference()
    assert gaps_while_reading(run, work) == [3.0, 4.0, 1.0]
    figures = measures(run, work)
    assert figures["reading_gap_p50"] == 3.0
    assert figures["gap_p50"] == 1.0
    assert figures["gap_max"] == 4.0
    assert (figures["long_first_token_p50"], figures["long_first_token_max"]) == (2.75, 3.5)
    assert figures["first_token_max"] == 1.0  # the stream's own


def test_no_figures_of_what_is_not_there() -> None:
    figures = measures(Run([Timeline(0.0, [1.0])]), Workload("w", "W", [Request([1], 1)]))
    assert not [name for name in figures if name.startswith(("gap", "reading", "long", "sla", "stream"))]
