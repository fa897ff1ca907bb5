"""What an attention kernel is told about one pass, and what it must offer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = ["CacheSpec", "LayerCache", "PagedAttention", "PagedLayout", "Scores"]

LayerCache = Any
"""One attention layer's keys and values, in whatever form its kernel allocated."""


@dataclass(frozen=True)
class CacheSpec:
    """What one attention layer keeps for each token: ``kv_heads`` keys of ``head_dim`` and values of ``value_dim``.

    With ``values_in_keys`` only keys are kept, and the first ``value_dim`` components of a key are its value, as in
    latent attention. ``kv_dtype``: the format they are kept in; ``"auto"``: the model's dtype.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    values_in_keys: bool = False
    kv_dtype: str = "auto"

    @property
    def width(self) -> int:
        """Numbers kept for one token."""
        return self.kv_heads * (self.head_dim + (0 if self.values_in_keys else self.value_dim))


@dataclass(frozen=True)
class Scores:
    """What becomes of ``query . key`` before the softmax: scaled, capped, biased, masked, in this order."""

    scale: float
    window: int | None = None
    """Tokens a query sees, itself included; ``None``: all before it."""
    softcap: float | None = None
    """``softcap * tanh(score / softcap)``."""
    slopes: tuple[float, ...] | None = None
    """ALiBi (Press et al., 2022): for each query head, what is added to the score for each position of the key. Only
    differences between keys matter to the softmax, so the query's own position need not be subtracted."""


@dataclass
class PagedLayout:
    """Where the tokens of one pass belong: to which sequence, at which place of the cache.

    Sequence ``s`` has the query rows ``starts[s] : starts[s] + counts[s]``; after them its context holds
    ``contexts[s]`` tokens, these included.

    The engine's tensors are views of buffers that stay at their address, with their row stride, as long as it lives; so
    a kernel may keep their pointers, and a pass may be replayed. What is in them holds until the next pass is built.
    """

    block_size: int
    starts: list[int]
    counts: list[int]
    contexts: list[int]
    block_table: torch.Tensor
    """``[sequences, blocks]`` int64 on the cache's device, each row contiguous, ``stride(0)`` apart; entries past a
    sequence's context are any valid block."""
    slots: torch.Tensor
    """``[tokens]`` int64: ``block * block_size + offset``, where each token's key and value are written."""
    memo: dict[Hashable, Any] = field(default_factory=dict)
    """For a kernel's own plan of the pass, made in the first layer and used in all."""
    spans: torch.Tensor = None  # type: ignore[assignment]
    """``[3, sequences]`` int64 on the cache's device: ``starts``, ``counts``, ``contexts``, each row contiguous,
    ``stride(0)`` apart. Made of the lists where it is not given."""

    def __post_init__(self) -> None:
        if self.spans is None:
            device = self.block_table.device
            self.spans = torch.tensor([self.starts, self.counts, self.contexts], dtype=torch.int64, device=device)


class PagedAttention(Protocol):
    """An implementation of the operation ``paged_attention``.

    One that can keep keys and values in other formats than the model's dtype names all it knows in an attribute,
    ``kv_dtypes = ("auto", "int8")``, and finds the one wanted in the ``CacheSpec``, and in the need where it is not
    ``"auto"``.
    """

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
        value: torch.Tensor | None,
        cache: LayerCache,
        layout: PagedLayout,
        scores: Scores,
    ) -> torch.Tensor:
        """Write ``key`` ``[tokens, kv_heads, head_dim]`` and ``value`` ``[tokens, kv_heads, value_dim]`` (``None``
        where the keys hold the values) to their slots, then attend causally.

        Returns:
            ``[tokens, heads, value_dim]``, for ``query`` ``[tokens, heads, head_dim]``.
        """
