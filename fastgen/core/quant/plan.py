"""What of a model is quantised, by which kernels, and what stays as it is. Decided before weights are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fastgen.core.layers import Experts, Head, Linear
from fastgen.core.quant.matrix import Matrix
from fastgen.core.quant.parts import PackedExperts, PackedHead, PackedLinear, Part
from fastgen.errors import ConfigError
from fastgen.kernels.ops import KernelTable, Need

__all__ = ["Kept", "Quantisation", "plan_quantisation"]

_LEAST_OUTPUTS = 32
"""A weight with fewer is read in no time, and its few outputs, gates as a rule, matter each."""
_HEAD_SCHEMES = {"int8": "int8", "int4": "int8"}
"""Logits are compared with each other, so the head suffers most from four bits."""


@dataclass(frozen=True)
class Kept:
    """A weight that a quantisation could have packed and leaves as it is."""

    path: str
    reason: str


@dataclass(frozen=True)
class Quantisation:
    """A scheme, carried out on a model."""

    scheme: str
    dtype: str
    """The model's: what weights are rounded to before they are packed."""
    parts: tuple[Part, ...]
    kernels: tuple[str, ...]
    """Names of the kernels that pack and multiply."""
    kept: tuple[Kept, ...]
    bytes_before: int
    """Of the weights of ``parts``, in the model's dtype."""
    model_bytes_before: int
    """Of all the model's weights, in the formats they would have without it."""
    keep: bool
    """Whether packed weights are kept in the user's cache."""

    @property
    def copies_table(self) -> bool:
        """Whether a tied head gets a packed copy of the embedding's table, which stays."""
        return any(isinstance(part, PackedHead) for part in self.parts)

    @property
    def warnings(self) -> list[str]:
        """What whoever asked for it should be told."""
        if "torch" not in self.kernels:  # the reference
            return []
        return [
            f"quantization: {self.scheme} runs in plain torch here, which unpacks the weights in every pass: they take "
            "less memory, and passes take longer than without it; fastgen explain says why no faster kernel serves"
        ]

    @property
    def bytes_after(self) -> int:
        return sum(count * size for count, size in (m.shape for part in self.parts for m in part.matrices.values()))


def plan_quantisation(model: nn.Module, scheme: str, kernels: KernelTable, *, keep: bool = False) -> Quantisation:
    """Decide it for a model without memory, and let its parts know: their packed weights are on the meta device then.

    Args:
        model: before its kernels are bound.
        scheme: one of ``fastgen.kernels.quantisation.SCHEMES``.
        keep: whether packed weights are kept in the user's cache.

    Raises:
        ConfigError: no kernel can do it on this device and dtype, or nothing in the model can be quantised.
    """
    planner = _Planner(model, scheme, kernels)
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    parts, kept = planner.parts()
    if not parts:
        raise ConfigError(
            f"quantization: {scheme} finds nothing to quantise: this model has no linear map or experts that fastgen "
            "runs itself (its plugin brings parts of its own), or only small ones; leave the option out"
        )
    before = 0
    for part in parts:
        if not isinstance(part, PackedHead):  # the table stays beside its copy
            before += sum(w.numel() * w.element_size() for w in part.weights(model).values())
        meta = {name: torch.empty(m.shape, dtype=torch.uint8, device="meta") for name, m in part.matrices.items()}
        part.install(model, meta)
    return Quantisation(
        scheme=scheme,
        dtype=kernels.dtype,
        parts=tuple(parts),
        kernels=tuple(dict.fromkeys(planner.chosen)),
        kept=tuple(kept),
        bytes_before=before,
        model_bytes_before=total,
        keep=keep,
    )


class _Planner:
    def __init__(self, model: nn.Module, scheme: str, kernels: KernelTable) -> None:
        self.scheme, self.kernels = scheme, kernels
        self.modules = dict(model.named_modules())  # a part that several share comes once
        self.paths = {module: path for path, module in self.modules.items()}
        self.heads = {module.proj for module in self.modules.values() if isinstance(module, Head)}
        self.chosen: list[str] = []

    def parts(self) -> tuple[list[Part], list[Kept]]:
        parts: list[Part] = []
        kept: list[Kept] = []
        for path, module in self.modules.items():
            if type(module) is Linear:  # what a subclass does with its weight is not known here
                reason = _against(module)
                if reason is None:
                    parts.append(PackedLinear(path, self._of_linear(module)))
                else:
                    kept.append(Kept(path, reason))
            elif isinstance(module, Linear) or (isinstance(module, Experts) and type(module) is not Experts):
                kept.append(Kept(path, f"a plugin's own {type(module).__name__}"))
            elif isinstance(module, Experts):
                parts.append(self._of_experts(path, module))
            elif isinstance(module, Head) and module.tied in self.paths:
                table = module.tied
                assert table is not None
                matrix = self._matrix(_HEAD_SCHEMES[self.scheme], table.rows, table.width)
                parts.append(PackedHead(path, self.paths[table], matrix))
        return parts, kept

    def _of_linear(self, linear: Linear) -> Matrix:
        scheme = _HEAD_SCHEMES[self.scheme] if linear in self.heads else self.scheme
        return self._matrix(scheme, linear.out_features, linear.in_features)

    def _of_experts(self, path: str, experts: Experts) -> PackedExperts:
        return PackedExperts(
            path,
            self._matrix(self.scheme, 2 * experts.width, experts.hidden, experts.count),
            self._matrix(self.scheme, experts.hidden, experts.width, experts.count),
            self.kernels.choose("gated_activation", hidden=experts.width, activation=experts.activation),
        )

    def _matrix(self, scheme: str, out_features: int, in_features: int, count: int = 1) -> Matrix:
        sizes: dict[str, int | str] = {"scheme": scheme, "in_features": in_features, "out_features": out_features}
        try:
            factory = self.kernels.choose("quantised_linear", **sizes)
        except ConfigError as error:
            raise ConfigError(f"quantization: {self.scheme} cannot be done here: {error}") from None
        need = Need("quantised_linear", self.kernels.device, self.kernels.dtype, sizes)
        self.chosen += [choice.chosen for choice in self.kernels.choices if choice.need == need]
        return Matrix(self.kernels.shared(factory), scheme, out_features, in_features, count)


def _against(linear: Linear) -> str | None:
    """Why a linear map stays as it is, if it does."""
    if linear.precise:
        return "much hangs on its few outputs: it routes or gates"
    if linear.out_features < _LEAST_OUTPUTS:
        return f"small: {linear.out_features} outputs"
    return None
