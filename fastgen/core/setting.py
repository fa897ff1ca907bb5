"""What the time of a forward pass depends on: the shape of the model, its formats and kernels, the machine."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

import torch

from fastgen.config import EngineConfig
from fastgen.core.calibration import Setting
from fastgen.core.hf_config import read_raw_config
from fastgen.core.machine import processor
from fastgen.core.source import ModelFiles
from fastgen.kernels.cpu.library import library, unavailable
from fastgen.kernels.ops import KernelTable

__all__ = ["setting_of"]

_INDIFFERENT = {
    # where files come from, and who may use them; of adapters counts whether there are any
    *("revision", "token", "offline", "trust_remote_code", "load_bin", "adapter", "lora", "packed_cache"),
    # how much is kept, and who runs when
    *("max_sequences", "max_model_len", "num_blocks", "cache_memory", "prefix_caching"),
    *("policy", "queue_order", "seed"),
    # what is to be found out, and what a setting names in other words
    *("max_batch_tokens", "target_latency", "dtype", "device", "threads"),
}
"""Engine options that change nothing about the time of a pass."""
_NOT_SHAPE = {"transformers_version", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"}


def setting_of(
    files: ModelFiles,
    plugin: str,
    kernels: KernelTable,
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
) -> Setting:
    """What the time of a pass of this model depends on.

    Args:
        kernels: their choices made.
    """
    raw = {name: value for name, value in read_raw_config(files.directory).items() if name not in _NOT_SHAPE}
    shape = json.dumps([plugin, {name: raw[name] for name in raw if not name.startswith("_")}], sort_keys=True)
    chosen: dict[str, set[str]] = {}
    for choice in kernels.choices:
        chosen.setdefault(choice.need.operation, set()).add(choice.chosen)
    names = {operation: ", ".join(sorted(found)) for operation, found in sorted(chosen.items())}
    if device.type == "cpu" and unavailable() is None:
        names["instructions"] = library().level.name
    return Setting(
        model=files.name,
        shape=hashlib.sha256(shape.encode()).hexdigest()[:24],
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        kernels=names,
        threads=config.threads or torch.get_num_threads(),
        options=config.model_dump(mode="json", exclude=_INDIFFERENT),
        adapters=bool(config.lora),
        fastgen=version("fastgen"),
    )
