"""What an adapter says of itself: peft's ``adapter_config.json``. No torch here.

Semantics are those of peft's ``LoraConfig``, ``get_pattern_key`` and ``check_target_module_exists``. A setting that
changes the maths and is not done here is refused by its name; so is one that is not known at all.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgen.core.hub import ADAPTER_CONFIG
from fastgen.core.json_file import read_json_object
from fastgen.errors import CheckpointError, UnsupportedModelError

__all__ = ["AdapterConfig", "read_adapter_config"]

_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "init_lora_weights",
    "bias",
    "base_model_name_or_path",
}
_ABOUT_TRAINING = {
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
_NOT_DONE = {
    "alora_invocation_tokens": "it acts only after certain tokens of the prompt",
    "arrow_config": "it mixes several adapters by a router of its own",
    "kasa_config": "it puts a diagonal between its two factors",
    "layer_replication": "it repeats layers of the model",
    "lora_bias": "it has biases of its own",
    "modules_to_save": "it brings whole retrained modules along",
    "monteclora_config": "it draws its weights at random",
    "target_parameters": "it changes parameters that are not linear modules",
    "trainable_token_indices": "it retrains rows of the embedding",
    "use_bdlora": "its factors are block-diagonal",
    "use_dora": "it rescales the model's own weights (DoRA)",
    "use_qalora": "it pools its inputs (QA-LoRA)",
    "velora_config": "it brings projections of its training along (VeLoRA)",
}
_MERGE = "merge it into the model with peft's merge_and_unload, and serve that"

_KEEPS_THE_BASE = {"gaussian", "eva", "orthogonal", "mica"}
"""Ways to begin training that leave the model's weights as they are. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA)
subtract something from them, so that what was trained does not fit the unchanged model."""


@dataclass(frozen=True)
class AdapterConfig:
    """One adapter's settings, checked. Modules go by their names in the model, ``model.layers.0.self_attn.q_proj``."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    """By pattern, where they differ from ``rank``."""
    alphas: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    fan_in_fan_out: bool
    base_model: str | None

    def rank_of(self, module: str) -> int:
        """The rank its factors have for this module."""
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What the product of its factors is multiplied by: ``alpha / r``, for rsLoRA (Kalajdzievski, 2023)
        ``alpha / sqrt(r)``, each with the module's own alpha and rank."""
        rank = self.rank_of(module)
        return float(_by_pattern(self.alphas, module, self.alpha)) / (math.sqrt(rank) if self.rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether the adapter was trained on this module."""
        if _names(self.exclude_modules, module) or not _names(self.target_modules, module):
            return False
        if self.layers is None or isinstance(self.target_modules, str) or module in self.target_modules:
            return True
        patterns = [rf"(?:^|.*?\.){p}\.(\d+)\." for p in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next(filter(None, (re.match(pattern, module) for pattern in patterns)), None)
        return found is not None and int(found[1]) in self.layers


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The first pattern that is the module's name or the end of it, from a dot on."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _names(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """The settings of the adapter in ``directory``.

    Raises:
        CheckpointError: there is no such file, or a value in it is not one.
        UnsupportedModelError: it asks for something that is not done here, which the message names.
    """
    raw = read_json_object(directory / ADAPTER_CONFIG, error=CheckpointError)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"its peft_type is {kind!r}, and only LORA is supported; {_MERGE}")
    _refuse_what_is_not_done(raw)
    base, layers = raw.get("base_model_name_or_path"), raw.get("layers_to_transform")
    if not (layers is None or _is_count(layers) or (isinstance(layers, list) and all(map(_is_count, layers)))):
        raise _wrong("layers_to_transform", layers, "a layer's number or a list of them")
    return AdapterConfig(
        rank=_rank("r", raw.get("r")),
        alpha=_number("lora_alpha", raw.get("lora_alpha")),
        rslora=_switch(raw, "use_rslora"),
        ranks={key: _rank(f"rank_pattern[{key!r}]", value) for key, value in _patterns(raw, "rank_pattern").items()},
        alphas={
            key: _number(f"alpha_pattern[{key!r}]", value) for key, value in _patterns(raw, "alpha_pattern").items()
        },
        target_modules=_modules(raw, "target_modules"),
        exclude_modules=_modules(raw, "exclude_modules") or (),
        layers=frozenset([layers] if isinstance(layers, int) else layers) if layers not in (None, []) else None,
        layers_pattern=_strings(raw, "layers_pattern"),
        fan_in_fan_out=_switch(raw, "fan_in_fan_out"),
        base_model=base if isinstance(base, str) and base else None,
    )


def _refuse_what_is_not_done(raw: Mapping[str, Any]) -> None:
    for key, value in raw.items():
        if key in _READ or key in _ABOUT_TRAINING or not value:
            continue
        if key not in _NOT_DONE:
            raise UnsupportedModelError(
                f"{ADAPTER_CONFIG} sets {key} to {_short(value)}, which fastgen does not know, so it may change the "
                "answers. If it only speaks of training, take it out of the file"
            )
        raise UnsupportedModelError(f"{key} is {_short(value)}: {_NOT_DONE[key]}, which is not supported; {_MERGE}")
    if raw.get("bias") not in (None, "none"):
        raise UnsupportedModelError(
            f"bias is {raw['bias']!r}: it retrains the model's biases, which is not supported; {_MERGE}"
        )
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _KEEPS_THE_BASE:
        raise UnsupportedModelError(
            f"init_lora_weights is {init!r}: that changed the model's weights before the training, and it does not fit "
            f"the original ones; save it with peft's path_initial_model_for_weight_conversion, or {_MERGE}"
        )


def _patterns(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    patterns = raw.get(key) or {}
    if not isinstance(patterns, dict):
        raise _wrong(key, patterns, "an object of patterns and numbers")
    for pattern in patterns:
        _check_pattern(key, pattern)
    return patterns


def _modules(raw: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    """A regular expression for whole names, or the ends of names."""
    value = raw.get(key)
    if isinstance(value, str):
        _check_pattern(key, value)
        return () if value == "all-linear" else value  # peft writes down what this came to; someone did not
    return _strings(raw, key)


def _strings(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = raw.get(key) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong(key, value, "a list of names")
    return tuple(value)


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{ADAPTER_CONFIG}: {key} holds {pattern!r}, no regular expression ({error})") from None


def _switch(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key) or False
    if type(value) is not bool:
        raise _wrong(key, value, "true or false")
    return value


def _rank(key: str, value: Any) -> int:
    if not _is_count(value) or value == 0:
        raise _wrong(key, value, "a whole number above 0")
    return int(value)


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise _wrong(key, value, "a number")
    return float(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _wrong(key: str, value: Any, wanted: str) -> CheckpointError:
    return CheckpointError(f"{ADAPTER_CONFIG}: {key} is {_short(value)}, not {wanted}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
