"""Self-attention over the blocked cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from fastgen.core.layers.batch import Batch
from fastgen.core.layers.linear import Linear
from fastgen.core.layers.norm import Norm
from fastgen.core.layers.rope import Rope
from fastgen.errors import ConfigError
from fastgen.kernels.ops import KernelTable
from fastgen.kernels.paging import CacheSpec, PagedAttention, Scores

__all__ = ["Attention", "CachedAttention", "alibi_slopes"]


class CachedAttention(nn.Module):
    """Attention itself, without projections: keeps this pass's keys and values, and mixes the values that each query
    sees. A part with projections of its own holds one; the `Decoder` gives each its place among the caches.

    Args:
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: width of queries and keys.
        value_dim: width of values; ``head_dim`` unless given.
        values_in_keys: the first ``value_dim`` components of a key are its value, and are kept once.
        scale: of the scores; ``head_dim ** -0.5`` unless given.
        window: tokens a query sees, itself included; ``None``: all before it.
        softcap: ``softcap * tanh(score / softcap)`` in place of each score.
        slopes: ALiBi's, one for each query head (`alibi_slopes`).

    Raises:
        ConfigError: heads that cannot share keys evenly, a window below 1, or a scale that is no number.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        values_in_keys: bool = False,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        slopes: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if heads % kv_heads:
            raise ConfigError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
        if window is not None and window < 1:
            raise ConfigError(f"a sliding window of {window} tokens leaves nothing to see; it must be 1 or more")
        if slopes is not None and len(slopes) != heads:
            raise ConfigError(f"{len(slopes)} ALiBi slopes for {heads} query heads")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.cache_spec = CacheSpec(kv_heads, head_dim, self.value_dim, values_in_keys)
        scale = head_dim**-0.5 if scale is None else scale
        if isinstance(scale, complex) or not math.isfinite(scale):
            raise ConfigError(f"config.json: scores cannot be multiplied by {scale}")
        self.scores = Scores(scale, window, softcap or None, None if slopes is None else tuple(slopes))
        self.index = -1  # its place among the decoder's caches, given by the Decoder
        self.kernel: PagedAttention

    def bind(self, kernels: KernelTable) -> None:
        """
        Raises:
            ConfigError: no kernel serves this attention in the cache's format.
        """
        sizes: dict[str, int | str] = {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "values_in_keys": self.cache_spec.values_in_keys,
            "window": self.scores.window or 0,
            "softcap": self.scores.softcap is not None,
            "alibi": self.scores.slopes is not None,
        }
        if kernels.kv_dtype != "auto":
            sizes["kv_dtype"] = kernels.kv_dtype
        self.kernel = kernels.shared(kernels.choose("paged_attention", **sizes))
        self.cache_spec = replace(self.cache_spec, kv_dtype=kernels.kv_dtype)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """``query [tokens, heads, head_dim]``, ``key [tokens, kv_heads, head_dim]``, ``value [tokens, kv_heads,
        value_dim]`` (``None`` with ``values_in_keys``) ``-> [tokens, heads, value_dim]``."""
        return self.kernel.attend(query, key, value, batch.caches[self.index], batch.layout, self.scores)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023): ``x [tokens, hidden] -> [tokens, hidden]``.

    Args:
        hidden: width of the stream.
        heads, kv_heads, head_dim, scale, window, softcap, slopes: see `CachedAttention`.
        rope: turns queries and keys; shared between layers. ``None``: the model has other positions, or none.
        bias: whether the query, key and value projections have biases.
        out_bias: whether the output projection has one.
        q_norm: over each query head, or over all of them at once, as its size says; before the rope.
        k_norm: the same of the keys; both or neither.

    Raises:
        ConfigError: as `CachedAttention`; one norm without the other, or of another size.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rope: Rope | None = None,
        bias: bool = False,
        out_bias: bool = False,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        slopes: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.qkv = Linear(
            hidden, {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}, bias=bias
        )
        self.out = Linear(heads * head_dim, hidden, bias=out_bias)
        if (q_norm is None) != (k_norm is None):
            raise ConfigError("attention has a norm of its queries or of its keys, but not of both")
        for name, norm, count in (("q_norm", q_norm, heads), ("k_norm", k_norm, kv_heads)):
            if norm is not None and norm.size not in (head_dim, count * head_dim):
                raise ConfigError(
                    f"{name} has size {norm.size}; it must be {head_dim} (each head) or {count * head_dim} (all heads)"
                )
        self.rope, self.q_norm, self.k_norm = rope, q_norm, k_norm
        self.cached = CachedAttention(
            heads, kv_heads, head_dim, scale=scale, window=window, softcap=softcap, slopes=slopes
        )

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        projected = self.qkv(x).view(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        last = self.heads + self.kv_heads
        turning, value = projected[:, :last], projected[:, last:]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = turning[:, : self.heads], turning[:, self.heads :]
            turning = torch.cat([_normed(query, self.q_norm), _normed(key, self.k_norm)], 1)
        if self.rope is not None:  # queries and keys in one call
            turning = self.rope(turning, batch)
        query, key = turning[:, : self.heads], turning[:, self.heads :]
        mixed = self.cached(query, key, value, batch)
        return self.out(mixed.reshape(len(x), self.heads * self.head_dim))


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """``x [tokens, heads, head_dim]``, normed in rows of the norm's size."""
    return norm.alone(x.reshape(len(x), -1, norm.size)).view(x.shape)


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slope for each head (Press et al., 2022): a geometric series for the nearest lower power of two, then
    every other slope of the series for twice as many. Not monotonic, on purpose: checkpoints are trained with it."""

    def series(count: int) -> list[float]:
        start = 2.0 ** (-(2.0 ** -(math.log2(count) - 3)))
        return [start**power for power in range(1, count + 1)]

    lower = 2 ** math.floor(math.log2(heads))
    return [*series(lower), *series(2 * lower)[::2][: heads - lower]]
