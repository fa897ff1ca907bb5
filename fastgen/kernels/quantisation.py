"""What a kernel for quantised linear maps must offer, and what the schemes mean.

Both schemes are *dynamic*: a weight is quantised once, when it is packed; activations in each call, for each token and
each group of consecutive inputs by itself, to the integers -127..127 (symmetric, the group's greatest magnitude is 127;
to nearest, ties to even). Products within a group are sums of integers, exact in every implementation; groups are added
in float32. A group of activations with a NaN or an infinity makes its token's outputs NaN, and no other's.

- ``int8``: groups of 64. Weights are integers -127..127 times a bfloat16 scale for each output and group. Activations
  and weights are both rotated first: each group by the Walsh-Hadamard matrix of its size, which leaves products what
  they are and spreads outliers over the group, so that rounding costs far less (Ashkboos et al., "QuaRot", 2024).
- ``int4``: groups of 32. Weights are ``scale * (0..15) + minimum`` with a bfloat16 scale and minimum for each output
  and group, chosen for a small squared error.

The last group of a row may be a part of one; what is not there counts as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

__all__ = ["GROUPS", "SCHEMES", "QuantisedLinear"]

GROUPS: Mapping[str, int] = {"int8": 64, "int4": 32}
"""Inputs that share scales, by scheme."""
SCHEMES = tuple(GROUPS)
"""The schemes' names."""


class QuantisedLinear(Protocol):
    """An implementation of the operation ``quantised_linear``. ``scheme`` is one of `SCHEMES`."""

    def layout(self, scheme: str) -> str:
        """The name of the packed form. It changes when the form does, so files of packed weights may be keyed by it."""

    def packed_bytes(self, scheme: str, out_features: int, in_features: int) -> int:
        """How many bytes a packed weight takes."""

    def pack(self, scheme: str, weight: torch.Tensor) -> torch.Tensor:
        """Quantise ``weight [out, in]`` (float32, bfloat16 or float16) into ``[packed_bytes]`` uint8 on its device.

        One flat tensor holds values and scales. It may be written to a file and mapped again anywhere that is 64-byte
        aligned. Groups that hold a NaN or an infinity come out as NaN.
        """

    def linear(
        self, scheme: str, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
    ) -> torch.Tensor:
        """``x [tokens, in]`` (float32 or bfloat16) times the packed weight, plus ``bias [out]``.

        Returns:
            ``[tokens, out]`` in x's dtype.
        """

    def unpack(self, scheme: str, packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
        """What the packed weight stands for: ``[out, in]`` float32."""
