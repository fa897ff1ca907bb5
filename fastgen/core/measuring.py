"""Measures how long passes of 1, 2, 4, ... tokens take on an engine of its own, and remembers the curve."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from fastgen.config import EngineConfig
from fastgen.core.calibration import DEFAULT_BUDGET, LARGEST_BUDGET, SMALLEST_BUDGET, Budget, Calibration, Point
from fastgen.core.plugin.describe import describe_error
from fastgen.core.request import Limits
from fastgen.errors import ConfigError, RequestFailedError
from fastgen.types import SamplingParams, StepOutput

if TYPE_CHECKING:
    from fastgen.core.blueprint import Blueprint

__all__ = ["calibrate", "calibrate_at_start", "measure"]

logger = logging.getLogger("fastgen")

CONTEXT = 256
"""Tokens before those of the pass, where the model and the cache have room."""
SECONDS, SECONDS_AT_START = 20.0, 10.0
"""About how long measuring may take."""
_GAIN = 1.03  # less over the best so far, twice, and the curve has flattened
_FLATTENS_FROM = 128  # tokens: below, kernels for few rows give way to those for many
_FEWEST, _MOST, _ENOUGH = 3, 25, 0.4  # timed passes of a size: so many, and about so many seconds
_TRIES = 4

Tick = Callable[[int, float], None]
"""Called with the size that is measured next, and the share of the time that is used up."""


class Steps(Protocol):
    """An engine, as far as it is measured."""

    limits: Limits

    def add(self, prompt_token_ids: list[int], params: SamplingParams | None = None) -> str: ...

    def step(self) -> list[StepOutput]: ...

    @property
    def has_work(self) -> bool: ...

    def stats(self) -> Any: ...

    def close(self) -> None: ...


def calibrate(
    open_engine: Callable[[Blueprint, EngineConfig], Steps],
    blueprint: Blueprint,
    config: EngineConfig,
    *,
    seconds: float = SECONDS,
    tick: Tick | None = None,
) -> Calibration:
    """The throughput curve of a loaded model. It is not remembered yet.

    Args:
        open_engine: an engine of that model for these; its cache is a small one of its own.
        seconds: about how long it may take. Sizes up to the smallest budget are measured however long that takes.

    Raises:
        ConfigError: the model or its cache has no room for even one token.
        RequestFailedError: a pass failed.
    """
    size = config.block_size
    room = min(blueprint.max_model_len - 1, blueprint.cache.tokens)  # for a prompt, of which one token is sampled
    context = min(CONTEXT, room // 2) // size * size  # whole blocks, which the prefix cache keeps
    largest = min(LARGEST_BUDGET, room - context)
    if largest < 1:
        raise ConfigError(
            f"sequences of at most {room + 1} tokens (max_model_len, num_blocks) have no room for a pass to measure"
        )
    blocks = min(blueprint.cache.num_blocks, 1 + -(-(context + largest) // size))
    engine = open_engine(
        replace(
            blueprint,
            cache=replace(blueprint.cache, num_blocks=blocks),
            budget=Budget(max(largest, context), "to measure"),
        ),
        config.model_copy(update={"policy": "splitfuse", "queue_order": "fcfs", "prefix_caching": True}),
    )
    try:
        points, complete = measure(_Passes(engine, context), largest, seconds=seconds, tick=tick)
    finally:
        engine.close()
    return Calibration(
        date=datetime.now(UTC).replace(microsecond=0),
        setting=blueprint.setting,
        context=context,
        complete=complete,
        points=tuple(points),
    )


def calibrate_at_start(
    open_engine: Callable[[Blueprint, EngineConfig], Steps],
    blueprint: Blueprint,
    config: EngineConfig,
    *,
    progress: bool = False,
) -> Blueprint:
    """As `calibrate`, shorter; the curve is remembered if that is possible. Returns a blueprint with the budget: the
    default, with the reason, if measuring fails."""
    told = f"calibrating the token budget, once, for up to {SECONDS_AT_START:.0f} s"
    logger.info("%s", told)
    if progress:
        print(told, file=sys.stderr)
    try:
        found = calibrate(open_engine, blueprint, config, seconds=SECONDS_AT_START)
    except Exception as error:  # whatever it was, the model may serve all the same
        reason = describe_error(error)
        logger.warning("the token budget could not be calibrated, and is %d: %s", DEFAULT_BUDGET, reason)
        return replace(blueprint, budget=Budget(DEFAULT_BUDGET, f"default: calibrating at start failed: {reason}"))
    try:
        found.remember()
    except ConfigError as error:
        logger.warning("%s", error)
    return replace(blueprint, budget=found.budget(config.target_latency))


def measure(
    time_pass: Callable[[int], float],
    largest: int,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    tick: Tick | None = None,
) -> tuple[list[Point], bool]:
    """Passes of 1, 2, 4, ... tokens up to ``largest``, as long as they gain.

    Args:
        time_pass: runs a pass of so many tokens and returns the seconds it took.
        seconds: sizes that could not be measured within this are left out, the smallest budget's excepted.
        clock: by which that is reckoned.

    Returns:
        The curve, and whether it goes as far as it is of use: until it flattened, or to the largest budget there is.
    """
    began, points, best, idle, size = clock(), list[Point](), 0.0, 0, 1
    while size <= largest:
        used = clock() - began
        # Twice the tokens take twice as long at most, more or less.
        if size > SMALLEST_BUDGET and used + 2 * points[-1].seconds * (1 + _FEWEST) > seconds:
            return points, False
        if tick is not None:
            tick(size, min(1.0, used / seconds))
        time_pass(size)  # caches, buffers and the processor's clock get used to it
        times: list[float] = []
        while len(times) < _FEWEST or (len(times) < _MOST and len(times) * median(times) < _ENOUGH):
            times.append(time_pass(size))
        point = Point(tokens=size, seconds=max(median(times), 1e-9), passes=len(times))
        points.append(point)
        idle = 0 if point.rate > _GAIN * best else idle + 1
        best = max(best, point.rate)
        if size >= _FLATTENS_FROM and idle >= 2:
            return points, True
        size *= 2
    return points, size > LARGEST_BUDGET


class _Passes:
    """Runs passes of a given size: the last tokens of a fresh prompt, whose first ones the prefix cache has."""

    def __init__(self, engine: Steps, context: int) -> None:
        self._engine = engine
        self._draw = random.Random(0)
        self._context = self._some(context)

    def __call__(self, tokens: int) -> float:
        """Seconds of one pass.

        Raises:
            RequestFailedError: it failed, or cannot be run by itself.
        """
        for _ in range(_TRIES):
            self._engine.add(
                self._context + self._some(tokens),
                SamplingParams(max_new_tokens=1, temperature=0.0, repetition_penalty=1.0, ignore_eos=True),
            )
            seconds, before = 0.0, self._engine.stats().tokens
            while self._engine.has_work:  # several passes if the context has to be computed as well
                began = time.perf_counter()
                outputs = self._engine.step()
                seconds = time.perf_counter() - began
                for output in outputs:
                    if output.finish_reason == "error":
                        raise RequestFailedError(f"a pass of {tokens} tokens could not be measured: {output.error}")
            ran = self._engine.stats().tokens - before
            if ran == tokens:
                return seconds
            if ran < tokens:  # some of them were cached too: with few ids and small blocks, all beginnings are in time
                self._context = self._some(len(self._context))
        raise RequestFailedError(
            f"a pass of {tokens} tokens could not be measured: {ran} tokens ran, as the prefix cache did not hold just "
            f"the {len(self._context)} tokens before them"
        )

    def _some(self, count: int) -> list[int]:
        limits = self._engine.limits
        return [self._draw.randrange(min(limits.valid_ids, limits.vocab_rows)) for _ in range(count)]
