"""The feed-forward branch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fastgen.core.layers.linear import Linear
from fastgen.errors import UnsupportedModelError, did_you_mean
from fastgen.kernels.ops import KernelTable
from fastgen.kernels.reference import ACTIVATIONS

__all__ = ["MLP"]


class MLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` (GLU variants, Shazeer, 2020): ``[tokens, hidden] -> [tokens, hidden]``.

    Args:
        hidden: width of the stream.
        width: inner width.
        activation: by its name in a transformers config.
        bias: whether all three projections have biases.

    Raises:
        UnsupportedModelError: no such activation.
    """

    def __init__(self, hidden: int, width: int, activation: str, *, bias: bool = False) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"the model's activation {activation!r} is not known.{did_you_mean(activation, ACTIVATIONS)}"
            )
        self.activation, self.width = activation, width
        self.up = Linear(hidden, {"gate": width, "up": width}, bias=bias)
        self.down = Linear(width, hidden, bias=bias)
        self._gated: Callable[..., torch.Tensor]

    def bind(self, kernels: KernelTable) -> None:
        self._gated = kernels.choose("gated_activation", hidden=self.width, activation=self.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._gated(self.up(x), self.activation))
