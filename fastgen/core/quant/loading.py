"""Packing while a model is loaded, or taking what an earlier start has packed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastgen.core.checkpoint import Checkpoint
from fastgen.core.layers import Layer
from fastgen.core.quant.packed_cache import PackedCache
from fastgen.core.quant.parts import PackedHead, Part
from fastgen.core.quant.plan import Quantisation
from fastgen.core.weights import Placement, parts_of

__all__ = ["Packing"]


class Packing:
    """One model's way from a checkpoint to packed weights: ``begin``, then ``filled`` for each layer whose places are
    filled, then ``end``.

    Args:
        quantisation: what was decided.
        model: with memory, and unfilled.
        config: the model's.
        name: what the user called it, for the name of the file in the cache.
    """

    def __init__(
        self, quantisation: Quantisation, model: nn.Module, config: Any, checkpoint: Checkpoint, *, name: str
    ) -> None:
        self.quantisation, self.model = quantisation, model
        self._config, self._checkpoint, self._name = config, checkpoint, name
        self._layers = {path: module for path, module in model.named_modules() if isinstance(module, Layer)}
        self._waiting: dict[str, list[Part]] = {}
        self._packed: dict[str, torch.Tensor] = {}
        self._cache: PackedCache | None = None

    def begin(self, placements: Iterable[Placement]) -> list[Placement]:
        """Take what is in the cache. Returns what of the checkpoint is still to be read."""
        placements = list(placements)
        sources = [placement.name for placement in placements if self._is_packed(placement)]
        if self.quantisation.keep:
            self._cache = PackedCache.of(self.quantisation, self._checkpoint, sources, name=self._name)
            if (found := self._cache.read()) is not None:
                self._cache = None
                for part in self.quantisation.parts:
                    part.install(self.model, {name: found[f"{part.path}.{name}"] for name in part.matrices})
                own = {part.path for part in self.quantisation.parts if not isinstance(part, PackedHead)}
                unread = {p.name for p in placements if p.destination.path in own and self._is_packed(p)}
                return [placement for placement in placements if placement.name not in unread]
        for part in self.quantisation.parts:
            self._waiting.setdefault(part.source, []).append(part)
        return placements

    def filled(self, path: str) -> None:
        """Pack what the layer at ``path`` holds. Its float weights are let go at once."""
        for part in self._waiting.pop(path, ()):
            weights = part.weights(self.model)
            packed = {name: matrix.pack(weights[name]) for name, matrix in part.matrices.items()}
            del weights
            part.install(self.model, packed)
            if self._cache is not None:
                self._packed |= {f"{part.path}.{name}": rows for name, rows in packed.items()}

    def end(self) -> None:
        """Keep for the next start what was packed in this one."""
        assert not self._waiting, f"never filled: {list(self._waiting)}"
        if self._cache is not None:
            self._cache.write(self._packed)
        self._packed.clear()

    def _is_packed(self, placement: Placement) -> bool:
        """Whether all that a tensor fills is packed."""
        to = placement.destination
        if to.path not in {part.source for part in self.quantisation.parts}:
            return False
        shape = self._checkpoint.tensors[placement.name].shape
        places = parts_of(self._layers[to.path], to, torch.empty(shape, device="meta"), self._config)
        return all(tail == "weight" for _, tail in places)
