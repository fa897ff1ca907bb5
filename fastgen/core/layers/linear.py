"""Linear maps, some of them several of a checkpoint's fused into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastgen.core.layers.layer import Layer, Want, parameter
from fastgen.kernels.ops import KernelTable

__all__ = ["Linear"]


class Linear(Layer):
    """``x [tokens, in] -> [tokens, out]``.

    Args:
        in_features: width of the input.
        out: width of the output, or ``{slot: width}`` where the rows of several checkpoint modules lie one after
            another (``{"q": 64, "k": 32, "v": 32}``), so that one product serves all.
        bias: whether every slot has one.
    """

    precise = False
    """Whether so much hangs on its outputs that no quantisation touches it: a router's, a gate's."""

    def __init__(self, in_features: int, out: int | Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self.slots = {"": out} if isinstance(out, int) else dict(out)
        self.in_features, self.out_features = in_features, sum(self.slots.values())
        self.weight = parameter(self.out_features, in_features)
        self.bias = parameter(self.out_features) if bias else None
        self._linear: Callable[..., torch.Tensor]
        self._substitute: Callable[..., torch.Tensor] | None = None

    def want(self) -> dict[Want, tuple[int, ...]]:
        wanted: dict[Want, tuple[int, ...]] = {}
        for slot, width in self.slots.items():
            wanted[slot, "weight"] = (width, self.in_features)
            if self.bias is not None:
                wanted[slot, "bias"] = (width,)
        return wanted

    def place(self, slot: str, tail: str) -> torch.Tensor:
        names = list(self.slots)
        start = sum(self.slots[name] for name in names[: names.index(slot)])
        whole: torch.Tensor = getattr(self, tail)
        return whole.narrow(0, start, self.slots[slot])

    def substitute(self, weight: torch.Tensor, linear: Callable[..., torch.Tensor]) -> None:
        """Keep the weight in another form, by which ``linear(x, weight, bias)`` multiplies, whatever is bound later."""
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._substitute = linear

    def bind(self, kernels: KernelTable) -> None:
        self._linear = self._substitute or kernels.choose(
            "linear", in_features=self.in_features, out_features=self.out_features
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.slots}, bias={self.bias is not None}"

    if TYPE_CHECKING:  # typed for callers; at run time another call for each product would cost

        def __call__(self, x: torch.Tensor) -> torch.Tensor: ...
