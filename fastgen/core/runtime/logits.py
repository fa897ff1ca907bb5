"""What happens to logits between the model and the choice of a token: one function per stage, each over many rows.

Every function with a trailing underscore works in place on ``scores``, float32 ``[rows, vocab]``. They keep the sets
that the processors of the same name in ``transformers.generation.logits_process`` keep, on a CPU bit for bit.
What concerns only some tokens of some rows comes as parallel vectors ``[entries]``: the rows, the ids, the values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "add_bias_",
    "candidate_width",
    "candidates",
    "draw",
    "forbid_",
    "keep_min_p_",
    "keep_top_k_",
    "keep_top_p_",
    "penalize_",
    "rows_at_once",
    "scale_",
]

_MASKED = float("-inf")
_SHIFT_BELOW = 1e-2
_SHIFT_ABOVE = 1e30
_LARGE_K = 1024  # above this a sort of the row is faster than a selection


def rows_at_once(logits: Tensor) -> int:
    """How many rows of ``logits [rows, vocab]`` to work on together, so that copies stay small: 8 MB of float32 on a
    CPU, 256 MB on a GPU."""
    elements = 2**21 if logits.device.type == "cpu" else 2**26
    return max(1, elements // logits.shape[1])


def add_bias_(scores: Tensor, rows: Tensor, ids: Tensor, bias: Tensor) -> None:
    """Adds ``bias`` float32 ``[entries]``; no ``(row, id)`` twice."""
    scores[rows, ids] += bias


def penalize_(
    scores: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Repetition penalty (Keskar et al. 2019, CTRL), then presence and frequency penalty (the OpenAI API's).

    Args:
        ids: every token in prompt or answer, once per row.
        counts: how often each is in the answer, float32 ``[entries]``; 0: in the prompt alone.
        repetition, presence, frequency: float32 ``[entries]``; 1, 0, 0 change nothing.
    """
    chosen = scores[rows, ids]
    chosen = torch.where(chosen < 0, chosen * repetition, chosen / repetition)
    chosen -= presence * (counts > 0) + frequency * counts
    scores[rows, ids] = chosen


def forbid_(scores: Tensor, rows: Tensor, ids: Tensor) -> None:
    scores[rows, ids] = _MASKED


def scale_(scores: Tensor, temperature: Tensor) -> None:
    """Divides each row by its temperature float32 ``[rows]``. Softmax does not mind a shift, so where the quotient
    could get large the row's maximum, which must be finite, is subtracted first; elsewhere transformers' bits are kept.
    """
    peak = scores.amax(-1)
    shift = torch.where((temperature < _SHIFT_BELOW) | (peak.abs() > _SHIFT_ABOVE), peak, 0.0)
    if bool(shift.any()):
        scores.sub_(shift[:, None])
    scores.div_(temperature[:, None])


def keep_top_k_(scores: Tensor, k: Tensor) -> None:
    """Masks what is below the k-th best of its row; ``k`` int64 ``[rows]``, each in 1..vocab. Equals of it stay."""
    largest = int(k.max())
    if largest <= _LARGE_K:
        cut = scores.topk(largest).values.gather(1, k[:, None] - 1)
    else:
        cut = _ascending(scores).gather(1, scores.shape[1] - k[:, None])
    scores.masked_fill_(scores < cut, _MASKED)


def candidate_width(k: int) -> int:
    """Columns that ``candidates`` needs for this ``k``: a power of two above it, so that rows of the same width can go
    together and a row's width depends on its own ``k`` alone. 0: too many, stay with ``keep_top_k_``."""
    return max(64, 1 << k.bit_length()) if 0 < k <= _LARGE_K else 0


def candidates(scores: Tensor, k: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """``keep_top_k_`` without most columns that it masks: what follows works on ``width`` of them, not all.

    Returns:
        The scores ``[rows, width]``, in ascending order of their ids, with -inf beyond the k best; their ids int64
        ``[rows, width]``; and bool ``[rows]``: rows where equals of the k-th may be missing, to be done otherwise.
    """
    best = scores.topk(width)
    cut = best.values.gather(1, k[:, None] - 1)
    incomplete = best.values[:, -1] == cut[:, 0]
    ids, order = best.indices.sort(-1)
    values = best.values.gather(1, order)
    return values.masked_fill_(values < cut, _MASKED), ids, incomplete


def keep_top_p_(scores: Tensor, p: Tensor) -> None:
    """Masks the least likely tokens of each row whose probabilities add up to at most ``1 - p``; the best one stays.

    Of tokens with the same score at the cut as many stay as in transformers; here those with the lowest ids.

    Args:
        p: float64 ``[rows]``, each in (0, 1).
    """
    ordered = _ascending(scores)
    cumulative = ordered.softmax(-1).cumsum(-1)
    spare = (1 - p).to(torch.float32)[:, None]
    removed = torch.searchsorted(cumulative, spare, right=True).clamp_(max=scores.shape[1] - 1)  # [rows, 1]
    cut = ordered.gather(1, removed)
    scores.masked_fill_(scores < cut, _MASKED)
    below = ordered.gather(1, (removed - 1).clamp_(min=0))
    split = ((removed > 0) & (below == cut)).flatten()  # the cut runs through a group of equal scores
    if bool(split.any()):
        surplus = removed - torch.searchsorted(ordered, cut)
        for row in split.nonzero().flatten().tolist():
            ties = (scores[row] == cut[row]).nonzero().flatten()
            scores[row, ties[len(ties) - int(surplus[row]) :]] = _MASKED


def keep_min_p_(scores: Tensor, p: Tensor) -> None:
    """Masks tokens less likely than ``p`` float32 ``[rows]`` times the best one of their row."""
    probabilities = scores.softmax(-1)
    least = p * probabilities.amax(-1)
    scores.masked_fill_(probabilities < least[:, None], _MASKED)


def draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row from softmax(scores), int64 ``[rows]``: the inverse of the cumulative distribution, in float64,
    at ``uniforms`` float64 ``[rows]``, each in [0, 1). Rows do not influence each other.

    A token of probability zero is never returned: its step of the distribution has no width.
    """
    weights = scores.softmax(-1)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=scores.shape[1] - 1)
    possible = weights.gather(1, tokens) > 0
    if not bool(possible.all()):  # a parallel prefix sum (on a GPU) may dip by one rounding
        tokens = torch.where(possible, tokens, scores.argmax(-1, keepdim=True))
    return tokens.flatten()


def _ascending(scores: Tensor) -> Tensor:
    """The values of each row in ascending order. torch's CPU sort also carries indices and takes ten times as long."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    return scores.sort(-1).values
