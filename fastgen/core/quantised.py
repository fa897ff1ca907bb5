"""Quantised checkpoints, told by any of the places that give them away: they are refused, never read as plain numbers.

A quantised file may say so in its config.json, in a file beside it, by the names of its tensors, or by their number
formats alone; each is enough. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastgen.core.dtypes import FLOATS
from fastgen.core.json_file import read_json_object
from fastgen.errors import UnsupportedModelError

__all__ = ["WAY_OUT", "quantised_tensor", "refuse_quantised", "refuse_quantised_beside"]

WAY_OUT = "use the unquantised checkpoint, the one that this was made from"

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
"""The last is that of MLX and TensorRT-LLM."""
_FILES = {
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "quantization_config.json": "AutoRound",
    "hf_quant_config.json": "ModelOpt",
    "quanto_qmap.json": "Quanto",
}
"""Files beside config.json that only quantised checkpoints have, and who writes them."""

_TENSORS = {
    "GPTQ or AWQ": r"qweight|qzeros|scales|g_idx",
    "FP8": r"weight_scale_inv|weight_scale|input_scale|activation_scale|k_scale|v_scale|output_scale",
    "compressed-tensors or NVFP4": r"weight_packed|weight_shape|weight_zero_point|weight_g_idx|weight_global_scale"
    r"|input_global_scale|weight_scale_2|input_zero_point",
    "bitsandbytes": r"SCB|weight_format|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)",
    "MXFP4": r".*_(blocks|scales)",
    "AQLM": r"codebooks",
    "VPTQ": r"centroids|res_centroids|outlier_centroids",
    "HQQ": r"W_q",
    "Quanto": r"weight\._data|weight\._scale|weight\._shift|weight\._scale_and_zero",
    "EXL2": r"q_weight|q_scale|q_scale_max|q_groups|q_invperm|q_perm",
    "MLX": r"biases",
    "HIGGS": r"tables2",
}
_NAMES = {kind: re.compile(rf"(?:.*\.)?(?:{pattern})") for kind, pattern in _TENSORS.items()}


def refuse_quantised(raw: Mapping[str, Any]) -> None:
    """Refuse a config.json that says that its weights are quantised.

    Raises:
        UnsupportedModelError: names the method and what to do.
    """
    for key in _CONFIG_KEYS:
        settings = raw.get(key)
        told = _told(settings) if isinstance(settings, dict) else repr(settings)
        if settings and told is not None:
            raise UnsupportedModelError(
                f"config.json: the weights are quantised ({key}, {told or 'of no known method'}), which is not "
                f"supported; {WAY_OUT}"
            )


def refuse_quantised_beside(directory: Path) -> None:
    """Refuse a model beside whose config.json another file says so.

    Raises:
        UnsupportedModelError: names the file, the method and what to do.
    """
    for name, writer in _FILES.items():
        if not (directory / name).is_file():
            continue
        told = _told(read_json_object(directory / name))
        if told is not None:
            raise UnsupportedModelError(
                f"{name} beside config.json says that the weights are quantised (by {writer}{told and ', '}{told}), "
                f"which is not supported; {WAY_OUT}. If they are not, remove that file"
            )


def _told(settings: Mapping[str, Any]) -> str | None:
    """What settings say of the method; empty where they name none; ``None`` where they quantise nothing, as those of
    ModelOpt may."""
    inner = settings.get("quantization")
    if isinstance(inner, dict):
        return _told(inner)
    names = ("quant_method", "quant_algo", "kv_cache_quant_algo", "method", "mode")
    if "quant_algo" in settings and not any(settings.get(name) for name in names):
        return None
    found = [f"method {settings[name]!r}" for name in names[:1] if settings.get(name)]
    found = found or [f"{name} {settings[name]!r}" for name in names[1:] if settings.get(name)][:1]
    found += [f"format {settings['format']!r}"] if isinstance(settings.get("format"), str) else []
    bits = next((settings[name] for name in ("bits", "w_bit") if settings.get(name)), None)
    return ", ".join(found) or ("" if bits is None else f"{bits} bits")


def quantised_tensor(dtypes: Mapping[str, str]) -> str | None:
    """What betrays a checkpoint whose config says nothing, if anything does.

    Args:
        dtypes: torch's name of each tensor's number format.

    Returns:
        A clause for a message, with the tensor's name and what it looks like.
    """
    for name in dtypes:
        for kind, pattern in _NAMES.items():
            if pattern.fullmatch(name):
                return f"it holds {name}, as weights quantised by {kind} do"
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            return f"{name} is stored as {dtype}, as quantised weights are"
    return None
