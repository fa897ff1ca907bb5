"""Workloads that are drawn: lengths from a normal distribution as DeepSpeed-FastGen does, Poisson arrivals, clients."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from fastgen.bench.protocol import Request, Workload
from fastgen.errors import ConfigError

__all__ = ["FASTGEN_REQUESTS", "fastgen_workload", "is_fastgen", "poisson", "with_clients"]

PAPER_MEANS = ((1200, 2600), (60, 128))
"""DeepSpeed-FastGen's mean lengths of prompts, and of answers."""

FASTGEN_REQUESTS = 512
SPREAD = 0.3
"""Standard deviation of lengths, as a share of their mean."""

LONGEST_PROMPT = 4000
"""DeepSpeed-FastGen cuts longer prompts to this."""

STAGGER = 0.01
"""Seconds a client: clients start within ``clients`` times this, each at a random moment, as DeepSpeed-FastGen's do."""

_NAME = re.compile(r"fastgen-(\d+)-(\d+)")


def is_fastgen(name: str) -> bool:
    """Whether ``name`` is of the form ``fastgen-PROMPT-OUTPUT``, mean lengths in tokens."""
    return _NAME.fullmatch(name) is not None


def fastgen_workload(
    name: str, *, vocabulary: int, seed: int = 0, scale: float = 1.0, requests: int = FASTGEN_REQUESTS
) -> Workload:
    """DeepSpeed-FastGen's serving workload: prompts ~ N(PROMPT, 30 %), generations ~ N(OUTPUT, 30 %), whole numbers
    towards zero, at least one; token ids uniform in the vocabulary, so no two prompts share a beginning.

    Args:
        name: ``fastgen-PROMPT-OUTPUT``; the paper's are 1200 or 2600 and 60 or 128.
        scale: lengths are multiplied by this. The report says so.
        requests: the paper's is 512.

    Raises:
        ConfigError: a mean of no token.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not fastgen-PROMPT-OUTPUT")
    means = [int(text) * scale for text in match.groups()]
    if min(means) < 1:
        raise ConfigError(
            f"workload {name} at scale {scale:g} has mean lengths of {means[0]:g} and {means[1]:g} tokens; both must "
            "be at least 1: use a greater --scale"
        )
    draw = np.random.default_rng(seed)
    prompts = _lengths(draw, means[0], requests, most=max(1, int(LONGEST_PROMPT * scale)))
    outs = _lengths(draw, means[1], requests, most=None)
    made = [
        Request(draw.integers(0, vocabulary, size=length).tolist(), out)
        for length, out in zip(prompts, outs, strict=True)
    ]
    about = {
        "distribution": f"prompts ~ N({means[0]:g}, 30 %), outputs ~ N({means[1]:g}, 30 %)",
        "means": [int(text) for text in match.groups()],
        "length_scale": scale,
        "requests": requests,
        "paper_requests": FASTGEN_REQUESTS,
        "seed": seed,
    }
    return Workload(name, f"DeepSpeed-FastGen's {match[1]}/{match[2]}", made, about=about)


def _lengths(draw: np.random.Generator, mean: float, count: int, most: int | None) -> list[int]:
    values = draw.normal(mean, SPREAD * mean, size=count).astype(int)
    return [int(value) for value in np.clip(values, 1, most)]


def with_clients(workload: Workload, clients: int, *, seed: int = 0) -> Workload:
    """The same requests in a closed loop: ``clients`` at a time take them from one queue, each the next when it has its
    answer. Clients start within a few hundredths of a second, not all at once.

    Raises:
        ConfigError: the workload has arrivals of its own.
    """
    _refuse_own_arrivals(workload, f"--clients {clients}")
    draw = np.random.default_rng([seed, clients])
    starts = np.sort(draw.uniform(0, clients * STAGGER, size=min(clients, len(workload.requests))))
    starts -= starts[0]
    first = [replace(request, at=float(at)) for request, at in zip(workload.requests, starts, strict=False)]
    # The rest wait for the last client to have started, else the first to be free would overtake clients not yet there.
    rest = [replace(request, at=float(starts[-1])) for request in workload.requests[len(first) :]]
    return replace(workload, requests=first + rest, clients=clients)


def poisson(workload: Workload, rate: float, *, seed: int = 0) -> Workload:
    """The same requests in an open loop: arrivals of a Poisson process, ``rate`` a second on average, the first at 0.

    Raises:
        ConfigError: the workload has arrivals of its own.
    """
    _refuse_own_arrivals(workload, f"--rate {rate:g}")
    draw = np.random.default_rng([seed, 1])
    # One draw of unit gaps for all rates: at twice the rate the same sequence passes in half the time.
    gaps = draw.exponential(1.0, size=len(workload.requests)) / rate
    gaps[0] = 0.0
    arrivals = np.cumsum(gaps)
    return replace(
        workload,
        requests=[replace(request, at=float(at)) for request, at in zip(workload.requests, arrivals, strict=True)],
        rate=rate,
    )


def _refuse_own_arrivals(workload: Workload, option: str) -> None:
    if not workload.at_once:
        raise ConfigError(f"{option}: the workload {workload.name} says itself when its requests arrive; leave it out")
