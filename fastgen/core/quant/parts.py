"""The kinds of parts whose weights can be packed: where the weights are, and how a part is told to use packed ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from fastgen.core.layers import Experts, Head, Linear
from fastgen.core.quant.matrix import Matrix
from fastgen.kernels.reference import mix_experts

__all__ = ["PackedExperts", "PackedHead", "PackedLinear", "Part"]


class Part(Protocol):
    """A part to be packed: described, not held, so that it serves a model without memory and the loaded one."""

    @property
    def path(self) -> str:
        """Of the part in the model."""

    @property
    def source(self) -> str:
        """Path of the layer that holds its weights until they are packed."""

    @property
    def matrices(self) -> Mapping[str, Matrix]:
        """What is packed, by the attribute it is kept under."""

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The weights as they were loaded, each ``[count, out, in]``, by the same names."""

    def install(self, model: nn.Module, packed: Mapping[str, torch.Tensor]) -> None:
        """Let the part use these rows (`Matrix.shape`), and forget its weights."""


@dataclass(frozen=True)
class PackedLinear:
    """A `Linear`; the bias stays."""

    path: str
    matrix: Matrix

    @property
    def source(self) -> str:
        return self.path

    @property
    def matrices(self) -> dict[str, Matrix]:
        return {"weight": self.matrix}

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        linear = model.get_submodule(self.path)
        assert isinstance(linear, Linear)
        return {"weight": linear.weight[None]}

    def install(self, model: nn.Module, packed: Mapping[str, torch.Tensor]) -> None:
        linear = model.get_submodule(self.path)
        assert isinstance(linear, Linear)
        linear.substitute(packed["weight"][0, : self.matrix.size], self.matrix.linear)


@dataclass(frozen=True)
class PackedHead:
    """The copy that a tied `Head` multiplies by; the embedding keeps its table."""

    path: str
    source: str
    matrix: Matrix

    @property
    def matrices(self) -> dict[str, Matrix]:
        return {"weight": self.matrix}

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        head = model.get_submodule(self.path)
        assert isinstance(head, Head)
        assert head.tied is not None
        return {"weight": head.tied.weight[None]}

    def install(self, model: nn.Module, packed: Mapping[str, torch.Tensor]) -> None:
        head = model.get_submodule(self.path)
        assert isinstance(head, Head)
        head.substitute(packed["weight"][0, : self.matrix.size], self.matrix.linear)


@dataclass(frozen=True)
class PackedExperts:
    """`Experts`, each packed by itself."""

    path: str
    gate_up: Matrix
    down: Matrix
    gated: Callable[..., torch.Tensor]
    """The operation ``gated_activation``."""

    @property
    def source(self) -> str:
        return self.path

    @property
    def matrices(self) -> dict[str, Matrix]:
        return {"gate_up": self.gate_up, "down": self.down}

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        experts = model.get_submodule(self.path)
        assert isinstance(experts, Experts)
        return {"gate_up": experts.gate_up, "down": experts.down}

    def install(self, model: nn.Module, packed: Mapping[str, torch.Tensor]) -> None:
        experts = model.get_submodule(self.path)
        assert isinstance(experts, Experts)
        rows = {name: packed[name][:, : matrix.size] for name, matrix in self.matrices.items()}
        experts.substitute(rows["gate_up"], rows["down"], self.run)

    def run(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        """The operation ``experts``, with ``gate_up`` and ``down`` packed ``[count, size]``."""

        def run(expert: int, inputs: torch.Tensor, out: torch.Tensor) -> None:
            inner = self.gated(self.gate_up.linear(inputs, gate_up[expert], None), activation)
            out.copy_(self.down.linear(inner, down[expert], None))

        return mix_experts(x, chosen, weights, self.gate_up.count, run)
