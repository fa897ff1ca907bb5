"""The figures of one run: rates, percentiles of waits and gaps, and what of it kept a service level agreement (SLA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fastgen.bench.protocol import Run, Timeline, Workload

__all__ = ["EMA_SPAN", "PERCENTILES", "Sla", "distribution", "ema", "gaps_while_reading", "keeps", "measures"]

PERCENTILES = (50, 90, 95, 99)
EMA_SPAN = 16
"""Of the moving average that smooths token gaps before they are held against the SLA, as DeepSpeed-FastGen does."""

LONG = "long"
"""The group of a workload's requests whose reading disturbs the others."""


@dataclass(frozen=True, slots=True)
class Sla:
    """What a user must be given: the first token within ``prompt tokens / prompt_rate`` seconds, and from then on
    tokens at ``rate`` a second."""

    prompt_rate: float = 512.0
    rate: float = 4.0

    def scaled(self, factor: float) -> Sla:
        """For a machine ``factor`` times as fast as the one this was made for."""
        return Sla(self.prompt_rate * factor, self.rate * factor)


def ema(values: Sequence[float], span: int = EMA_SPAN) -> list[float]:
    """Exponential moving average, as pandas' ``ewm(span=span).mean()``: each value weighs ``1 - 2 / (span + 1)`` of its
    successor, and the weights of those there are add up to one."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    averages = []
    for value in values:
        total, weight = total * keep + value, weight * keep + 1
        averages.append(total / weight)
    return averages


def keeps(line: Timeline, prompt_tokens: int, sla: Sla) -> bool:
    """Whether a request got what ``sla`` says: the first token in time, and every moving average of its token gaps
    under ``1 / sla.rate``. The rule of DeepSpeed-FastGen's ``plot_effective_throughput.py`` (DeepSpeedExamples,
    benchmarks/inference/mii): an answer of one token has no gaps to keep; a first token just in time is in time; an
    average of exactly ``1 / rate`` is too slow."""
    if line.first_token > prompt_tokens / sla.prompt_rate:
        return False
    return all(average < 1 / sla.rate for average in ema(line.gaps))


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """``{"mean", "p50", "p90", "p95", "p99", "max"}``, interpolated as numpy does; None of nothing."""
    if not values:
        return None
    percentiles = np.percentile(values, PERCENTILES)
    named = {f"p{q}": float(value) for q, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": max(values)}


def gaps_while_reading(run: Run, workload: Workload) -> list[float]:
    """Token gaps of the other requests that overlap the time from the first ``long`` request's arrival to the last
    one's first token."""
    rows = list(zip(run.lines, workload.requests, strict=True))
    long = [line for line, request in rows if request.group == LONG]
    if not long:
        return []
    began, ended = min(line.sent for line in long), max(line.times[0] for line in long)
    return [
        after - before
        for line, request in rows
        if request.group != LONG
        for before, after in pairwise(line.times)
        if after > began and before < ended
    ]


def measures(run: Run, workload: Workload, slas: Sequence[Sla] = ()) -> dict[str, float]:
    """Every figure of a run by its name: seconds, tokens a second, requests a second, shares.

    ``first_token_*``, ``gap_*`` and ``latency_*`` (arrival to last token) are followed by `distribution`'s names. They
    speak of all requests, or of those outside the group ``long`` where a workload has one; it then has
    ``reading_gap_*`` (`gaps_while_reading`) and ``long_first_token_*`` too. ``stream_rate``: tokens a second of a
    request between its first and its last. For each SLA, ``sla_<rate>_kept`` (share of requests) and
    ``sla_<rate>_effective`` (those that kept it, a second of makespan).
    """
    wall = run.wall
    rows = list(zip(run.lines, workload.requests, strict=True))
    others = [line for line, request in rows if request.group != LONG]
    figures = {
        "wall": wall,
        "output_rate": workload.output_tokens / wall,
        "total_rate": (workload.prompt_tokens + workload.output_tokens) / wall,
        "request_rate": len(rows) / wall,
        "any_first_token": run.first_token,
    }
    spreads = {
        "first_token": [line.first_token for line in others],
        "gap": [gap for line in others for gap in line.gaps],
        "latency": [line.latency for line in others],
        "reading_gap": gaps_while_reading(run, workload),
        "long_first_token": [line.first_token for line, request in rows if request.group == LONG],
    }
    for name, values in spreads.items():
        for which, value in (distribution(values) or {}).items():
            figures[f"{name}_{which}"] = value
    decoding = sum(line.times[-1] - line.times[0] for line in others)
    if decoding:
        figures["stream_rate"] = sum(len(line.gaps) for line in others) / decoding
    for sla in slas:
        kept = sum(keeps(line, len(request.prompt), sla) for line, request in rows)
        figures[f"sla_{sla.rate:g}_kept"] = kept / len(rows)
        figures[f"sla_{sla.rate:g}_effective"] = kept / wall
    return figures
