"""What is refused by its config or its parts, before any of its code runs; `probe` refuses the rest."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fastgen import api as fg
from fastgen_transformers.verified import differs

__all__ = ["refuse"]

_STATEFUL = ("conv", "linear", "mamba", "recurrent", "delta", "ssm", "rwkv")


def refuse(config: Any, cls: type[Any], model: Any = None) -> None:
    """Raise UnsupportedModelError for what cannot be served.

    Args:
        config: transformers' config of the language model.
        model: built of it, once that is possible.
    """
    reason = _reason(config, cls, model)
    if reason is not None:
        raise fg.UnsupportedModelError(f"{cls.__name__} cannot run over fastgen's paged cache: {reason}")


def _reason(config: Any, cls: type[Any], model: Any) -> str | None:
    if known := differs(cls.__name__):
        return known
    if getattr(config, "add_cross_attention", False):
        return "it attends to an encoder's output (add_cross_attention)"
    if "position_ids" not in inspect.signature(cls.forward).parameters:
        return "its forward pass takes no position_ids, so it would number tokens by itself"
    for kind in getattr(config, "layer_types", None) or ():
        if any(part in str(kind) for part in _STATEFUL):
            return f"its layers of the type {kind!r} keep a state of another kind than keys and values"
    for kind in _rope_types(config):
        if kind in ("dynamic", "longrope"):
            # transformers takes these from the longest sequence of the batch, so that batch mates would change it.
            return f"transformers chooses its {kind!r} rope by the longest sequence in the batch"
    for name, part in model.named_modules() if model is not None else ():
        if isinstance(part, (nn.Conv1d, nn.Conv2d)) and any(size > 1 for size in part.kernel_size):
            return f"its part {name} convolves over neighbouring tokens, and nobody would keep those between passes"
        if isinstance(part, (nn.LSTM, nn.GRU, nn.RNN)):
            return f"its part {name} is recurrent"
    return None


def _rope_types(config: Any) -> set[str]:
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)] or [settings]
    return {str(one.get("rope_type") or one.get("type") or "default") for one in nested}
