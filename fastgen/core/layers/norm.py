"""Norms over the last dimension, fused with the addition before them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastgen.core.layers.layer import Layer, Want, parameter
from fastgen.kernels.ops import KernelTable

__all__ = ["LayerNorm", "Norm", "RMSNorm"]


class Norm(Layer):
    """``norm(stream, delta) -> (stream + delta, its norm)``, each ``[..., size]``; a delta of ``None`` adds nothing."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps

    def want(self) -> dict[Want, tuple[int, ...]]:
        return {("", name): (self.size,) for name, _ in self.named_parameters(recurse=False)}

    def place(self, slot: str, tail: str) -> torch.Tensor:
        whole: torch.Tensor = getattr(self, tail)
        return whole

    def forward(self, stream: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of ``x [..., size]``."""
        normed: torch.Tensor = self(x, None)[1]
        return normed

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class RMSNorm(Norm):
    """Root-mean-square norm with a learned scale (Zhang and Sennrich, 2019).

    Args:
        offset: added to the scale; 1.0 where checkpoints hold its difference from one.
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__(size, eps)
        self.weight, self.offset = parameter(size), offset
        self._add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def bind(self, kernels: KernelTable) -> None:
        self._add_norm = kernels.choose("add_rms_norm", size=self.size)

    def forward(self, stream: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._add_norm(stream, delta, self.weight, self.eps, self.offset)


class LayerNorm(Norm):
    """Layer norm (Ba et al., 2016) with a learned scale and a learned bias.

    Args:
        bias: false for a norm without one.
        weight: false for a norm without a scale.
    """

    def __init__(self, size: int, eps: float, *, bias: bool = True, weight: bool = True) -> None:
        super().__init__(size, eps)
        self.weight = parameter(size) if weight else None
        self.bias = parameter(size) if bias else None
        self._add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def bind(self, kernels: KernelTable) -> None:
        self._add_norm = kernels.choose("add_layer_norm", size=self.size)

    def forward(self, stream: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._add_norm(stream, delta, self.weight, self.bias, self.eps)
