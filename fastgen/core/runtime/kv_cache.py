"""The blocked key-value cache: how large, and where."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from fastgen.config import EngineConfig, parse_bytes
from fastgen.core.containers import Decoder
from fastgen.errors import ConfigError
from fastgen.kernels.paging import LayerCache

__all__ = ["CachePlan", "KVCache", "plan_cache"]


@dataclass(frozen=True)
class CachePlan:
    """The size of a cache, and why."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    reason: str

    @property
    def tokens(self) -> int:
        """Tokens the cache can hold."""
        return self.num_blocks * self.block_size

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def plan_cache(
    model: Decoder, config: EngineConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> CachePlan:
    """Blocks for this model under these options.

    Raises:
        ConfigError: not even one block fits in the memory allowed.
    """
    size = config.block_size
    per_token = sum(a.kernel.bytes_per_token(a.cache_spec, dtype) for a in model.attentions())
    per_block = per_token * size
    if config.num_blocks is not None:
        return CachePlan(config.num_blocks, size, per_block, "num_blocks as asked")
    allowed, reason = _allowed_bytes(config, device)
    most = config.max_sequences * -(-max_model_len // size)
    blocks = allowed // per_block
    if blocks < 1:
        raise ConfigError(
            f"the KV cache has no room for one block of {size} tokens: it takes {per_block:,} bytes and {allowed:,} "
            f"are allowed ({reason}). Give more cache_memory, or free some memory."
        )
    if blocks > most:
        return CachePlan(most, size, per_block, f"all that {config.max_sequences} full-length sequences can use")
    return CachePlan(blocks, size, per_block, reason)


def free_memory(device: torch.device) -> int:
    """Bytes free on a device; on a CPU within the limit of the control group, if there is one."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = psutil.virtual_memory().available
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            free = min(free, max(0, int(limit.read()) - int(used.read())))
    except (OSError, ValueError):  # no control group, or no limit ("max")
        pass
    return free


def _allowed_bytes(config: EngineConfig, device: torch.device) -> tuple[int, str]:
    memory, free = config.cache_memory, free_memory(device)
    if isinstance(memory, str):
        asked = parse_bytes(memory)
        if asked > free:
            raise ConfigError(f"cache_memory: {memory} is more than the {free / 2**30:.1f} GiB that are free")
        return asked, f"cache_memory {memory}"
    if memory is None:
        memory = 0.4 if device.type == "cpu" else 0.9
    return int(free * memory), f"{memory:g} of the {free / 2**30:.1f} GiB free"


class KVCache:
    """Every attention layer's keys and values, in the layout of its kernel."""

    def __init__(self, model: Decoder, plan: CachePlan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self.layers: list[LayerCache] = [
            a.kernel.allocate(a.cache_spec, plan.num_blocks, plan.block_size, dtype, device) for a in model.attentions()
        ]
