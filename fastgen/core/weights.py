"""From a checkpoint's headers to a checked plan, and from the plan to filled parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fastgen.core.layers.layer import Layer, Want
from fastgen.core.weight_map import Destination, WeightMap
from fastgen.errors import CheckpointError, some

__all__ = ["Model", "Placement", "TensorSource", "load", "parts_of", "plan"]


class TensorSource(Protocol):
    """The part of a checkpoint that loading needs."""

    def stream(self, names: Iterable[str]) -> Iterable[tuple[str, torch.Tensor]]:
        """The named tensors, one at a time."""


class Model(Protocol):
    """The part of a decoder that planning needs."""

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Destination] | None:
        """See `Decoder.match`."""

    def named_modules(self) -> Iterable[tuple[str, nn.Module]]: ...


@dataclass(frozen=True)
class Placement:
    """One checkpoint tensor (``name`` as in the file) and where it goes."""

    name: str
    destination: Destination


def plan(model: Model, weights: WeightMap, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Placement]:
    """Match a model's parts with a checkpoint's tensors, both ways, without reading any.

    Raises:
        CheckpointError: a tensor no rule claims, a part nothing fills, a shape that does not fit, a place filled twice;
            names a few of each.
    """
    if (matched := model.match(shapes)) is not None:
        return [Placement(name, destination) for name, destination in matched.items()]
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Layer)}
    missing = {
        (path, slot, tail): shape for path, layer in layers.items() for (slot, tail), shape in layer.want().items()
    }
    renamed = weights.rename(shapes)
    placements: list[Placement] = []
    unclaimed: list[str] = []
    misfits: list[str] = []
    for name, shape in shapes.items():
        if weights.ignores(name) or weights.ignores(renamed[name]):
            continue
        destination = weights.find(renamed[name])
        if destination is None or destination.path not in layers:
            unclaimed.append(name)
            continue
        try:
            parts = parts_of(layers[destination.path], destination, torch.empty(shape, device="meta"), config)
        except Exception as error:  # a transform's own: it cannot take this shape apart
            misfits.append(f"{name} is {list(shape)}, which the weight map cannot take apart ({error})")
            continue
        for (slot, tail), part in parts.items():
            wanted = missing.pop((destination.path, slot, tail), None)
            if wanted is None:
                known = (slot, tail) in layers[destination.path].want()
                unclaimed.append(f"{name} (fills a place a second time)" if known else name)
            elif tuple(part.shape) != wanted:
                misfits.append(f"{name} is {list(part.shape)}, the model wants {list(wanted)}")
        placements.append(Placement(name, destination))
    _complain(placements, unclaimed, [_spell(*place) for place in missing], misfits)
    return placements


def load(
    model: nn.Module,
    placements: Iterable[Placement],
    config: Any,
    source: TensorSource,
    *,
    loaded: Callable[[int], None] = lambda _bytes: None,
    filled: Callable[[str], None] = lambda _path: None,
) -> None:
    """Fill a model as planned, each tensor straight into its place.

    Args:
        loaded: told the bytes of every tensor read, for a progress bar.
        filled: told the path of every layer, once the last tensor planned for it is there.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Layer)}
    where = {placement.name: placement.destination for placement in placements}
    to_come = Counter(destination.path for destination in where.values())
    for name, tensor in source.stream(where):
        path = where[name].path
        layer = layers[path]
        for (slot, tail), part in parts_of(layer, where[name], tensor, config).items():
            layer.load(slot, tail, part)
        loaded(tensor.numel() * tensor.element_size())
        to_come[path] -= 1
        if not to_come[path]:
            filled(path)


def parts_of(layer: Layer, to: Destination, tensor: torch.Tensor, config: Any) -> dict[Want, torch.Tensor]:
    """What one checkpoint tensor holds for the places of ``layer``, taken apart by its rule and by the layer."""
    slots = {to.slot: tensor} if to.transform is None else to.transform(tensor, config)
    return {place: part for slot, whole in slots.items() for place, part in layer.spread(slot, to.tail, whole).items()}


def _spell(path: str, slot: str, tail: str) -> str:
    return f"{path}{f'[{slot}]' if slot else ''}.{tail}"


def _complain(placements: list[Placement], unclaimed: list[str], unfilled: list[str], misfits: list[str]) -> None:
    problems = []
    if not placements:
        problems.append("no tensor of the checkpoint has a name this model knows")
    if unclaimed:
        problems.append(f"tensors that nothing in the model takes: {some(sorted(unclaimed))}")
    if unfilled:
        problems.append(f"parts of the model that no tensor fills: {some(sorted(unfilled))}")
    if misfits:
        problems.append(f"shapes that do not fit: {some(sorted(misfits))}")
    if problems:
        raise CheckpointError(
            "the checkpoint does not fit the model its config describes: " + "; ".join(problems) + ". "
            "Check that config.json belongs to these weights, or the plugin's weight map."
        )
