"""Self-attention over the blocked cache."""

from __future__ import annotations

import torch
from torch import nn

from fastgen.core.layers.batch import Batch
from fastgen.core.layers.linear import Linear
from fastgen.core.layers.rope import Rope
from fastgen.kernels.ops import KernelTable
from fastgen.kernels.paging import CacheSpec, PagedAttention

__all__ = ["Attention"]


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023): ``x [tokens, hidden] -> [tokens, hidden]``.

    Args:
        hidden: width of the stream.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: width of a head; need not be ``hidden / heads``.
        rope: turns queries and keys; shared between layers.
        bias: whether the query, key and value projections have biases.
        out_bias: whether the output projection has one.
        scale: of the scores; ``head_dim ** -0.5`` unless given.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rope: Rope,
        bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.qkv = Linear(
            hidden, {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}, bias=bias
        )
        self.out = Linear(heads * head_dim, hidden, bias=out_bias)
        self.rope = rope
        self.scale = head_dim**-0.5 if scale is None else scale
        self.cache_spec = CacheSpec(kv_heads, head_dim)
        self.index = -1  # its place among the decoder's caches, given by the Decoder
        self.kernel: PagedAttention

    def bind(self, kernels: KernelTable) -> None:
        self.rope.bind(kernels)
        factory = kernels.choose("paged_attention", heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        self.kernel = kernels.shared(factory)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        projected = self.qkv(x).view(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        last = self.heads + self.kv_heads
        turned, value = self.rope(projected[:, :last], batch), projected[:, last:]
        query, key = turned[:, : self.heads], turned[:, self.heads :]
        mixed = self.kernel.attend(query, key, value, batch.caches[self.index], batch.layout, self.scale)
        return self.out(mixed.reshape(len(x), self.heads * self.head_dim))
