"""Does every number of a checkpoint land, once, where it belongs, and is a checkpoint that does not fit refused?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from fastgen.core.layers.layer import Layer
from fastgen.core.loading import load_model
from fastgen.core.weights import parts_of, plan
from fastgen.errors import CheckpointError
from fastgen.testing.checkpoints import shuffle_shards
from fastgen.testing.parity import difference
from fastgen.testing.subject import Subject

__all__ = ["check_filled", "check_landing", "check_refusals", "check_shards", "kind"]


def kind(name: str) -> str:
    """A tensor's name without the numbers of layers and experts."""
    return re.sub(r"(?<![a-zA-Z_])\d+", "*", name)


def check_filled(subject: Subject) -> None:
    """Raises AssertionError where a parameter is still what it was before loading, or a buffer is not finite."""
    decoder = subject.decoder
    for name, parameter in decoder.named_parameters():
        empty = int(parameter.isnan().sum())
        if empty:
            raise AssertionError(
                f"{name}: {empty} of {parameter.numel()} numbers are NaN after loading, as they were before: a place "
                "that `want` does not name, or a `load` that leaves it out"
            )
    for name, buffer in decoder.named_buffers():
        if buffer.is_floating_point() and not buffer.isfinite().all():
            raise AssertionError(f"the buffer {name} is not finite: `build` must fill it, no checkpoint does")


def check_landing(subject: Subject) -> None:
    """Every tensor of the file, read back from the parts it filled, bit for bit.

    Raises:
        AssertionError: names the tensor.
    """
    layers = {path: module for path, module in subject.decoder.named_modules() if isinstance(module, Layer)}
    where = {placement.name: placement.destination for placement in subject.blueprint.placements}
    for name, tensor in subject.blueprint.checkpoint.stream(where):
        to = where[name]
        layer = layers[to.path]
        parts = parts_of(layer, to, tensor, subject.blueprint.model_config)
        landed = torch.cat([part.flatten() for part in parts.values()])
        if landed.numel() != tensor.numel() or not torch.equal(landed.sort().values, tensor.flatten().sort().values):
            raise AssertionError(
                f"{name}: what the weight map makes of it is not the same numbers ({landed.numel()} of "
                f"{tensor.numel()}): a transform may slice, view, permute and concatenate, and must lose nothing"
            )
        for (slot, tail), part in parts.items():
            if type(layer).load is not Layer.load:
                continue  # it takes tensors in its own way; that each is filled, and what it computes, is checked
            place = layer.place(slot, tail)
            if not torch.equal(place, part.to(place.dtype)):
                spelt = f"{to.path}{f'[{slot}]' if slot else ''}.{tail}"
                raise AssertionError(
                    f"{name} is not what {spelt} holds after loading: two tensors fill one place, or `place` is wrong"
                )


def check_shards(subject: Subject, folder: Path) -> None:
    """A shuffled copy of the checkpoint with a file for each tensor gives the same logits, through the loading that
    an engine uses.

    Raises:
        AssertionError: it does not.
    """
    shuffle_shards(subject.directory, folder)
    again = subject.prefill(load_model(subject.draw(folder)))
    off = difference(again, subject.prefill())
    if off.max() > 0:
        raise AssertionError(
            f"the same tensors in other files and another order give other logits, from position "
            f"{int(off.nonzero()[0])} on: what a tensor fills depends on when it comes"
        )


def check_refusals(subject: Subject) -> None:
    """Without a tensor of each kind, and with a stranger, the checkpoint is refused, and the message names it.

    Raises:
        AssertionError: it is not, or does not.
    """
    blueprint = subject.blueprint
    weights = blueprint.spec.load().weights
    tensors = blueprint.checkpoint.tensors
    destinations = {placement.name: placement.destination for placement in blueprint.placements}
    shapes = {name: tensors[name].shape for name in destinations}

    def refusal(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        try:
            plan(blueprint.model, weights, blueprint.model_config, shapes)
        except CheckpointError as error:
            return str(error)
        return None

    for name in {kind(name): name for name in shapes}.values():
        told = refusal({other: shape for other, shape in shapes.items() if other != name})
        if told is None:
            raise AssertionError(f"a checkpoint without {name} is accepted: nothing says that the model wants it")
        if destinations[name].path not in told:
            raise AssertionError(
                f"a checkpoint without {name} is refused, but the message does not name {destinations[name].path}, "
                f"the part it leaves empty: {told}"
            )
    for stranger in _strangers(list(shapes)):
        told = refusal({**shapes, stranger: (3,)})
        if told is None:
            raise AssertionError(
                f"a checkpoint with {stranger}, which the model has no part for, is accepted: the weight map ignores "
                "what it does not know"
            )
        if stranger not in told:
            raise AssertionError(f"a checkpoint with {stranger} is refused, but the message does not name it: {told}")


def _strangers(names: list[str]) -> list[str]:
    """Names like a checkpoint's own that are not among them: another module of a layer, another tail, a bare one."""
    deepest = max(names, key=lambda name: (name.count("."), name))
    module, _, tail = deepest.rpartition(".")
    return [f"{module}_stranger.{tail}", f"{module}.stranger", "stranger.weight"]
