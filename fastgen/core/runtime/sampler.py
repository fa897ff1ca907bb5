"""One token per row of logits, for a whole batch at once; a row pays only for the stages its request asked for.

Order, as in transformers (``GenerationMixin._get_logits_processor``): logit bias, repetition penalty, [presence and
frequency penalties, which transformers has not], min_new_tokens, custom processors, temperature, top-k, top-p, min-p.
Before all of them, ids that the tokenizer cannot decode (padding rows of the output head) are cut off.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgen.core.request import Sampling
from fastgen.core.runtime import logits as stages
from fastgen.core.runtime.logprobs import LOWEST_LOGPROB, prompt_logprobs, token_logprobs
from fastgen.core.runtime.sequence_sampler import (
    LogitsProcessor,
    SequenceSampler,
    described,
    make_processors,
    uniforms,
)
from fastgen.kernels import reference
from fastgen.types import TokenLogprob

__all__ = [
    "LOWEST_LOGPROB",
    "LogitsProcessor",
    "Picks",
    "Sampler",
    "SequenceSampler",
    "make_processors",
    "prompt_logprobs",
]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Picks:
    """What ``Sampler.pick`` found, by row."""

    tokens: list[int | None]
    """``None`` where the row failed; ``errors`` says why."""
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    """For the rows whose request wants them."""


class Sampler:
    """Picks tokens. It holds no state of any sequence.

    Args:
        valid_rows: ids below this may be chosen (``Limits.valid_ids``).
        argmax: the operation of this name (``fastgen.kernels.ops``), for the model's logits and for float32.
    """

    def __init__(self, *, valid_rows: int, argmax: Callable[[Tensor], Tensor] = reference.argmax) -> None:
        self.valid_rows = valid_rows
        self._argmax = argmax

    def pick(self, logits: Tensor, states: Sequence[SequenceSampler]) -> Picks:
        """The next token of each row, and the log-probabilities asked for. Neither ``logits`` nor ``states`` change:
        whoever keeps a token tells its state (``observe``).

        A row fails alone, with a sentence in ``Picks.errors``, if its logits hold NaN or +inf, if every token is masked
        (-inf), or if one of its logits processors raises or returns something else than logits.

        Args:
            logits: the model's own, any float dtype, ``[rows, vocab]``.
            states: one per row.
        """
        if len(states) != logits.shape[0]:
            raise ValueError(f"{logits.shape[0]} rows of logits came with {len(states)} states")
        if logits.shape[1] < self.valid_rows:
            raise ValueError(f"the logits have {logits.shape[1]} columns, fewer than the {self.valid_rows} valid ids")
        with torch.no_grad():
            valid = logits[:, : self.valid_rows]
            best = self._argmax(valid)
            picks = Picks(best.tolist())
            _find_broken(_peaks(valid, best), picks.errors, "the model's logits")
            if valid.shape[1] < logits.shape[1]:
                padding = logits[:, self.valid_rows :].amax(-1).tolist()
                _find_broken(padding, picks.errors, "the model's logits", may_be_masked=True)
            rows = [row for row, state in enumerate(states) if not state.plain and row not in picks.errors]
            at_once = stages.rows_at_once(valid)
            for start in range(0, len(rows), at_once):
                part = rows[start : start + at_once]
                _Pass(valid, part, [states[row] for row in part], self._argmax).run(picks)
            for row in picks.errors:
                picks.tokens[row] = None
            _report(logits, states, picks)
        return picks


class _Pass:
    """Some rows of a batch that are more than an argmax, through all stages. Rows do not influence each other."""

    def __init__(
        self, logits: Tensor, rows: list[int], states: list[SequenceSampler], argmax: Callable[[Tensor], Tensor]
    ) -> None:
        self.rows = rows
        self.states = states
        self.argmax = argmax
        self.device = logits.device
        self.scores = logits.index_select(0, self._tensor(rows, np.int64)).to(torch.float32)  # [rows, vocab], a copy
        self.changed: set[int] = set()  # indices into rows

    def run(self, picks: Picks) -> None:
        self._bias()
        self._penalties()
        self._ends()
        failed = self._processors()
        self._best(picks, failed)
        picks.errors.update({self.rows[i]: error for i, error in failed.items()})
        drawn = [i for i, state in enumerate(self.states) if not state.sampling.greedy and i not in failed]
        if drawn:
            for i, token in zip(drawn, self._draw(drawn), strict=True):
                picks.tokens[self.rows[i]] = token

    def _bias(self) -> None:
        chosen = [i for i, state in enumerate(self.states) if len(state.bias)]
        if chosen:
            self.changed.update(chosen)
            rows, ids = self._entries(chosen, lambda state: state.bias_ids)
            bias = np.concatenate([self.states[i].bias for i in chosen])
            stages.add_bias_(self.scores, rows, ids, self._tensor(bias, np.float32))

    def _penalties(self) -> None:
        chosen, lengths, ids, counts = [], [], [], []
        for i, state in enumerate(self.states):
            if state.counts is not None and len(state.counts.ids):
                chosen.append(i)
                lengths.append(len(state.counts.ids))
                ids.append(state.counts.ids)
                counts.append(state.counts.counts)
        if not chosen:
            return
        self.changed.update(chosen)
        settings = [self.states[i].sampling for i in chosen]

        def spread(values: list[Any], dtype: Any) -> Tensor:
            return self._tensor(np.repeat(np.array(values, dtype=dtype), lengths), dtype)

        stages.penalize_(
            self.scores,
            spread(chosen, np.int64),
            self._tensor(np.concatenate(ids), np.int64),
            self._tensor(np.concatenate(counts), np.float32),
            spread([s.repetition_penalty for s in settings], np.float32),
            spread([s.presence_penalty for s in settings], np.float32),
            spread([s.frequency_penalty for s in settings], np.float32),
        )

    def _ends(self) -> None:
        chosen = [i for i, state in enumerate(self.states) if state.ends_forbidden]
        if chosen:
            self.changed.update(chosen)
            stages.forbid_(self.scores, *self._entries(chosen, lambda state: state.stop_ids))

    def _processors(self) -> dict[int, str]:
        """Runs each row's own processors; returns what went wrong by index into ``rows``."""
        failed: dict[int, str] = {}
        for i, state in enumerate(self.states):
            for name, processor in state.processors:
                self.changed.add(i)
                try:
                    self.scores[i] = _processed(processor, state.output_ids, self.scores[i])
                except (Exception, SystemExit) as error:  # a plugin's code: it ends its own request, whatever it raised
                    logger.warning("logits processor %r failed", name, exc_info=True)
                    failed[i] = f"logits processor {name!r} failed: {described(error)}"
                    break
        return failed

    def _best(self, picks: Picks, failed: dict[int, str]) -> None:
        """The best token of every row that changed since ``picks`` was filled, or why there is none."""
        changed = sorted(self.changed)
        if not changed:
            return
        scores = self._take(self.scores, changed)
        best = self.argmax(scores)
        broken: dict[int, str] = {}
        _find_broken(_peaks(scores, best), broken, "the processed logits")
        for at, token in enumerate(best.tolist()):
            picks.tokens[self.rows[changed[at]]] = token
            if at in broken:
                failed.setdefault(changed[at], broken[at])

    def _draw(self, drawn: list[int]) -> list[int]:
        """A random token for each of the ``drawn`` rows."""
        scores = self._take(self.scores, drawn)
        states = [self.states[i] for i in drawn]
        settings = [state.sampling for state in states]
        at = uniforms(states)
        stages.scale_(scores, self._tensor([s.temperature for s in settings], np.float32))
        tokens = np.zeros(len(drawn), dtype=np.int64)

        whole: list[int] = []  # rows that need the whole vocabulary
        narrow: dict[int, list[int]] = {}  # by width, rows of which the best few are enough
        nucleus: list[int] = []  # rows of which the best few may be, if they are likely enough
        for i, s in enumerate(settings):
            width = stages.candidate_width(s.top_k)
            if 0 < width < scores.shape[1]:
                narrow.setdefault(width, []).append(i)
            elif s.top_p < 1 and not 0 < s.top_k < scores.shape[1]:
                nucleus.append(i)
            else:
                whole.append(i)
        for width, members in narrow.items():
            k = self._tensor([settings[i].top_k for i in members], np.int64)
            found = stages.candidates(self._take(scores, members), k, width)
            whole += self._draw_from_few(found, members, settings, at, tokens, top_p=True)
        totals = stages.total_weight(self._take(scores, nucleus)) if nucleus else None
        for width in stages.nucleus_widths(scores.shape[1]):
            if totals is not None and nucleus:
                p = self._tensor([settings[i].top_p for i in nucleus], np.float64)
                found = stages.nucleus(self._take(scores, nucleus), totals, p, width)
                totals = totals[found.incomplete]
                nucleus = self._draw_from_few(found, nucleus, settings, at, tokens, top_p=False)
        if whole := sorted(whole + nucleus):
            drawn_from = self._take(scores, whole)
            columns = self._draw_from(drawn_from, [settings[i] for i in whole], at[whole], top_k=True, top_p=True)
            tokens[whole] = columns.cpu().numpy()
        picked: list[int] = tokens.tolist()
        return picked

    def _draw_from_few(
        self,
        candidates: stages.Candidates,
        members: list[int],
        settings: list[Sampling],
        at: NDArray[np.float64],
        tokens: NDArray[np.int64],
        *,
        top_p: bool,
    ) -> list[int]:
        """Fills in ``tokens[members]``; returns those of which the candidates were too few."""
        few = [settings[i] for i in members]
        columns = self._draw_from(candidates.scores, few, at[members], top_k=False, top_p=top_p)
        tokens[members] = candidates.ids.gather(1, columns[:, None]).flatten().cpu().numpy()
        return [members[i] for i in candidates.incomplete.nonzero().flatten().tolist()]

    def _draw_from(
        self, scores: Tensor, settings: list[Sampling], at: NDArray[np.float64], *, top_k: bool, top_p: bool
    ) -> Tensor:
        """The column drawn in each row, int64 ``[rows]``; ``top_k``, ``top_p``: whether these are still to be done."""
        if top_k:
            ks = [s.top_k if s.top_k < scores.shape[1] else 0 for s in settings]
            self._on(scores, stages.keep_top_k_, ks, [k > 0 for k in ks], np.int64)
        if top_p:
            ps = [s.top_p for s in settings]
            self._on(scores, stages.keep_top_p_, ps, [p < 1 for p in ps], np.float64)
        ps = [s.min_p for s in settings]
        self._on(scores, stages.keep_min_p_, ps, [p > 0 for p in ps], np.float32)
        return stages.draw(scores, self._tensor(at, np.float64))

    def _on(
        self,
        scores: Tensor,
        stage: Callable[[Tensor, Tensor], None],
        values: list[Any],
        wanted: list[bool],
        dtype: Any,
    ) -> None:
        """Runs ``stage`` on the rows that want it."""
        chosen = [i for i, want in enumerate(wanted) if want]
        if chosen:
            part = self._take(scores, chosen)
            stage(part, self._tensor([values[i] for i in chosen], dtype))
            if part is not scores:
                scores[self._tensor(chosen, np.int64)] = part

    def _take(self, scores: Tensor, chosen: list[int]) -> Tensor:
        """Those rows: a copy, or ``scores`` itself if it is all of them."""
        return scores if len(chosen) == len(scores) else scores.index_select(0, self._tensor(chosen, np.int64))

    def _entries(self, chosen: list[int], ids: Callable[[SequenceSampler], NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        """Row and id of every entry of the ``chosen`` rows."""
        parts = [ids(self.states[i]) for i in chosen]
        rows = np.repeat(np.array(chosen, dtype=np.int64), [len(part) for part in parts])
        return self._tensor(rows, np.int64), self._tensor(np.concatenate(parts), np.int64)

    def _tensor(self, values: Any, dtype: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=dtype)).to(self.device)


def _processed(processor: LogitsProcessor, output_ids: list[int], logits: Tensor) -> Tensor:
    result = processor(output_ids, logits)
    if not isinstance(result, Tensor):
        raise TypeError(f"it returned {type(result).__name__} instead of a tensor")
    if result.shape != logits.shape or not result.is_floating_point():
        raise ValueError(
            f"it returned {result.dtype} of shape {tuple(result.shape)}, not floats of shape {tuple(logits.shape)}"
        )
    return result


def _peaks(logits: Tensor, best: Tensor) -> list[float]:
    """The greatest of each row, by its place ``best [rows]``."""
    peaks: list[float] = logits.gather(1, best[:, None])[:, 0].tolist()
    return peaks


def _find_broken(
    peaks: list[float],
    errors: dict[int, str],
    what: str,
    *,
    may_be_masked: bool = False,
) -> None:
    """Adds to ``errors`` the rows whose maximum, ``peaks[row]``, shows NaN (which every maximum hands on), +inf, or
    that no token is left."""
    if math.isfinite(sum(peaks)):
        return
    for row, peak in enumerate(peaks):
        if math.isfinite(peak) or row in errors:
            continue
        if math.isnan(peak):
            errors[row] = f"{what} hold NaN"
        elif peak > 0:
            errors[row] = f"{what} hold +inf"
        elif not may_be_masked:
            errors[row] = f"{what} leave no token: all are -inf"


def _report(logits: Tensor, states: Sequence[SequenceSampler], picks: Picks) -> None:
    """Log-probabilities of the picked tokens, where asked for."""
    rows = [row for row, state in enumerate(states) if state.logprobs >= 0 and picks.tokens[row] is not None]
    if not rows:
        return
    tokens = [token for row in rows if (token := picks.tokens[row]) is not None]
    tops = [states[row].logprobs for row in rows]
    raw = logits if len(rows) == len(states) else logits[torch.tensor(rows, device=logits.device)]
    picks.logprobs.update(zip(rows, token_logprobs(raw, tokens, tops), strict=True))
