"""What a layer may know of the pass it runs in."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch

from fastgen.kernels.paging import LayerCache, PagedLayout

__all__ = ["Batch"]


class Batch(Protocol):
    """One forward pass over a ragged batch: the tokens of all its sequences in one row after another."""

    ids: torch.Tensor
    """``[tokens]`` int64."""
    positions: torch.Tensor
    """``[tokens]`` int64, from 0 in each sequence."""
    rows: torch.Tensor
    """int64: the rows whose logits are wanted."""
    sequence_of: torch.Tensor
    """``[tokens]`` int64: which of the pass's sequences each token belongs to."""
    lengths: torch.Tensor
    """``[sequences]`` int64: the length each sequence's keys are computed for, where they depend on one: its prompt's,
    or what it had when they were last computed anew (`Rope.renewal`)."""
    layout: PagedLayout
    caches: list[LayerCache]
    """By ``Attention.index``."""
    memo: dict[Hashable, Any]
    """For what a part computes once a pass and shares between layers."""
