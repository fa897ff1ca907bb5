"""Ragged attention over a blocked cache (PagedAttention, Kwon et al., 2023) in plain torch.

Sequences that run one token are gathered in groups of similar length and attended in one call a group; a sequence that
runs more (a piece of a prompt) is attended by itself. The gathers go to buffers that live as long as the kernel:
fresh memory for each would cost more in page faults than the copying does. Under a window only the blocks that some
query can see are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fastgen.kernels import kv_int8
from fastgen.kernels.paging import CacheSpec, PagedLayout, Scores

__all__ = ["TorchPagedAttention"]

_WASTE = 0.2  # a group's padding, as a share of its gathered blocks
_GROUP_TOKENS = 16384  # gathered tokens of a group: bounds the buffers
_SCORES = 2**23  # scores computed at once where torch has no fused attention: bounds their memory


class _Pages(NamedTuple):
    """One layer's cache."""

    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    values: torch.Tensor | None  # [num_blocks, block_size, kv_heads, value_dim]; None: the keys hold them
    value_dim: int
    key_scales: torch.Tensor | None = None  # [num_blocks, block_size, kv_heads, groups], where 8 bits are kept
    value_scales: torch.Tensor | None = None


@dataclass
class _Decodes:
    """Sequences of one query row each, attended in one call."""

    rows: torch.Tensor  # [group] int64: their rows in the pass
    blocks: torch.Tensor  # [group * width] int64
    padding: torch.Tensor  # int64: places in the gathered [group * width * block_size] that hold no token seen
    mask: torch.Tensor  # [group, 1 or heads, width * block_size]: 0 or a bias, and -inf where nothing is seen


@dataclass
class _Chunk:
    """Query rows ``first : last`` of one sequence, and the ``context`` tokens from the first of ``blocks`` on."""

    first: int
    last: int
    context: int
    blocks: torch.Tensor  # [blocks] int64
    mask: torch.Tensor | None  # [rows, context]; None where causal is all there is to say, or scores are biased


