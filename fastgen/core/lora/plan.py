"""An adapter's tensors matched with a model's parts, from the headers of its files: nothing of it is read yet.

The tensors say what an adapter is, each must have its place, and every module its config targets must have tensors. A
name in ``target_modules`` that no module has is harmless: peft's lists often serve several families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastgen.core.checkpoint import Checkpoint
from fastgen.core.hub import ADAPTER_CONFIG
from fastgen.core.layers import Layer, Linear
from fastgen.core.lora.adapter_config import AdapterConfig, read_adapter_config
from fastgen.core.lora.files import find_adapter, open_factors
from fastgen.core.lora.rows import RowMap, row_map
from fastgen.core.weight_map import Destination, Transform, WeightMap
from fastgen.errors import CheckpointError, FastgenError, UnsupportedModelError, some

__all__ = ["LoraPlan", "LoraTarget", "plan_loras"]

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_WHOLE = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.weight")
_SPECIAL = {
    "lora_magnitude_vector": "DoRA, which rescales the model's own weights",
    "lora_embedding_A": "LoRA on an embedding",
    "lora_embedding_B": "LoRA on an embedding",
    "modules_to_save": "a whole retrained module (modules_to_save)",
    "lora_B.bias": "a bias of its own (lora_bias)",
    "token_adapter": "retrained rows of the embedding (trainable_token_indices)",
}


@dataclass(frozen=True)
class LoraTarget:
    """One module that an adapter changes: ``scale * B @ A`` is added to its weight."""

    module: str
    """Its name in the adapter's files."""
    path: str
    """Of the `Linear` it is, or is a slot of, in our model."""
    down: str
    """Name of the tensor A, ``[rank, in]``."""
    up: str
    """Name of the tensor B, ``[out, rank]``."""
    rank: int
    scale: float
    slots: dict[str, torch.Tensor | None]
    """The rows of B that come to each slot; ``None``: all, in order."""


@dataclass(frozen=True)
class LoraPlan:
    """An adapter that fits the model."""

    name: str
    directory: Path
    files: Checkpoint
    targets: list[LoraTarget]
    warnings: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """The ranks it has, each once."""
        return sorted({target.rank for target in self.targets})

    @property
    def parameters(self) -> int:
        """How many numbers its factors have."""
        names = [name for target in self.targets for name in (target.down, target.up)]
        return sum(torch.Size(self.files.tensors[name].shape).numel() for name in names)


class _Model:
    """What adapters are matched with."""

    def __init__(self, model: nn.Module, weights: WeightMap, config: Any, checkpoint: Checkpoint) -> None:
        self.layers = {path: module for path, module in model.named_modules() if isinstance(module, Layer)}
        self.weights, self.checkpoint = weights, checkpoint
        self._config = config
        self._row_maps: dict[tuple[Any, int, int], RowMap | None] = {}

    @cached_property
    def modules(self) -> dict[str, str]:
        """The modules of the checkpoint, by their canonical names, with the name of their weight in its files."""
        renamed = self.weights.rename(self.checkpoint.tensors)
        return {to.removesuffix(".weight"): name for name, to in renamed.items() if to.endswith(".weight")}

    @cached_property
    def places(self) -> dict[str, Destination]:
        """Where each of them goes."""
        found = ((module, self.weights.find(f"{module}.weight")) for module in self.modules)
        return {module: to for module, to in found if to is not None}

    def linear(self, path: str) -> Linear | None:
        """The part, if it is one that adapters can act on."""
        layer = self.layers.get(path)
        return layer if type(layer) is Linear and not _is_expert(path) else None

    def canonical(self, modules: Iterable[str]) -> dict[str, str]:
        """The names of an adapter's modules, as the weight map has them."""
        renamed = self.weights.rename(f"{module}.weight" for module in modules)
        return {old.removesuffix(".weight"): new.removesuffix(".weight") for old, new in renamed.items()}

    def rows(self, transform: Transform, rows: int, columns: int) -> RowMap | None:
        """As `row_map`, once for each size."""
        key = (transform, rows, columns)
        if key not in self._row_maps:
            self._row_maps[key] = row_map(transform, self._config, rows, columns)
        return self._row_maps[key]


