"""Ragged attention over a blocked cache in the library: src/attention.cpp; the cache's layout: src/attention.h."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fastgen.kernels import kv_int8
from fastgen.kernels.cpu.library import library
from fastgen.kernels.cpu.support import DTYPES, RANK, supports
from fastgen.kernels.ops import Implementation
from fastgen.kernels.paging import CacheSpec, PagedLayout, Scores

__all__ = ["IMPLEMENTATIONS", "CpuPagedAttention"]

_SLACK = 64
"""Elements at the end of an allocation that vectors may run into; ``kSlack`` of the library."""
_LINE = 64
"""Bytes of a cache line, at which allocations begin."""


class _Pages(NamedTuple):
    """One layer's cache, flat; where things lie in it is the library's affair."""

    keys: torch.Tensor
    values: torch.Tensor | None  # None: the keys hold them
    spec: CacheSpec
    dtype: torch.dtype  # of what is asked and answered
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class CpuPagedAttention:
    """Keeps nothing of a pass: a call reads what changes between passes from the layout's tensors, and may be made
    again with the same pointers."""

    kv_dtypes = ("auto", "int8")

    def __init__(self) -> None:
        self._slopes: dict[tuple[float, ...], torch.Tensor] = {}

    def bytes_per_token(self, spec: CacheSpec, dtype: torch.dtype) -> int:
        return kv_int8.bytes_per_token(spec) if spec.kv_dtype == "int8" else spec.width * dtype.itemsize

    def allocate(
        self, spec: CacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> _Pages:
        tokens = num_blocks * block_size * spec.kv_heads
        kept = torch.int8 if spec.kv_dtype == "int8" else dtype
        keys = _zeros(tokens * spec.head_dim, kept)
        values = None if spec.values_in_keys else _zeros(tokens * spec.value_dim, kept)
        if spec.kv_dtype != "int8":
            return _Pages(keys, values, spec, dtype)
        key_scales = _zeros(tokens * kv_int8.groups(spec.head_dim, kv_int8.KEY_GROUP), torch.bfloat16)
        per_value = kv_int8.groups(spec.value_dim, kv_int8.VALUE_GROUP)
        value_scales = None if values is None else _zeros(tokens * per_value, torch.bfloat16)
        return _Pages(keys, values, spec, dtype, key_scales, value_scales)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        cache: _Pages,
        layout: PagedLayout,
        scores: Scores,
    ) -> torch.Tensor:
        spec, dtype = cache.spec, cache.dtype
        query, key = _rows(query, dtype), _rows(key, dtype)
        value = None if value is None or cache.values is None else _rows(value, dtype)
        tokens, heads, head_dim = query.shape
        out = torch.empty((tokens, heads, spec.value_dim), dtype=dtype)
        table, spans = layout.block_table, layout.spans
        lib = library()
        lib.call(
            lib.op("fg_attention"),
            query.data_ptr(),
            key.data_ptr(),
            _pointer(value),
            out.data_ptr(),
            cache.keys.data_ptr(),
            _pointer(cache.values),
            _pointer(cache.key_scales),
            _pointer(cache.value_scales),
            table.data_ptr(),
            spans.data_ptr(),
            layout.slots.data_ptr(),
            0 if scores.slopes is None else self._slopes_of(scores.slopes).data_ptr(),
            query.stride(0),
            key.stride(0),
            0 if value is None else value.stride(0),
            table.stride(0),
            spans.stride(0),
            tokens,
            spans.shape[1],
            heads,
            spec.kv_heads,
            head_dim,
            spec.value_dim,
            layout.block_size,
            scores.window or 0,
            float(scores.scale),
            float(scores.softcap or 0),
            DTYPES[dtype],
        )
        return out

    def _slopes_of(self, slopes: tuple[float, ...]) -> torch.Tensor:
        """Kept, since a call that may be made again has its address."""
        if slopes not in self._slopes:
            self._slopes[slopes] = torch.tensor(slopes, dtype=torch.float32)
        return self._slopes[slopes]


def _pointer(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x [tokens, heads, dim]`` of this dtype with each token's numbers contiguous; most often itself."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` zeros and slack, at the begin of a cache line; straight from the system, which hands out zero pages on
    first touch."""
    size = (count + _SLACK) * dtype.itemsize
    memory = np.zeros(size + _LINE, dtype=np.uint8)
    first = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[first : first + size]).view(dtype)


IMPLEMENTATIONS = (Implementation("paged_attention", "cpu", CpuPagedAttention, supports, rank=RANK, repeatable=True),)
"""What the library can be asked for."""
