"""The attention function that transformers' modelling code is given: over fastgen's paged cache.

transformers lets anybody register an attention function (``AttentionInterface``); every attention module calls the one
that its config names with query, key and value ``[1, heads, tokens, head_dim]``. Ours finds the pass that is running
and the module's place in it: attentions are numbered in the order in which a pass calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from fastgen import api as fg

__all__ = ["NAME", "Pass", "running"]

NAME = "fastgen_paged"
"""What a config calls our function. No mask function goes by this name, so transformers makes no masks."""


@dataclass
class Pass:
    """One forward pass: whose attention, and how many have run."""

    attentions: Sequence[fg.CachedAttention]
    batch: fg.Batch
    done: int = 0


_running: ContextVar[Pass] = ContextVar("running")


@contextmanager
def running(one: Pass) -> Iterator[None]:
    """Attention inside belongs to this pass."""
    token = _running.set(one)
    try:
        yield
    finally:
        _running.reset(token)
    if one.done != len(one.attentions):
        raise RuntimeError(f"the model called {one.done} attentions in this pass, not its {len(one.attentions)}")


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """``[1, heads, tokens, head_dim] -> [1, tokens, heads, value_dim]``. What the other arguments mean was settled
    when the model was built (`probe`)."""
    one = _running.get()
    attention, one.done = one.attentions[one.done], one.done + 1
    if scaling is not None and scaling != attention.scores.scale:
        raise RuntimeError(f"the attention scale of {type(module).__name__} changed to {scaling}")
    # The cache's kernels want one row of heads after another.
    query, key, value = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    return attention(query, key, value, one.batch).unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
