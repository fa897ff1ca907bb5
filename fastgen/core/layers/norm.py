"""Norms over the hidden dimension, fused with the addition before them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastgen.core.layers.layer import Layer, Want, parameter
from fastgen.kernels.ops import KernelTable

__all__ = ["RMSNorm"]


class RMSNorm(Layer):
    """Root-mean-square norm with a learned scale (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = parameter(size)
        self._add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def want(self) -> dict[Want, tuple[int, ...]]:
        return {("", "weight"): (self.size,)}

    def place(self, slot: str, tail: str) -> torch.Tensor:
        return self.weight

    def bind(self, kernels: KernelTable) -> None:
        self._add_norm = kernels.choose("add_rms_norm", size=self.size)

    def forward(self, stream: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``stream + delta`` (``[tokens, size]``) and its norm."""
        return self._add_norm(stream, delta, self.weight, self.eps)
