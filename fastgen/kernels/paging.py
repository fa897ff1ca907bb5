"""What an attention kernel is told about one pass, and what it must offer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = ["CacheSpec", "LayerCache", "PagedAttention", "PagedLayout"]

LayerCache = Any
"""One attention layer's keys and values, in whatever form its kernel allocated."""


@dataclass(frozen=True)
class CacheSpec:
    """What one attention layer keeps for each token: ``kv_heads`` keys and values of ``head_dim``."""

    kv_heads: int
    head_dim: int


@dataclass
class PagedLayout:
    """Where the tokens of one pass belong: to which sequence, at which place of the cache.

    Sequence ``s`` has the query rows ``starts[s] : starts[s] + counts[s]``; after them its context holds
    ``contexts[s]`` tokens, these included.
    """

    block_size: int
    starts: list[int]
    counts: list[int]
    contexts: list[int]
    block_table: torch.Tensor
    """``[sequences, blocks]`` int64 on the cache's device; entries past a sequence's context are any valid block."""
    slots: torch.Tensor
    """``[tokens]`` int64: ``block * block_size + offset``, where each token's key and value are written."""
    memo: dict[str, Any] = field(default_factory=dict)
    """For a kernel's own plan of the pass, made in the first layer and used in all."""


class PagedAttention(Protocol):
    """An implementation of the operation ``paged_attention``."""

    def bytes_per_token(self, spec: CacheSpec, dtype: torch.dtype) -> int:
        """Bytes of cache one token takes in one layer."""

    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """A layer's cache, every value finite (memory is touched only when it is used, where the platform allows)."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        layout: PagedLayout,
        scale: float,
    ) -> torch.Tensor:
        """Write ``key`` and ``value`` (``[tokens, kv_heads, head_dim]``) to their slots, then attend causally.

        Returns:
            ``[tokens, heads, head_dim]``, for ``query`` of the same shape.
        """