def plan_loras(
    loras: Mapping[str, str],
    *,
    model: nn.Module,
    weights: WeightMap,
    config: Any,
    checkpoint: Checkpoint,
    model_name: str,
    token: str | None = None,
    offline: bool = False,
    load_bin: bool = False,
) -> list[LoraPlan]:
    """Check every adapter against the model.

    Args:
        loras: the directory of each, or its name on the hub, by the name it is served under.
        model: with its parts, and without memory.
        weights, config, checkpoint: what the model is loaded by, and from.
        model_name: what the user called it.
        token, offline: for the hub.
        load_bin: accept factors in PyTorch's ``.bin`` format.

    Raises:
        ModelNotFoundError: there is no such adapter.
        CheckpointError: an adapter's files are missing or damaged, hold a tensor that nothing takes, lack one, or do
            not fit the model.
        UnsupportedModelError: an adapter needs what is not done here.
    """
    target = _Model(model, weights, config, checkpoint)
    plans = []
    for name, place in loras.items():
        try:
            directory = find_adapter(place, token=token, offline=offline, load_bin=load_bin)
            settings = read_adapter_config(directory)
            files = open_factors(directory, load_bin=load_bin)
            targets = _Matcher(settings, files, target).targets()
        except FastgenError as error:
            raise type(error)(f"LoRA adapter {name!r} ({place}): {error}") from error
        plans.append(LoraPlan(name, directory, files, targets, _doubts(settings, model_name)))
    return plans


def _doubts(config: AdapterConfig, model_name: str) -> list[str]:
    def last(name: str) -> str:
        return name.rstrip("/").rpartition("/")[2].lower()

    if config.base_model is None or last(config.base_model) == last(model_name):
        return []
    return [
        f"was trained on {config.base_model}, and is served on {model_name}: right only if these are the same model"
    ]


