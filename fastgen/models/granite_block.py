"""Granite's block: each branch is weighted before it is added."""

from __future__ import annotations

import torch
from torch import nn

from fastgen import api as fg

__all__ = ["WeightedPreNorm"]


class WeightedPreNorm(fg.Block):
    """``x + weight * attn(norm(x))``, then ``x + weight * mlp(norm(x))``."""

    def __init__(self, norm1: fg.Norm, attn: nn.Module, norm2: fg.Norm, mlp: nn.Module, weight: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp, self.weight = norm1, attn, norm2, mlp, weight

    def forward(
        self, stream: torch.Tensor, delta: torch.Tensor | None, batch: fg.Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream, normed = self.norm1(stream, delta)
        stream, normed = self.norm2(stream, self.attn(normed, batch) * self.weight)
        return stream, self.mlp(normed) * self.weight
