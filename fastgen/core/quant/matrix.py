"""Weights of one size, packed by one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastgen.kernels.quantisation import QuantisedLinear

__all__ = ["ALIGNMENT", "Matrix"]

ALIGNMENT = 64
"""Bytes; where a packed weight begins, kernels may load whole cache lines."""


@dataclass(frozen=True)
class Matrix:
    """``count`` weights ``[out, in]`` side by side, packed one by one."""

    kernel: QuantisedLinear
    scheme: str
    out_features: int
    in_features: int
    count: int = 1

    @property
    def size(self) -> int:
        """Bytes of one packed weight."""
        return self.kernel.packed_bytes(self.scheme, self.out_features, self.in_features)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the packed weights, uint8: each a row, filled up so that the next one is aligned."""
        return self.count, -(-self.size // ALIGNMENT) * ALIGNMENT

    def empty(self, device: torch.device) -> torch.Tensor:
        """Room for the packed weights: `shape`, with zeros in what fills the rows up."""
        rows = torch.empty(self.shape, dtype=torch.uint8, device=device)
        rows[:, self.size :] = 0
        return rows

    def pack(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights [count, out, in]`` -> `shape`."""
        rows = self.empty(weights.device)
        for row, weight in zip(rows, weights, strict=True):
            row[: self.size] = self.kernel.pack(self.scheme, weight)
        return rows

    def linear(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [tokens, in]`` times one packed weight (``[size]``), plus ``bias [out]``: ``[tokens, out]``."""
        return self.kernel.linear(self.scheme, x, packed, bias, self.out_features)
