"""The token budget, from how long passes take: the curve that was measured, what follows from it, where it is kept.

The throughput of a forward pass grows with the tokens it carries until the processor is busy, then stays: from there on
a larger budget buys nothing and makes every stream wait longer (DeepSpeed-FastGen, Holmes et al. 2024,
arXiv:2401.08671, section 3). So the budget is the smallest that reaches nearly the best throughput, or less where a
pass has to stay within a target latency. What is kept is the curve, so that any target can be read off it.

Nothing here measures (``measuring.py`` does), and nothing needs torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fastgen.config import EngineConfig, cache_directory
from fastgen.core.json_file import read_json_object
from fastgen.errors import ConfigError

__all__ = [
    "DEFAULT_BUDGET",
    "SMALLEST_BUDGET",
    "SMALLEST_UNASKED",
    "Budget",
    "Calibration",
    "Point",
    "Setting",
    "plan_budget",
]

logger = logging.getLogger("fastgen")

DEFAULT_BUDGET = 512
"""Tokens in a pass where nothing was measured."""
SMALLEST_BUDGET = 8
"""No budget that is chosen here is smaller."""
SMALLEST_UNASKED = 64
"""Nor smaller than this one unless a target latency asks for it: no more sequences can run at once than the budget has
tokens, and the others would wait."""
LARGEST_BUDGET = 2048
"""Nor larger: where larger passes still gain, streams would wait seconds for each token."""
SATURATED = 0.95
"""The share of the best throughput that a budget must reach."""
_STEP = 8  # larger budgets read off between two points are multiples of this
_MAX_BYTES = 2**20

_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens in one forward pass, and why so many."""

    tokens: int
    reason: str
    pending: bool = False
    """Whether the engine still has to measure when it starts."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Point(_Model):
    """Passes of one size."""

    tokens: _Count
    seconds: Annotated[float, Field(gt=0)]
    """The median of the passes."""
    passes: _Count

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Setting(_Model):
    """What the time of a pass depends on. Two settings that differ share no calibration."""

    model: str
    """Its name, for people; models of one shape share a calibration."""
    shape: str
    """A digest of the model's config."""
    dtype: str
    device: str
    """The processor, by its name; or the GPU's."""
    kernels: dict[str, str]
    """Which implementation serves each operation, and (``"instructions"``) what they were built for."""
    threads: _Count
    options: dict[str, Any]
    """Engine options that bear upon it."""
    adapters: bool
    """Whether LoRA adapters are beside the model: their rows are told to its layers, and no pass is recorded."""
    fastgen: str
    """The version, whose kernels and passes these are."""

    @property
    def key(self) -> str:
        """Equal for settings that share a calibration."""
        return hashlib.sha256(_canonical(self).encode()).hexdigest()[:24]

    def same(self, other: Setting) -> bool:
        """Whether a calibration of the one holds for the other."""
        return _canonical(self) == _canonical(other)


def _canonical(setting: Setting) -> str:
    return json.dumps(setting.model_dump(mode="json", exclude={"model"}), sort_keys=True)


