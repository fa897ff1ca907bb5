"""The blocked key-value cache: how large, and where."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastgen.config import EngineConfig, parse_bytes
from fastgen.core.containers import Decoder
from fastgen.core.memory import available_memory
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
    model: Decoder,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int,
    weight_bytes: int,
) -> CachePlan:
    """Blocks for this model under these options.

    Args:
        weight_bytes: of the memory that is free now, this much the weights will take.

    Raises:
        ConfigError: not even one block fits in the memory allowed, or more was asked for than there is.
    """
    size = config.block_size
    per_token = sum(a.kernel.bytes_per_token(a.cache_spec, dtype) for a in model.attentions())
    per_block = per_token * size
    note = "" if config.kv_dtype == "auto" else f"; keys and values in {config.kv_dtype}"
    free = max(0, available_memory(device) - weight_bytes)
    if config.num_blocks is not None:
        if config.num_blocks * per_block > free:
            raise ConfigError(
                f"num_blocks: {config.num_blocks} blocks take {_gib(config.num_blocks * per_block)}, and beside the "
                f"weights {_gib(free)} are free: room for {free // per_block} blocks"
            )
        return CachePlan(config.num_blocks, size, per_block, f"num_blocks as asked{note}")
    allowed, reason = _allowed_bytes(config.cache_memory, free, device)
    most = config.max_sequences * -(-max_model_len // size)
    blocks = allowed // per_block
    if blocks < 1:
        raise ConfigError(
            f"the KV cache has no room for one block of {size} tokens: it takes {per_block:,} bytes and {allowed:,} "
            f"are allowed ({reason}). Give more cache_memory, or free some memory."
        )
    if blocks > most:
        reason = f"all that {config.max_sequences} full-length sequences can use"
        return CachePlan(most, size, per_block, f"{reason}{note}")
    return CachePlan(blocks, size, per_block, f"{reason}{note}")


def _allowed_bytes(memory: float | str | None, free: int, device: torch.device) -> tuple[int, str]:
    if isinstance(memory, str):
        asked = parse_bytes(memory)
        if asked > free:
            raise ConfigError(f"cache_memory: {memory} is more than the {_gib(free)} that are free beside the weights")
        return asked, f"cache_memory {memory}"
    if memory is None:
        memory = 0.4 if device.type == "cpu" else 0.9
    return int(free * memory), f"{memory:g} of the {_gib(free)} free beside the weights"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


class KVCache:
    """Every attention layer's keys and values, in the layout of its kernel."""

    def __init__(self, model: Decoder, plan: CachePlan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self.layers: list[LayerCache] = [
            a.kernel.allocate(a.cache_spec, plan.num_blocks, plan.block_size, dtype, device) for a in model.attentions()
        ]
