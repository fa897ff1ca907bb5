"""The feed-forward branch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fastgen.core.layers.linear import Linear
from fastgen.errors import UnsupportedModelError, did_you_mean
from fastgen.kernels.ops import KernelTable
from fastgen.kernels.reference import ACTIVATIONS

__all__ = ["MLP", "PlainMLP", "check_activation"]


def check_activation(name: str) -> None:
    """Raises UnsupportedModelError when no activation has this name."""
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"the model's activation {name!r} is not known.{did_you_mean(name, ACTIVATIONS)}")


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
        check_activation(activation)
        self.activation, self.width = activation, width
        self.up = Linear(hidden, {"gate": width, "up": width}, bias=bias)
        self.down = Linear(width, hidden, bias=bias)
        self._gated: Callable[..., torch.Tensor]

    def bind(self, kernels: KernelTable) -> None:
        self._gated = kernels.choose("gated_activation", hidden=self.width, activation=self.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._gated(self.up(x), self.activation))


class PlainMLP(nn.Module):
    """``down(act(up(x)))``: ``[tokens, hidden] -> [tokens, hidden]``. Arguments as `MLP`'s."""

    def __init__(self, hidden: int, width: int, activation: str, *, bias: bool = False) -> None:
        super().__init__()
        check_activation(activation)
        self.activation, self.width = activation, width
        self.up = Linear(hidden, width, bias=bias)
        self.down = Linear(width, hidden, bias=bias)
        self._activation: Callable[..., torch.Tensor]

    def bind(self, kernels: KernelTable) -> None:
        self._activation = kernels.choose("activation", hidden=self.width, activation=self.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activation(self.up(x), self.activation))
