"""Log-probabilities to report: the model's own distribution, log-softmax in float32 over every row of its output head,
before bias, penalties, temperature or any other processing. So a greedy answer reports real values, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.core.runtime.logits import rows_at_once
from fastgen.types import TokenLogprob

__all__ = ["LOWEST_LOGPROB", "prompt_logprobs", "token_logprobs"]

LOWEST_LOGPROB = -9999.0
"""Stands for every value below it, and for minus infinity and NaN: JSON has no word for those."""


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """How likely the model found ``tokens[i]`` in row ``i``, its rank, and the ``tops[i]`` best tokens of that row.

    Equal values are listed by ascending id, whatever else is in the batch. ``rank`` counts strictly greater ones. A
    token that only a prompt can hold, beyond the output head, counts as impossible.

    Args:
        logits: raw, any float dtype, ``[rows, vocab]``.
    """
    found: list[TokenLogprob] = []
    at_once = rows_at_once(logits)
    for start in range(0, len(tokens), at_once):
        rows = slice(start, start + at_once)
        found += _token_logprobs(logits[rows], tokens[rows], tops[rows])
    return found


def prompt_logprobs(logits: Tensor, next_tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """The same for a piece of a prompt: row ``i`` of ``logits`` predicts ``next_tokens[i]``, the token that follows it
    in the prompt; ``count`` best tokens each. The first token of a prompt is predicted by no row."""
    return token_logprobs(logits, next_tokens, [count] * len(next_tokens))


def _token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    logprobs = logits.float().log_softmax(-1)
    vocab = logprobs.shape[1]
    ids_chosen = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = logprobs.gather(1, ids_chosen.clamp(max=vocab - 1))
    chosen.masked_fill_(ids_chosen >= vocab, float("-inf"))
    ranks = (torch.count_nonzero(logprobs > chosen, dim=-1) + 1).tolist()
    widest = min(max(tops), vocab)
    best = logprobs.topk(min(widest + 1, vocab) if widest else 0)  # one more tells whether a tie was cut
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(
            token_id=token,
            logprob=_finite(value),
            rank=rank,
            top=_top(logprobs[row], values[row], ids[row], min(tops[row], vocab)),
        )
        for row, (token, value, rank) in enumerate(zip(tokens, chosen.flatten().tolist(), ranks, strict=True))
    ]


def _top(logprobs: Tensor, values: list[float], ids: list[int], count: int) -> tuple[TokenLogprob, ...]:
    """The ``count`` best of ``logprobs [vocab]``, equals by ascending id. ``values`` and ``ids`` are its best, in
    descending order but with equals in any order."""
    pairs = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
    if 0 < count < len(values) and values[count] == values[count - 1]:
        cut = values[count]
        pairs = [pair for pair in pairs if pair[0] > cut]
        ties = (logprobs == cut).nonzero().flatten()[: count - len(pairs)]
        pairs += [(cut, token) for token in ties.tolist()]
    found: list[TokenLogprob] = []
    rank = 1
    for position, (value, token) in enumerate(pairs[:count]):
        if position and value < pairs[position - 1][0]:
            rank = position + 1
        found.append(TokenLogprob(token_id=token, logprob=_finite(value), rank=rank))
    return tuple(found)


def _finite(value: float) -> float:
    return value if value > LOWEST_LOGPROB else LOWEST_LOGPROB  # False for NaN
