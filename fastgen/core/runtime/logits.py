"""What happens to logits between the model and the choice of a token: one function per stage, each over many rows.

Every function with a trailing underscore works in place on ``scores``, float32 ``[rows, vocab]``. They keep the sets
that the processors of the same name in ``transformers.generation.logits_process`` keep, on a CPU bit for bit.
What concerns only some tokens of some rows comes as parallel vectors ``[entries]``: the rows, the ids, the values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Candidates",
    "add_bias_",
    "candidate_width",
    "candidates",
    "draw",
    "forbid_",
    "keep_min_p_",
    "keep_top_k_",
    "keep_top_p_",
    "nucleus",
    "nucleus_widths",
    "penalize_",
    "rows_at_once",
    "scale_",
    "total_weight",
]

_MASKED = float("-inf")
_SHIFT_BELOW = 1e-2
_SHIFT_ABOVE = 1e30
_LARGE_K = 1024  # above this a sort of the row is faster than a selection
_DRAW_BLOCK = 512  # columns whose weights are added up before a token is looked for among them
_UNSURE = 1e-6  # of all probability: what float32 sums in another order may differ by, with room to spare


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


class Candidates(NamedTuple):
    """The few tokens of each row that may be drawn: what follows works on ``width`` columns, not on all."""

    scores: Tensor
    """``[rows, width]`` in ascending order of their ids, -inf for those that may not be drawn after all."""
    ids: Tensor
    """int64 ``[rows, width]``."""
    incomplete: Tensor
    """bool ``[rows]``: rows of which these may be too few, to be done otherwise."""


def candidates(scores: Tensor, k: Tensor, width: int) -> Candidates:
    """``keep_top_k_`` without most columns that it masks. Incomplete where equals of the k-th may be missing."""
    values, ids = _largest(scores, width)
    cut = values.topk(int(k.max())).values.gather(1, k[:, None] - 1)
    incomplete = values.amin(-1) == cut[:, 0]
    return Candidates(values.masked_fill_(values < cut, _MASKED), ids, incomplete)


def nucleus_widths(vocab: int) -> list[int]:
    """Widths to try ``nucleus`` with, one after another; the same for every row of every batch."""
    return [width for width in (256, 2048) if 4 * width <= vocab]


def total_weight(scores: Tensor) -> Tensor:
    """float64 ``[rows]``: the sum of exp(score - the row's best score)."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    blocks = weights.shape[1] // _DRAW_BLOCK  # sums in float32 are fast, and exact enough as long as they are short
    whole = torch.unflatten(weights[:, : blocks * _DRAW_BLOCK], 1, (blocks, _DRAW_BLOCK)).sum(-1)
    return whole.sum(-1, dtype=torch.float64) + weights[:, blocks * _DRAW_BLOCK :].sum(-1, dtype=torch.float64)


def nucleus(scores: Tensor, total: Tensor, p: Tensor, width: int) -> Candidates:
    """``keep_top_p_`` by the best ``width`` tokens alone, where these hold the nucleus. A row is incomplete if they do
    not, or if rounding could decide where the cut is.

    Args:
        total: ``total_weight(scores)``.
        p: float64 ``[rows]``, each in (0, 1).
    """
    values, ids = _largest(scores, width)
    total = total[:, None]
    order = values.sort(dim=-1, descending=True, stable=True)  # so that of equals the lowest ids come first
    head = (order.values - order.values[:, :1]).double().exp_().cumsum(-1)
    # What each token and all less likely ones have, as a share: it goes if that is at most 1 - p.
    tail = torch.cat((total, total - head[:, :-1]), -1) / total
    spare = (1 - p).to(torch.float32).double()[:, None]
    kept = (tail > spare).sum(-1, keepdim=True).clamp_(min=1)
    unsure = ((tail - spare).abs() <= _UNSURE)[:, 1:].any(-1)  # the best one stays in any case
    last = order.values.gather(1, kept - 1)[:, 0]
    incomplete = (kept[:, 0] == width) | (last == order.values[:, -1]) | unsure
    masked = torch.arange(width, device=scores.device) >= kept
    masked = torch.empty_like(masked).scatter_(1, order.indices, masked)
    return Candidates(values.masked_fill_(masked, _MASKED), ids, incomplete)


def _largest(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest of each row and their ids, in ascending order of these. Of equals of the smallest, any.

    On a CPU the columns are dealt out to piles; the ``width`` piles with the largest tops hold the ``width`` largest.
    """
    if scores.device.type != "cpu":
        found = scores.topk(width, sorted=False)
        ids, order = found.indices.sort(-1)
        return found.values.gather(1, order), ids
    vocab = scores.shape[1]
    depth = math.isqrt(vocab // width)
    if depth < 2:
        places = torch.from_numpy(np.sort(_places_of_largest(scores, width), -1))
        return scores.gather(1, places), places
    piles = -(-vocab // depth)
    full = piles * (depth - 1)  # the last layer may be short
    tops = torch.unflatten(scores[:, :full], 1, (depth - 1, piles)).amax(1)
    torch.maximum(tops[:, : vocab - full], scores[:, full:], out=tops[:, : vocab - full])
    chosen = np.sort(_places_of_largest(tops, width), -1)
    columns = torch.from_numpy((np.arange(depth)[None, :, None] * piles + chosen[:, None, :]).reshape(len(scores), -1))
    held = scores.gather(1, columns.clamp(max=vocab - 1)).masked_fill_(columns >= vocab, _MASKED)
    places = torch.from_numpy(np.sort(_places_of_largest(held, width), -1))  # columns ascend with their places
    return held.gather(1, places), columns.gather(1, places).clamp_(max=vocab - 1)


def _places_of_largest(scores: Tensor, width: int) -> NDArray[np.int64]:
    """Where the ``width`` largest of each row are, in any order. numpy selects ten times as fast as torch's topk."""
    places: NDArray[np.int64] = np.argpartition(scores.numpy(), -width, axis=-1)[:, -width:]
    return places


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
    blocks = weights.shape[1] // _DRAW_BLOCK
    if blocks < 4:
        tokens = _draw_weighted(weights, uniforms[:, None])
    else:
        tokens = _draw_by_blocks(weights, uniforms[:, None], blocks)
    possible = weights.gather(1, tokens) > 0
    if not bool(possible.all()):  # a parallel prefix sum (on a GPU) may dip by one rounding
        tokens = torch.where(possible, tokens, scores.argmax(-1, keepdim=True))
    return tokens.flatten()


def _draw_weighted(weights: Tensor, uniforms: Tensor) -> Tensor:
    """``weights [rows, columns]``, ``uniforms`` and the result ``[rows, 1]``."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)


def _draw_by_blocks(weights: Tensor, uniforms: Tensor, blocks: int) -> Tensor:
    """The same: first a block of columns, by the sums of blocks, then a column of it. Most of the cumulative sums over
    the vocabulary are never looked at, and they are the dearest part of a draw."""
    vocab = weights.shape[1]
    whole = torch.unflatten(weights[:, : blocks * _DRAW_BLOCK], 1, (blocks, _DRAW_BLOCK))
    rest = weights[:, blocks * _DRAW_BLOCK :].sum(-1, keepdim=True, dtype=torch.float64)
    cumulative = torch.cat((whole.sum(-1, dtype=torch.float64), rest), -1).cumsum(-1)
    target = uniforms * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=blocks)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    columns = block * _DRAW_BLOCK + torch.arange(_DRAW_BLOCK, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=vocab - 1)).masked_fill_(columns >= vocab, 0)
    column = torch.searchsorted(before + inside.cumsum(-1, dtype=torch.float64), target, right=True)
    return block * _DRAW_BLOCK + column.clamp_(max=_DRAW_BLOCK - 1)


def _ascending(scores: Tensor) -> Tensor:
    """The values of each row in ascending order. torch's CPU sort also carries indices and takes ten times as long."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    return scores.sort(-1).values
