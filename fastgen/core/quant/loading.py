"""Packing while a model is loaded, or taking what an earlier start has packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fastgen.core.checkpoint import Checkpoint
from fastgen.core.layers import Layer
from fastgen.core.layers.layer import Want
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
        plugin: whose weight map says where tensors go, with its version.
    """

    def __init__(
        self,
        quantisation: Quantisation,
        model: nn.Module,
        config: Any,
        checkpoint: Checkpoint,
        *,
        name: str,
        plugin: str,
    ) -> None:
        self.quantisation, self.model = quantisation, model
        self._config, self._checkpoint = config, checkpoint
        self._name, self._plugin = name, plugin
        self._layers = {path: module for path, module in model.named_modules() if isinstance(module, Layer)}
        self._sources = {part.source for part in quantisation.parts}
        self._waiting: dict[str, list[Part]] = {}
        self._packed: dict[str, torch.Tensor] = {}
        self._cache: PackedCache | None = None

    def begin(self, placements: Iterable[Placement]) -> list[Placement]:
        """Take what is in the cache. Returns what of the checkpoint is still to be read."""
        placements = list(placements)
        if self.quantisation.keep:
            packed = {p.name: _way(p, places) for p in placements if (places := self._packed_places(p))}
            self._cache = PackedCache.of(
                self.quantisation, self._checkpoint, packed, name=self._name, plugin=self._plugin
            )
            if (found := self._cache.read()) is not None:
                self._cache = None
                self._install(found)
                own = {part.path for part in self.quantisation.parts if not isinstance(part, PackedHead)}
                return [p for p in placements if p.name not in packed or p.destination.path not in own]
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

    def _install(self, found: Mapping[str, torch.Tensor]) -> None:
        """Use packed rows from the cache, which are in the CPU's memory, where the model is."""
        device = next(self.model.parameters()).device
        for part in self.quantisation.parts:
            part.install(self.model, {name: found[f"{part.path}.{name}"].to(device) for name in part.matrices})

    def _packed_places(self, placement: Placement) -> list[Want]:
        """What a tensor fills if all of that is packed; else nothing."""
        to = placement.destination
        if to.path not in self._sources:
            return []
        shape = self._checkpoint.tensors[placement.name].shape
        places = parts_of(self._layers[to.path], to, torch.empty(shape, device="meta"), self._config)
        return list(places) if all(tail == "weight" for _, tail in places) else []


def _way(placement: Placement, places: list[Want]) -> list[object]:
    """Where a tensor goes, in plain values: other ways fill the model differently."""
    to, transform = placement.destination, placement.destination.transform
    named = getattr(transform, "__qualname__", type(transform).__qualname__)  # an object that can be called has none
    return [to.path, to.slot, to.tail, getattr(transform, "__module__", ""), named, places]
