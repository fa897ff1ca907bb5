"""Mixtures of experts: routed, and with a shared one beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fastgen.core.layers.layer import Layer, Want, parameter
from fastgen.core.layers.linear import Linear
from fastgen.core.layers.mlp import MLP, check_activation
from fastgen.errors import ConfigError
from fastgen.kernels.ops import KernelTable

__all__ = ["Experts", "MoE", "SharedExpert"]

_MOST_EXPERTS = 2**16


class Experts(Layer):
    """Gated feed-forward networks of one size, side by side, of which each token visits a few.

    Checkpoints hold them one by one (slots ``0.gate``, ``0.up``, ``0.down``, ``1.gate``, ...) or stacked (slots
    ``gate_up [count, 2 * width, hidden]`` and ``down [count, hidden, width]``, or tensors ``gate_up_proj`` and
    ``down_proj`` of the module itself); all fill the same places.

    Args:
        count: how many.
        hidden: width of the stream.
        width: inner width of each.
        activation: by its name in a transformers config.

    Raises:
        UnsupportedModelError: no such activation.
        ConfigError: no experts, or too many.
    """

    def __init__(self, count: int, hidden: int, width: int, activation: str) -> None:
        super().__init__()
        check_activation(activation)
        if not 1 <= count <= _MOST_EXPERTS:  # each has places of its own, by name
            raise ConfigError(f"config.json: {count} experts; there must be 1 to {_MOST_EXPERTS}")
        self.count, self.hidden, self.width, self.activation = count, hidden, width, activation
        self.gate_up = parameter(count, 2 * width, hidden)
        self.down = parameter(count, hidden, width)
        self._experts: Callable[..., torch.Tensor]
        self._substitute: Callable[..., torch.Tensor] | None = None

    def want(self) -> dict[Want, tuple[int, ...]]:
        wanted: dict[Want, tuple[int, ...]] = {}
        for expert in range(self.count):
            wanted[f"{expert}.gate", "weight"] = wanted[f"{expert}.up", "weight"] = (self.width, self.hidden)
            wanted[f"{expert}.down", "weight"] = (self.hidden, self.width)
        return wanted

    def place(self, slot: str, tail: str) -> torch.Tensor:
        expert, _, which = slot.partition(".")
        if which == "down":
            return self.down[int(expert)]
        return self.gate_up[int(expert)].narrow(0, self.width if which == "up" else 0, self.width)

    def spread(self, slot: str, tail: str, tensor: torch.Tensor) -> dict[Want, torch.Tensor]:
        which = slot if slot in ("gate_up", "down") else "" if slot else tail.removesuffix("_proj")
        if which not in ("gate_up", "down") or tensor.shape[:1] != (self.count,):
            return {(slot, tail): tensor}
        if which == "down":
            return {(f"{expert}.down", "weight"): part for expert, part in enumerate(tensor)}
        gates, ups = tensor.chunk(2, 1)
        return {
            (f"{expert}.{half}", "weight"): part
            for half, parts in (("gate", gates), ("up", ups))
            for expert, part in enumerate(parts)
        }

    def substitute(self, gate_up: torch.Tensor, down: torch.Tensor, experts: Callable[..., torch.Tensor]) -> None:
        """Keep the weights in another form, which ``experts`` (as the operation) takes, whatever is bound later."""
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        self._substitute = experts

    def bind(self, kernels: KernelTable) -> None:
        self._experts = self._substitute or kernels.choose(
            "experts", experts=self.count, hidden=self.hidden, width=self.width, activation=self.activation
        )

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``x [tokens, hidden]`` through the experts ``chosen [tokens, k]`` (int64), weighted by ``weights``."""
        return self._experts(x, self.gate_up, self.down, chosen, weights, self.activation)

    def extra_repr(self) -> str:
        return f"{self.count} of {self.hidden} -> {self.width}, {self.activation}"


class MoE(nn.Module):
    """Each token through the ``top_k`` experts its router scores highest (Shazeer et al., 2017): ``[tokens, hidden] ->
    [tokens, hidden]``. Scores are softmaxed in float32 over all experts.

    Args:
        router: ``hidden -> experts``.
        experts: to choose from.
        top_k: how many each token visits.
        normalise: whether the weights of the chosen are divided by their sum.

    Raises:
        ConfigError: ``top_k`` is above the number of experts.
    """

    def __init__(self, router: Linear, experts: Experts, top_k: int, *, normalise: bool) -> None:
        super().__init__()
        if not 1 <= top_k <= experts.count:
            raise ConfigError(f"config.json: each token visits {top_k} of {experts.count} experts, which cannot be")
        self.router, self.experts, self.top_k, self.normalise = router, experts, top_k, normalise
        router.precise = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1, dtype=torch.float32).topk(self.top_k, -1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        mixed: torch.Tensor = self.experts(x, chosen, weights.to(x.dtype))
        return mixed


class SharedExpert(nn.Module):
    """Routed experts and one that every token visits (Dai et al., 2024), weighted by the sigmoid of a gate
    of its own (``hidden -> 1``) if it has one: ``[tokens, hidden] -> [tokens, hidden]``."""

    def __init__(self, routed: nn.Module, shared: MLP, gate: Linear | None = None) -> None:
        super().__init__()
        self.routed, self.shared, self.gate = routed, shared, gate
        if gate is not None:
            gate.precise = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        common: torch.Tensor = self.shared(x)
        if self.gate is not None:
            common = common * torch.sigmoid(self.gate(x))
        mixed: torch.Tensor = self.routed(x) + common
        return mixed
