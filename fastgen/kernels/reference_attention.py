"""Ragged attention over a blocked cache (PagedAttention, Kwon et al., 2023) in plain torch.

Sequences that run one token are gathered in groups of similar length and attended in one call a group; a sequence that
runs more (a piece of a prompt) is attended by itself. The gathers go to buffers that live as long as the kernel:
fresh memory for each would cost more in page faults than the copying does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fastgen.kernels.paging import CacheSpec, PagedLayout

__all__ = ["TorchPagedAttention"]

_WASTE = 0.2  # a group's padding, as a share of its gathered blocks
_GROUP_TOKENS = 16384  # gathered tokens of a group: bounds the buffers


@dataclass
class _Decodes:
    """Sequences of one query row each, attended in one call."""

    rows: torch.Tensor  # [group] int64: their rows in the pass
    blocks: torch.Tensor  # [group * width] int64
    padding: torch.Tensor  # int64: places in the gathered [group * width * block_size] past each context
    mask: torch.Tensor  # [group, 1, 1, width * block_size]: 0, or -inf past the context


@dataclass
class _Chunk:
    """Query rows ``first : last`` of one sequence, the last of which sees ``context`` tokens."""

    first: int
    last: int
    context: int
    blocks: torch.Tensor  # [blocks] int64
    mask: torch.Tensor | None  # [rows, context], or None where the rows are the whole context


class TorchPagedAttention:
    """Keys and values lie as ``[num_blocks, block_size, kv_heads, head_dim]``."""

    def __init__(self) -> None:
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def bytes_per_token(self, spec: CacheSpec, dtype: torch.dtype) -> int:
        return 2 * spec.kv_heads * spec.head_dim * dtype.itemsize

    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (num_blocks, block_size, spec.kv_heads, spec.head_dim)
        return _zeros(shape, dtype, device), _zeros(shape, dtype, device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        layout: PagedLayout,
        scale: float,
    ) -> torch.Tensor:
        keys, values = cache
        keys.flatten(0, 1).index_copy_(0, layout.slots, key)
        values.flatten(0, 1).index_copy_(0, layout.slots, value)
        work = layout.memo.get("torch")
        if work is None:
            work = layout.memo["torch"] = _plan(layout, query.dtype)
        out = torch.empty_like(query)
        for one in work:
            if isinstance(one, _Decodes):
                self._decode(one, query, keys, values, scale, out)
            else:
                self._chunk(one, query, keys, values, scale, out)
        return out

    def _decode(
        self,
        group: _Decodes,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        count, (heads, dim), kv_heads = len(group.rows), query.shape[1:], keys.shape[2]
        k, v = self._gather(keys, values, group.blocks)
        # Masked places may hold whatever an earlier owner left, NaN included, and NaN times zero is NaN.
        k.flatten(0, 1).index_fill_(0, group.padding, 0)
        v.flatten(0, 1).index_fill_(0, group.padding, 0)
        k, v = (t.view(count, -1, kv_heads, dim).transpose(1, 2) for t in (k, v))
        # The heads that share a key are the rows of one small matrix: no copy of keys for each.
        q = query.index_select(0, group.rows).view(count, kv_heads, heads // kv_heads, dim)
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
        out.index_copy_(0, group.rows, result.reshape(count, heads, dim))

    def _chunk(
        self,
        chunk: _Chunk,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        k, v = (t.flatten(0, 1)[: chunk.context] for t in self._gather(keys, values, chunk.blocks))
        q = query[chunk.first : chunk.last].transpose(0, 1).unsqueeze(0)
        k, v = (t.transpose(0, 1).unsqueeze(0) for t in (k, v))
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scale, enable_gqa=True
        )
        out[chunk.first : chunk.last] = result[0].transpose(0, 1)

    def _gather(
        self, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of both, ``[len(blocks), block_size, kv_heads, head_dim]``, in the kernel's buffers."""
        size = len(blocks) * keys[0].numel()
        held = self._buffers
        if held is None or held[0].numel() < size or held[0].dtype != keys.dtype or held[0].device != keys.device:
            held = self._buffers = (keys.new_empty(size), keys.new_empty(size))
        shape = (len(blocks), *keys.shape[1:])
        k, v = held[0][:size].view(shape), held[1][:size].view(shape)
        torch.index_select(keys, 0, blocks, out=k)
        torch.index_select(values, 0, blocks, out=v)
        return k, v


def _plan(layout: PagedLayout, dtype: torch.dtype) -> list[_Decodes | _Chunk]:
    """The pass as a list of calls, the same in every layer."""
    size = layout.block_size
    work: list[_Decodes | _Chunk] = []
    singles: list[tuple[int, int]] = []
    for s, (start, count, context) in enumerate(zip(layout.starts, layout.counts, layout.contexts, strict=True)):
        if count == 1:
            singles.append((-(-context // size), s))
            continue
        blocks = layout.block_table[s, : -(-context // size)]
        mask = None if count == context else _causal(count, context, dtype, blocks.device)
        work.append(_Chunk(start, start + count, context, blocks, mask))
    singles.sort(reverse=True)
    while singles:
        group = _take_group(singles, size)
        del singles[: len(group)]
        work.append(_decodes(layout, [s for _, s in group], group[0][0], dtype))
    return work


def _take_group(singles: list[tuple[int, int]], block_size: int) -> list[tuple[int, int]]:
    """The longest head of ``(blocks, sequence)`` pairs, longest first, that wastes little as one padded call."""
    width, used = singles[0][0], 0
    for n, (blocks, _) in enumerate(singles, 1):
        used += blocks
        if n > 1 and (used < (1 - _WASTE) * n * width or n * width * block_size > _GROUP_TOKENS):
            return singles[: n - 1]
    return list(singles)


def _decodes(layout: PagedLayout, sequences: list[int], width: int, dtype: torch.dtype) -> _Decodes:
    device = layout.block_table.device
    chosen = torch.tensor(sequences, device=device)
    contexts = torch.tensor([layout.contexts[s] for s in sequences], device=device)
    rows = torch.tensor([layout.starts[s] for s in sequences], device=device)
    past = torch.arange(width * layout.block_size, device=device) >= contexts[:, None]
    mask = torch.zeros(past.shape, dtype=dtype, device=device).masked_fill_(past, float("-inf"))
    blocks = layout.block_table[chosen, :width].flatten()
    return _Decodes(rows, blocks, past.flatten().nonzero().flatten(), mask[:, None, None])


def _causal(count: int, context: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[count, context]``: row i, of the last ``count`` of ``context``, sees all up to itself."""
    mask = torch.full((count, context), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(context - count + 1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU straight from the system, which hands out zero pages on first touch."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    import numpy as np

    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
