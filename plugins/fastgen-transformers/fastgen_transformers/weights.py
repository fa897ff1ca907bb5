"""Which tensors of a checkpoint fill which of a transformers model's, by transformers' own renamings and conversions
(per-expert matrices that it keeps stacked, say), decided from names and shapes before anything is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from fastgen import api as fg

__all__ = ["Matching"]

# Recomputed by every model that has them, and left out by transformers whatever the class says.
_RECOMPUTED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")


class Matching:
    """How the names of a checkpoint map to those of a model.

    Args:
        model: the transformers model, on any device.
    """

    def __init__(self, model: Any) -> None:
        mapping = get_model_conversion_mapping(model)
        self._model = model
        self._state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]

    def target(self, name: str) -> tuple[str, str | None]:
        """The model's tensor that this one of the checkpoint becomes, maybe with others (or a name that the model does
        not have), and the pattern of the conversion, if there is one."""
        prefix, state = self._model.base_model_prefix, self._state
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        return target, pattern

    def convert(self, target: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the tensors of the checkpoint that belong to ``target`` become, by the model's names."""
        patterns = {name: self.target(name)[1] for name in sorted(tensors, key=dot_natural_key)}
        first = next(iter(patterns.values()))
        if first is None:
            (tensor,) = tensors.values()
            return {target: tensor}
        converter = deepcopy(next(one for one in self._converters if first in one.source_patterns))
        for name, pattern in patterns.items():
            converter.add_tensor(target, name, pattern, tensors[name])
        made = converter.convert(target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Match a whole checkpoint, both ways.

        Returns:
            For each of its tensors that is used, how many make up a parameter together, itself included.

        Raises:
            CheckpointError: tensors that nothing takes, parameters that nothing fills, shapes that do not fit.
        """
        groups, unclaimed = self._groups(shapes)
        missing, misfits = set(self._state), []
        for target, names in groups.items():
            try:
                made = self.convert(target, {name: torch.empty(shapes[name], device="meta") for name in names})
            except Exception as error:  # transformers' own: these do not go together
                misfits.append(f"{fg.some(sorted(names))} do not make a {target} ({error})")
                missing.discard(target)
                continue
            for name, tensor in made.items():
                if name not in missing:
                    again = f" (fills {name} a second time)" if name in self._state else f" (becomes {name})"
                    unclaimed.append(fg.some(sorted(names)) + again)
                elif list(tensor.shape) != (wanted := list(self._state[name])):
                    misfits.append(f"{fg.some(sorted(names))} gives {list(tensor.shape)}, the model wants {wanted}")
                missing.discard(name)
        _complain(unclaimed, sorted(_needed(self._model, missing)), misfits)
        return {name: len(names) for names in groups.values() for name in names}

    def _groups(self, names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Names by their target, and those that have none."""
        ignored = [*_RECOMPUTED, *(self._model._keys_to_ignore_on_load_unexpected or ())]
        groups: dict[str, list[str]] = {}
        unclaimed = []
        for name in names:
            target, pattern = self.target(name)
            if target not in self._state:
                if not any(re.search(one, target) for one in ignored):
                    unclaimed.append(name)
            elif pattern is None and target in groups:
                unclaimed.append(f"{name} (fills {target} a second time)")
            else:
                groups.setdefault(target, []).append(name)
        return groups, unclaimed


def _needed(model: Any, missing: set[str]) -> set[str]:
    """Of what no tensor fills: all but what is tied to something that one does, and buffers that the class computes."""
    optional = [*_RECOMPUTED, *(model._keys_to_ignore_on_load_missing or ())]
    buffers = {name for name, _ in model.named_buffers()}
    left = {n for n in missing if not (n in buffers and any(re.search(one, n) for one in optional))}
    same: dict[int, set[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        same.setdefault(id(tensor), set()).add(name)
    filled = [names for names in same.values() if names - missing]
    return left - set().union(*filled)


def _complain(unclaimed: list[str], unfilled: list[str], misfits: list[str]) -> None:
    problems = []
    if unclaimed:
        problems.append(f"tensors that nothing in the model takes: {fg.some(sorted(unclaimed))}")
    if unfilled:
        problems.append(f"parts of the model that no tensor fills: {fg.some(sorted(unfilled))}")
    if misfits:
        problems.append(f"shapes that do not fit: {fg.some(sorted(misfits))}")
    if problems:
        raise fg.CheckpointError(
            f"the checkpoint does not fit transformers' class for its config: {'; '.join(problems)}. "
            "Check that config.json belongs to these weights."
        )
