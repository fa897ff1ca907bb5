"""From the names and layouts of DeepSeek's files to parts. No torch here until a tensor comes."""

from __future__ import annotations

import re
from typing import Any

from fastgen import api as fg

__all__ = ["WEIGHTS"]


def halves(rows: Any, c: Any) -> Any:
    """``[..., turning rows, in]``, so that row i turns with the one half of them further on; files pair neighbours."""
    return rows.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2) if c.rope_interleave else rows


def split_queries(weight: Any, c: Any) -> dict[str, Any]:
    """Of each head: the rows that do not turn, then those that do."""
    import torch

    plain, turning = weight.unflatten(0, (c.num_attention_heads, -1)).split([c.qk_nope_head_dim, c.head_dim], 1)
    return {"": torch.cat([plain, halves(turning, c)], 1).flatten(0, 1)}


def split_down(tensor: Any, c: Any) -> dict[str, Any]:
    """Rows (or the bias) of the latent, then of the key that all heads share."""
    latent, key = tensor.split([c.kv_lora_rank, c.head_dim])
    return {"latent": latent, "key": halves(key, c) if key.dim() > 1 else halves(key[:, None], c)[:, 0]}


def split_up(weight: Any, c: Any) -> dict[str, Any]:
    """Of each head: what makes its key of a latent, then what makes its value."""
    heads = weight.unflatten(0, (c.num_attention_heads, -1))
    return dict(zip(("key", "value"), heads.split([c.qk_nope_head_dim, c.v_head_dim], 1), strict=True))


def predicts_further(tensor: str, c: Any) -> bool:
    """Whether this is of a layer that predicts tokens further on, which lie behind the last one."""
    found = re.match(r"model\.layers\.(\d+)\.", tensor)
    return found is not None and 0 <= int(found[1]) - c.num_hidden_layers < c.num_nextn_predict_layers


ATTENTION, MLP = "model.layers.*.self_attn", "model.layers.*.mlp"
WEIGHTS = fg.DECODER_WEIGHTS.but(
    {
        f"{ATTENTION}.q_proj": ("blocks.*.attn.query", split_queries),
        f"{ATTENTION}.q_a_proj": "blocks.*.attn.query_down",
        f"{ATTENTION}.q_a_layernorm": "blocks.*.attn.query_norm",
        f"{ATTENTION}.q_b_proj": ("blocks.*.attn.query", split_queries),
        f"{ATTENTION}.kv_a_proj_with_mqa": ("blocks.*.attn.down", split_down),
        f"{ATTENTION}.kv_a_layernorm": "blocks.*.attn.norm",
        f"{ATTENTION}.kv_b_proj": ("blocks.*.attn.up", split_up),
        f"{MLP}.gate": "blocks.*.mlp.routed.router",
        **fg.expert_rules(f"{MLP}.experts", "blocks.*.mlp.routed.experts"),
        f"{MLP}.shared_experts.gate_proj": "blocks.*.mlp.shared.up[gate]",
        f"{MLP}.shared_experts.up_proj": "blocks.*.mlp.shared.up[up]",
        f"{MLP}.shared_experts.down_proj": "blocks.*.mlp.shared.down",
    },
    unused=predicts_further,
)