class _Matcher:
    """Matches one adapter's tensors with the model's parts."""

    def __init__(self, config: AdapterConfig, files: Checkpoint, model: _Model) -> None:
        self.config, self.files, self.model = config, files, model

    def targets(self) -> list[LoraTarget]:
        """What the adapter changes. Raises as `plan_loras`, without the adapter's name."""
        factors: dict[str, dict[str, str]] = {}
        whole: dict[str, str] = {}
        for tensor, info in self.files.tensors.items():
            short = tensor.removeprefix("base_model.model.")
            if not info.dtype.startswith(("float", "bfloat")):
                raise CheckpointError(f"{tensor} is stored as {info.dtype}, not as plain numbers")
            if found := _FACTOR.fullmatch(short):
                known = factors.setdefault(found["module"], {})
                if found["factor"] in known:
                    raise CheckpointError(f"{tensor} and {known[found['factor']]} are the same tensor twice")
                known[found["factor"]] = tensor
            elif special := next((text for mark, text in _SPECIAL.items() if mark in short), None):
                raise UnsupportedModelError(f"{tensor} is {special}, which is not supported")
            elif found := _WHOLE.fullmatch(short):
                whole[found["module"]] = tensor
            else:
                raise CheckpointError(f"nothing in the model takes its tensor {tensor}")
        if not factors:
            raise CheckpointError("it changes nothing: its files hold no lora_A and lora_B")
        self._check_copies(whole)
        targets = self._all(factors)
        self._check_complete(targets)
        return targets

    def _all(self, factors: Mapping[str, Mapping[str, str]]) -> list[LoraTarget]:
        canonical = self.model.canonical(factors)
        targets = []
        unknown = []
        taken: dict[tuple[str, str], str] = {}
        for module, pair in factors.items():
            if pair.keys() != {"A", "B"}:
                (there,) = pair
                raise CheckpointError(f"it has lora_{there} for {module}, and the other factor is missing")
            to = self.model.weights.find(f"{canonical[module]}.weight")
            if to is None or to.path not in self.model.layers:
                unknown.append(_untied(module, to))
                continue
            target = self._target(module, pair["A"], pair["B"], to)
            for slot in target.slots:
                if (other := taken.setdefault((to.path, slot), module)) != module:
                    raise CheckpointError(f"{module} and {other} are the same part of the model")
            targets.append(target)
        if unknown:
            raise CheckpointError(
                f"it changes modules that this model does not have: {some(unknown)}. Was it trained on another model?"
            )
        return targets

    def _target(self, module: str, down: str, up: str, to: Destination) -> LoraTarget:
        linear = self.model.linear(to.path)
        if linear is None:
            raise UnsupportedModelError(
                f"it changes {module}, which is no linear part that every token passes "
                f"({type(self.model.layers[to.path]).__name__} {to.path}); that is not supported"
            )
        a, b, rank = self.files.tensors[down].shape, self.files.tensors[up].shape, self.config.rank_of(module)
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise CheckpointError(f"the factors of {module} do not fit each other: A is {list(a)}, B is {list(b)}")
        if a[0] != rank:
            raise CheckpointError(
                f"the factors of {module} have rank {a[0]}, and {ADAPTER_CONFIG} says {rank} (r, or a rank_pattern)"
            )
        wanted = f"{linear.in_features} -> {linear.slots.get(to.slot) or linear.slots}"
        extra = " (tokens were added to its vocabulary?)" if to.path == "head.proj" else ""
        misfit = CheckpointError(f"its factors for {module} map {a[1]} -> {b[0]}, the model's {wanted}{extra}")
        if a[1] != linear.in_features or b[0] > linear.out_features:
            raise misfit
        slots, transposed = self._slots(b[0], a[1], to)
        if slots is None and sorted(self._stored(module)) == sorted((b[0], a[1])):
            raise UnsupportedModelError(
                f"it changes {module}, and the model's weight map does more with that weight than move its rows"
            )
        sizes = {slot: b[0] if rows is None else len(rows) for slot, rows in (slots or {}).items()}
        if slots is None or any(linear.slots.get(slot) != size for slot, size in sizes.items()):
            raise misfit
        if self.config.fan_in_fan_out and not transposed:
            raise UnsupportedModelError(
                f"fan_in_fan_out says that weights are stored [in, out], and this model's {module} is stored [out, in]"
            )
        return LoraTarget(module, to.path, down, up, rank, self.config.scale_of(module), slots)

    def _stored(self, module: str) -> tuple[int, ...]:
        """The shape of its weight in the model's checkpoint."""
        name = self.model.modules.get(self.model.canonical([module])[module])
        return () if name is None else self.model.checkpoint.tensors[name].shape

    def _slots(self, rows: int, columns: int, to: Destination) -> tuple[dict[str, torch.Tensor | None] | None, bool]:
        """The rows of each slot, if they can be told, and whether the checkpoint stores the weight transposed."""
        if to.transform is None:
            return {to.slot: None}, False
        found = self.model.rows(to.transform, rows, columns)
        return (None, False) if found is None else ({**found.slots}, found.transposed)

    def _check_complete(self, targets: list[LoraTarget]) -> None:
        """By places, not names: a module may have one name in files and another in transformers' memory."""
        found = {(target.path, slot) for target in targets for slot in target.slots}
        lacking = []
        for module, to in self.model.places.items():
            linear = self.model.linear(to.path)
            if linear is None:
                continue
            slots = [to.slot] if to.transform is None else linear.slots
            if not any((to.path, slot) in found for slot in slots) and self.config.targets(module):
                lacking.append(module)
        if lacking:
            raise CheckpointError(
                f"its files are not whole: {ADAPTER_CONFIG} targets {some(lacking)}, and there are no tensors for that"
            )

    def _check_copies(self, whole: Mapping[str, str]) -> None:
        """peft saves the embedding and the head beside their factors, or where they were resized: fine if unchanged."""
        canonical = self.model.canonical(whole)
        at = {to.path: self.model.modules[module] for module, to in self.model.places.items()} if whole else {}
        for module, tensor in whole.items():
            to = self.model.weights.find(f"{canonical[module]}.weight")
            path = None if to is None else to.path
            if path == "head.proj" and path not in self.model.layers:
                path = "embed.tokens"  # tied
            if path not in ("head.proj", "embed.tokens") or path not in at:
                raise CheckpointError(f"nothing in the model takes its tensor {tensor}")
            if not self.files.agrees(tensor, self.model.checkpoint, at[path]):
                mine, its = self.model.checkpoint.tensors[at[path]].shape, self.files.tensors[tensor].shape
                what = (
                    f"holds {its[0]} tokens and the model {mine[0]}: extra vocabulary"
                    if its[:1] != mine[:1]
                    else "differs from the model's: a retrained embedding or head"
                )
                raise UnsupportedModelError(f"its {tensor} {what}, which is not supported; merge it into the model")


def _untied(module: str, to: Destination | None) -> str:
    return f"{module} (tied to the embedding)" if to is not None and to.path == "head.proj" else module


def _is_expert(path: str) -> bool:
    """Numbered inside a numbered block: parts like these see the tokens routed to them alone."""
    return sum(part.isdigit() for part in path.split(".")) > 1
