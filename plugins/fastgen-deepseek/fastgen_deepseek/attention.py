"""Multi-head latent attention (DeepSeek-V2, 2024), absorbed: the cache keeps latents, and heads meet them there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastgen import api as fg

if TYPE_CHECKING:
    from fastgen_deepseek import DeepseekV2Config, DeepseekV3Config

__all__ = ["LatentAttention", "Up"]

_EPS = 1e-6  # of the norms in here, whatever the config says of the others


class Up(fg.Layer):
    """For each head a matrix from the latent to its key and one to its value: ``key [heads, key_dim, rank]``,
    ``value [heads, value_dim, rank]``. Used from both sides, so that keys and values themselves are never made."""

    def __init__(self, heads: int, key_dim: int, value_dim: int, rank: int) -> None:
        super().__init__()
        self.key, self.value = fg.parameter(heads, key_dim, rank), fg.parameter(heads, value_dim, rank)

    def want(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {("key", "weight"): tuple(self.key.shape), ("value", "weight"): tuple(self.value.shape)}

    def place(self, slot: str, tail: str) -> torch.Tensor:
        return self.key if slot == "key" else self.value

    def query_to_latent(self, query: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, key_dim] -> [tokens, heads, rank]``: its product with a latent is that with the key."""
        return torch.einsum("thk,hkr->thr", query, self.key)

    def latent_to_value(self, mixed: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, rank] -> [tokens, heads, value_dim]``: a mixture of latents as that of their values."""
        return torch.einsum("thr,hvr->thv", mixed, self.value)


class LatentAttention(nn.Module):
    """``x [tokens, hidden] -> [tokens, hidden]``. A token keeps its latent and one turned key for all heads."""

    def __init__(self, c: DeepseekV2Config | DeepseekV3Config, rope: fg.Rope) -> None:
        super().__init__()
        self.heads, self.plain, self.turning = c.num_attention_heads, c.qk_nope_head_dim, c.head_dim
        self.rank = c.kv_lora_rank
        self.query_down = self.query_norm = None
        if c.q_lora_rank is not None:
            self.query_down = fg.Linear(c.hidden_size, c.q_lora_rank, bias=c.attention_bias)
            self.query_norm = fg.RMSNorm(c.q_lora_rank, _EPS)
        self.query = fg.Linear(c.q_lora_rank or c.hidden_size, self.heads * (self.plain + self.turning))
        self.down = fg.Linear(c.hidden_size, {"latent": self.rank, "key": self.turning}, bias=c.attention_bias)
        self.norm = fg.RMSNorm(self.rank, _EPS)
        self.up = Up(self.heads, self.plain, c.v_head_dim, self.rank)
        self.out = fg.Linear(self.heads * c.v_head_dim, c.hidden_size, bias=c.attention_bias)
        self.rope = rope
        self.cached = fg.CachedAttention(
            self.heads,
            1,
            self.rank + self.turning,
            value_dim=self.rank,
            values_in_keys=True,
            scale=(self.plain + self.turning) ** -0.5 * _magnitude(c.rope) ** 2,
        )

    def forward(self, x: torch.Tensor, batch: fg.Batch) -> torch.Tensor:
        narrow = x
        if self.query_down is not None and self.query_norm is not None:
            narrow = self.query_norm.alone(self.query_down(x))
        query = self.query(narrow).view(len(x), self.heads, self.plain + self.turning)
        down = self.down(x)[:, None]
        latent, key = self.norm.alone(down[..., : self.rank]), down[..., self.rank :]
        turned = self.rope(torch.cat([query[..., self.plain :], key], 1), batch)  # queries and the key in one call
        query = torch.cat([self.up.query_to_latent(query[..., : self.plain]), turned[:, :-1]], -1)
        key = torch.cat([latent, turned[:, -1:]], -1)
        mixed = self.cached(query, key, None, batch)
        return self.out(self.up.latent_to_value(mixed).flatten(1))


def _magnitude(rope: fg.RopeConfig | None) -> float:
    """YaRN's temperature, of queries and keys each (``mscale_all_dim``; the rest of it is in the rope's tables)."""
    if rope is None or not rope.mscale_all_dim or rope.factor is None or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
