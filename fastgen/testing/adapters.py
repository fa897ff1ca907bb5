"""Random LoRA adapters in peft's layout, large enough to change what a tiny model says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["lora_factors", "random_lora"]

SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
    "use_rslora": False,
}
"""What peft writes besides the rank, the alpha and the modules."""


def random_lora(
    directory: str | Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    ranks: Mapping[str, int] | None = None,
    seed: int = 0,
    extra: Mapping[str, torch.Tensor] | None = None,
    **settings: Any,
) -> Path:
    """Save an adapter with random factors.

    Args:
        modules: ``(out, in)`` of each module to change, by its full name: ``model.layers.0.self_attn.q_proj``.
        ranks: the rank of modules, by full name, that have another one (state it in ``rank_pattern`` too).
        extra: tensors to put beside the factors, by their names in the file.
        settings: fields of ``adapter_config.json``, laid over the usual ones.

    Returns:
        The directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for module, (out, width) in modules.items():
        r = (ranks or {}).get(module, rank)
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(r, width, generator=generator) / width**0.5
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, r, generator=generator) / 2
    save_file({**tensors, **(extra or {})}, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {**SETTINGS, "r": rank, "lora_alpha": alpha, "target_modules": sorted(modules), **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return directory


def lora_factors(directory: str | Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """``A [r, in]`` and ``B [out, r]`` of each module of a saved adapter."""

    tensors = load_file(Path(directory) / "adapter_model.safetensors")
    prefix, end = "base_model.model.", ".lora_A.weight"
    modules = [name.removeprefix(prefix).removesuffix(end) for name in tensors if name.endswith(end)]
    return {m: (tensors[f"{prefix}{m}{end}"], tensors[f"{prefix}{m}.lora_B.weight"]) for m in modules}