class Calibration(_Model):
    """A throughput curve, and what it was measured on."""

    format: Literal[2] = 2
    date: datetime
    setting: Setting
    context: Annotated[int, Field(ge=0)]
    """Tokens before those of the pass, computed earlier."""
    complete: bool
    """Whether it goes as far as it is of use; ``False``: there was no time, or no room, for larger passes."""
    points: Annotated[tuple[Point, ...], Field(min_length=1)]
    """By size, each larger than the one before."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if any(a.tokens >= b.tokens for a, b in pairwise(self.points)):
            raise ValueError("the sizes of the passes must ascend")
        return self

    # ---- the curve -------------------------------------------------------------------------------------------------

    @property
    def _times(self) -> list[float]:
        """Seconds of each point, without what noise added: a pass takes no longer than one with more tokens."""
        times = [point.seconds for point in self.points]
        for place in range(len(times) - 2, -1, -1):
            times[place] = min(times[place], times[place + 1])
        return times

    @property
    def best(self) -> float:
        """The highest throughput, in tokens a second."""
        return max(point.tokens / time for point, time in zip(self.points, self._times, strict=True))

    def seconds(self, tokens: int) -> float:
        """About how long a pass of this size takes: read off the curve, straight between its points."""
        sizes, times = [point.tokens for point in self.points], self._times
        if tokens <= sizes[0]:
            return times[0]
        for (a, b), (begin, end) in zip(pairwise(sizes), pairwise(times), strict=True):
            if tokens <= b:
                return begin + (end - begin) * (tokens - a) / (b - a)
        return times[-1] * tokens / sizes[-1]

    @property
    def saturated(self) -> int:
        """The smallest measured size that reaches ``SATURATED`` of the best throughput."""
        best = self.best
        pairs = zip(self.points, self._times, strict=True)
        return next(point.tokens for point, time in pairs if point.tokens / time >= SATURATED * best)

    @property
    def cut_short(self) -> bool:
        """Whether it ended before two larger sizes had shown that it flattened: where it does is not known."""
        return not self.complete and self.points[-1].tokens < 4 * self.saturated

    def within(self, seconds: float) -> int:
        """The largest size whose pass takes no longer than this; 0 if there is none. Beyond the last point, passes are
        taken to have its throughput."""
        sizes, times = [point.tokens for point in self.points], self._times
        if seconds < times[0]:
            return 0
        if seconds >= times[-1]:
            return int(min(LARGEST_BUDGET, sizes[-1] * (seconds / times[-1])))
        place = next(place for place, time in enumerate(times) if time > seconds)
        a, b, begin, end = sizes[place - 1], sizes[place], times[place - 1], times[place]
        found = a + int((b - a) * (seconds - begin) / (end - begin))
        return max(a, found // _STEP * _STEP) if found > 4 * _STEP else found

    def budget(self, target_latency: float | None = None) -> Budget:
        """The tokens that a pass should carry.

        Args:
            target_latency: milliseconds that a pass may take; unset: any.
        """
        last = self.points[-1].tokens
        enough = max(last, DEFAULT_BUDGET) if self.cut_short else max(SMALLEST_UNASKED, self.saturated)
        if target_latency is None and self.cut_short:
            return Budget(
                enough, f"{self._when} as far as {last} tokens, which does not show where throughput stops growing"
            )
        if target_latency is None:
            reached = f"{self._when}: {self.saturated} tokens {self._reach(self.saturated)}"
            if enough == self.saturated:
                return Budget(enough, reached)
            return Budget(enough, f"{reached}; {enough} is the smallest budget unless a target latency asks for less")
        fitting = self.within(target_latency / 1000)
        if fitting < SMALLEST_BUDGET:
            return Budget(
                SMALLEST_BUDGET,
                f"{self._when}: {target_latency:g} ms cannot be kept; {SMALLEST_BUDGET} tokens, the smallest budget "
                f"unless max_batch_tokens asks for less, take about {self._ms(SMALLEST_BUDGET)}",
            )
        tokens = min(enough, fitting)
        return Budget(
            tokens,
            f"{self._when}: {tokens} tokens take about {self._ms(tokens)}, within {target_latency:g} ms"
            + ("" if self.cut_short else f", and {self._reach(tokens)}"),
        )

    @property
    def _when(self) -> str:
        return f"calibrated {self.date:%Y-%m-%d}"

    def _reach(self, tokens: int) -> str:
        share = min(1.0, tokens / self.seconds(tokens) / self.best)
        return f"reach {100 * share:.0f} % of {self.best:,.0f} tok/s"

    def _ms(self, tokens: int) -> str:
        value = 1000 * self.seconds(tokens)
        return f"{value:,.0f} ms" if value >= 10 else f"{value:.2g} ms"

    # ---- kept on disk ----------------------------------------------------------------------------------------------

    @classmethod
    def remembered(cls, setting: Setting) -> Self | None:
        """The calibration of this setting, if there is one that can be used."""
        path = _path(setting)
        try:
            if not path.is_file():
                return None
            found = cls.model_validate(read_json_object(path, max_bytes=_MAX_BYTES))
            reason = None if found.setting.same(setting) else "it is of another setting"
        except ValidationError as error:
            first = error.errors()[0]
            reason = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        except (ConfigError, OSError) as error:
            reason = str(error)
        if reason is not None:
            logger.warning("the calibration %s is not used (%s); fastgen calibrate MODEL makes a new one", path, reason)
            return None
        return found

    def remember(self) -> Path:
        """Keep it for engines of this setting; one kept before is replaced. The file is there whole or not at all.

        Raises:
            ConfigError: it cannot be written.
        """
        path = _path(self.setting)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(prefix=path.stem, suffix=".partial", dir=path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(self.model_dump_json(indent=2) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(scratch, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(scratch)
                raise
        except OSError as error:
            raise ConfigError(
                f"the calibration cannot be kept in {path.parent}: {error.strerror or error}; set FASTGEN_CACHE to "
                "another folder"
            ) from None
        return path


def _path(setting: Setting) -> Path:
    return cache_directory() / "calibration" / f"{setting.key}.json"


def plan_budget(config: EngineConfig, calibration: Calibration | None) -> Budget:
    """The token budget under these options: the number asked for, else what was measured, else the default."""
    target = config.target_latency
    if config.max_batch_tokens is not None:
        aside = "" if target is None else ", whatever target_latency says"
        return Budget(config.max_batch_tokens, f"max_batch_tokens as asked{aside}")
    if calibration is not None:
        return calibration.budget(target)
    if target is not None:
        return Budget(DEFAULT_BUDGET, f"not calibrated: measured at start, for passes of {target:g} ms", pending=True)
    return Budget(DEFAULT_BUDGET, "default: not calibrated; fastgen calibrate MODEL")