class TorchPagedAttention:
    """Keys and values lie as ``[num_blocks, block_size, kv_heads, head_dim or value_dim]``."""

    kv_dtypes = ("auto", "int8")

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def bytes_per_token(self, spec: CacheSpec, dtype: torch.dtype) -> int:
        return kv_int8.bytes_per_token(spec) if spec.kv_dtype == "int8" else spec.width * dtype.itemsize

    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> _Pages:
        shape = (num_blocks, block_size, spec.kv_heads)
        kept = torch.int8 if spec.kv_dtype == "int8" else dtype
        keys = _zeros((*shape, spec.head_dim), kept, device)
        values = None if spec.values_in_keys else _zeros((*shape, spec.value_dim), kept, device)
        if kept == dtype:
            return _Pages(keys, values, spec.value_dim)
        key_scales = _zeros((*shape, kv_int8.groups(spec.head_dim, kv_int8.KEY_GROUP)), torch.bfloat16, device)
        per_value = kv_int8.groups(spec.value_dim, kv_int8.VALUE_GROUP)
        value_scales = None if values is None else _zeros((*shape, per_value), torch.bfloat16, device)
        return _Pages(keys, values, spec.value_dim, key_scales, value_scales)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        cache: _Pages,
        layout: PagedLayout,
        scores: Scores,
    ) -> torch.Tensor:
        _write(key, layout.slots, cache.keys, cache.key_scales, kv_int8.KEY_GROUP)
        if cache.values is not None:
            assert value is not None
            _write(value, layout.slots, cache.values, cache.value_scales, kv_int8.VALUE_GROUP)
        # All that the plan depends on: of the cap and the scale, how far torch's own attention serves them.
        plan_key = ("torch", scores.window, scores.slopes, scores.softcap is None, scores.scale > 0)
        work = layout.memo.get(plan_key)
        if work is None:
            work = layout.memo[plan_key] = _plan(layout, scores, query.dtype)
        out = query.new_empty(*query.shape[:2], cache.value_dim)
        for one in work:
            if isinstance(one, _Decodes):
                self._decode(one, query, cache, scores, out)
            else:
                self._chunk(one, query, cache, scores, out)
        return out

    def _decode(self, group: _Decodes, query: torch.Tensor, cache: _Pages, scores: Scores, out: torch.Tensor) -> None:
        count, (heads, dim), kv_heads = len(group.rows), query.shape[1:], cache.keys.shape[2]
        # Masked places may hold whatever an earlier owner left, NaN included, and NaN times zero is NaN.
        k, v = self._gather(cache, group.blocks, query.dtype, group.padding)
        k, v = (t.view(count, -1, kv_heads, t.shape[-1]).transpose(1, 2) for t in (k, v))
        # The heads that share a key are the rows of one small matrix: no copy of keys for each.
        q = query.index_select(0, group.rows).view(count, kv_heads, heads // kv_heads, dim)
        mask = group.mask
        mask = mask[:, None] if mask.shape[1] == 1 else mask.view(count, kv_heads, heads // kv_heads, -1)
        if scores.softcap is None:
            result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale)
        else:
            q, k, v = q.float(), k.float(), v.float()
            result = (_weigh(q @ k.transpose(-1, -2), mask, scores) @ v).to(out.dtype)
        out.index_copy_(0, group.rows, result.reshape(count, heads, -1))

    def _chunk(self, chunk: _Chunk, query: torch.Tensor, cache: _Pages, scores: Scores, out: torch.Tensor) -> None:
        k, v = (t[: chunk.context] for t in self._gather(cache, chunk.blocks, query.dtype))
        q = query[chunk.first : chunk.last]
        if scores.softcap is not None or scores.slopes is not None or k.shape[2] != v.shape[2]:
            out[chunk.first : chunk.last] = _attend_in_slices(q, k, v, scores)
            return
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        result = F.scaled_dot_product_attention(
            q, k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scores.scale, enable_gqa=True
        )
        out[chunk.first : chunk.last] = result[0].transpose(0, 1)

    def _gather(
        self, cache: _Pages, blocks: torch.Tensor, dtype: torch.dtype, padding: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of both, ``[tokens, kv_heads, ...]``, mostly in the kernel's buffers; zeros at ``padding``."""
        k = self._numbers("keys", cache.keys, cache.key_scales, blocks, dtype, padding)
        if cache.values is None:
            return k, k[..., : cache.value_dim]
        return k, self._numbers("values", cache.values, cache.value_scales, blocks, dtype, padding)

    def _numbers(
        self,
        name: str,
        pages: torch.Tensor,
        scales: torch.Tensor | None,
        blocks: torch.Tensor,
        dtype: torch.dtype,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        found = self._fetch(name, pages, blocks)
        if scales is not None:
            group = kv_int8.KEY_GROUP if name == "keys" else kv_int8.VALUE_GROUP
            found = kv_int8.dequantise(found, self._fetch(f"{name}' scales", scales, blocks), group, dtype)
        return found if padding is None else found.index_fill_(0, padding, 0)

    def _fetch(self, name: str, pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        size = len(blocks) * pages[0].numel()
        held = self._buffers.get(name)
        if held is None or held.numel() < size or held.dtype != pages.dtype or held.device != pages.device:
            held = self._buffers[name] = pages.new_empty(size)
        found = held[:size].view(len(blocks), *pages.shape[1:])
        torch.index_select(pages, 0, blocks, out=found)
        return found.flatten(0, 1)


def _write(x: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor, scales: torch.Tensor | None, group: int) -> None:
    """``x [tokens, kv_heads, dim]`` to its slots."""
    if scales is not None:
        x, steps = kv_int8.quantise(x, group)
        scales.flatten(0, 1).index_copy_(0, slots, steps)
    pages.flatten(0, 1).index_copy_(0, slots, x)


def _attend_in_slices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
    """``q [rows, heads, dim]``, the last of the context of ``k`` and ``v [context, kv_heads, ...]``; a few rows at a
    time, because torch would hold all scores at once (and, for groups of heads, the keys once for each). In float32."""
    (rows, heads), (context, kv_heads) = q.shape[:2], k.shape[:2]
    k, v = k.transpose(0, 1).float(), v.transpose(0, 1).float()
    out = q.new_empty(rows, heads, v.shape[2])
    step = max(1, _SCORES // (heads * context))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        some = q[first:last].transpose(0, 1).float().reshape(kv_heads, -1, q.shape[2])
        found = (some @ k.transpose(1, 2)).view(heads, last - first, context)
        weights = _weigh(found, _bias(context - rows + first, context - rows + last, context, scores, found), scores)
        mixed = weights.view(kv_heads, -1, context) @ v
        out[first:last] = mixed.view(heads, last - first, -1).transpose(0, 1)
    return out


def _weigh(products: torch.Tensor, mask: torch.Tensor, scores: Scores) -> torch.Tensor:
    """The weights of the values, from ``query . key``, which is overwritten."""
    if scores.softcap is None:
        products *= scores.scale
    else:
        products.mul_(scores.scale / scores.softcap).tanh_().mul_(scores.softcap)
    products += mask
    return products.softmax(-1)


def _plan(layout: PagedLayout, scores: Scores, dtype: torch.dtype) -> list[_Decodes | _Chunk]:
    """The pass as a list of calls, the same in every layer with these scores."""
    size = layout.block_size
    work: list[_Decodes | _Chunk] = []
    singles: list[tuple[int, int]] = []
    for s, (start, count, context) in enumerate(zip(layout.starts, layout.counts, layout.contexts, strict=True)):
        first = _first_block(context - count, scores.window, size)
        last = -(-context // size)
        if count == 1:
            singles.append((last - first, s))
            continue
        blocks, seen = layout.block_table[s, first:last], context - first * size
        # torch masks before it scales, so that a scale of 0 or below would turn its -inf into what counts.
        whole = count == seen and (scores.window is None or count <= scores.window) and scores.scale > 0
        by_hand = scores.softcap is not None or scores.slopes is not None
        like = layout.block_table.new_empty(0, dtype=dtype)
        mask = None if whole or by_hand else _bias(seen - count, seen, seen, scores, like)[0]
        work.append(_Chunk(start, start + count, seen, blocks, mask))
    singles.sort(reverse=True)
    while singles:
        group = _take_group(singles, size)
        del singles[: len(group)]
        work.append(_decodes(layout, [s for _, s in group], group[0][0], scores, dtype))
    return work


def _first_block(position: int, window: int | None, block_size: int) -> int:
    """The block of the first token that the query at ``position`` sees."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def _take_group(singles: list[tuple[int, int]], block_size: int) -> list[tuple[int, int]]:
    """The longest head of ``(blocks, sequence)`` pairs, longest first, that wastes little as one padded call."""
    width, used = singles[0][0], 0
    for n, (blocks, _) in enumerate(singles, 1):
        used += blocks
        if n > 1 and (used < (1 - _WASTE) * n * width or n * width * block_size > _GROUP_TOKENS):
            return singles[: n - 1]
    return list(singles)


def _decodes(layout: PagedLayout, sequences: list[int], width: int, scores: Scores, dtype: torch.dtype) -> _Decodes:
    device, size = layout.block_table.device, layout.block_size
    chosen = torch.tensor(sequences, device=device)
    rows = torch.tensor([layout.starts[s] for s in sequences], device=device)
    contexts = [layout.contexts[s] for s in sequences]
    first = torch.tensor([_first_block(context - 1, scores.window, size) for context in contexts], device=device)
    # A block past the sequence's last is any valid one: what it holds is masked.
    columns = (first[:, None] + torch.arange(width, device=device)).clamp_(max=layout.block_table.shape[1] - 1)
    blocks = layout.block_table[chosen[:, None], columns].flatten()
    distance = torch.tensor(contexts, device=device)[:, None] - 1 - first[:, None] * size
    distance = distance - torch.arange(width * size, device=device)
    unseen, slopes = _unseen(distance, scores.window), _slopes(scores, device)
    mask = _masked(distance[:, None], unseen[:, None], None if slopes is None else slopes[:, None], dtype)
    return _Decodes(rows, blocks, unseen.flatten().nonzero().flatten(), mask)


def _bias(first: int, last: int, context: int, scores: Scores, like: torch.Tensor) -> torch.Tensor:
    """``[1 or heads, last - first, context]``: what the tokens ``first : last`` add to their scores; dtype and device
    are ``like``'s."""
    queries = torch.arange(first, last, device=like.device)
    distance = queries[:, None] - torch.arange(context, device=like.device)
    slopes = _slopes(scores, like.device)
    unseen = _unseen(distance, scores.window)
    return _masked(distance[None], unseen[None], None if slopes is None else slopes[:, None, None], like.dtype)


def _unseen(distance: torch.Tensor, window: int | None) -> torch.Tensor:
    later = distance < 0
    return later if window is None else later | (distance >= window)


def _masked(
    distance: torch.Tensor, unseen: torch.Tensor, slopes: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """-inf where ``unseen``, else 0, or ALiBi's bias for ``slopes`` shaped to broadcast against ``distance``."""
    if slopes is None:
        bias = torch.zeros(distance.shape, dtype=dtype, device=distance.device)
    else:  # minus the distance is the key's position to the softmax, and exact in 16 bits where it matters
        bias = (distance * -slopes).to(dtype)
    return bias.masked_fill_(unseen, float("-inf"))


def _slopes(scores: Scores, device: torch.device) -> torch.Tensor | None:
    return None if scores.slopes is None else torch.tensor(scores.slopes, dtype=torch.float32, device=device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU straight from the system, which hands out zero pages on first touch."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    import numpy as np

    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
