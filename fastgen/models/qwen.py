"""Qwen (the first: 1.8B, 7B, 14B and 72B), whose class is published with its weights.

Beyond ``seq_length`` its code stretches the rope (``use_dynamic_ntk``) and scales queries (``use_logn_attn``), both
from the length of the sequence so far. Up to there neither changes anything, so that is what it may be served with.
"""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class QwenConfig(fg.HFConfig):
    spellings: ClassVar = {"head_dim": ("kv_channels",), "max_position_embeddings": ("seq_length",)}
    defaults: ClassVar = {"head_dim": 128, "max_position_embeddings": 8192}
    intermediate_size: fg.Count  # of gate and up together
    no_bias: bool = True


def build(c: QwenConfig) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps)

    def block() -> fg.Block:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        attention = fg.Attention(c.hidden_size, *heads, rope=rope, bias=True, out_bias=not c.no_bias)
        mlp = fg.MLP(c.hidden_size, c.intermediate_size // 2, "silu", bias=not c.no_bias)
        return fg.PreNorm(norm(), attention, norm(), mlp)

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tied=tokens) if c.tie_word_embeddings else fg.Head(fg.Linear(c.hidden_size, c.vocab_size)),
    )


WEIGHTS = fg.WeightMap(
    {
        "transformer.wte": "embed.tokens",
        "transformer.h.*.ln_1": "blocks.*.norm1",
        "transformer.h.*.attn.c_attn": ("blocks.*.attn.qkv", fg.split_qkv),
        "transformer.h.*.attn.c_proj": "blocks.*.attn.out",
        "transformer.h.*.ln_2": "blocks.*.norm2",
        "transformer.h.*.mlp.w1": "blocks.*.mlp.up[up]",
        "transformer.h.*.mlp.w2": "blocks.*.mlp.up[gate]",
        "transformer.h.*.mlp.c_proj": "blocks.*.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "head.proj",
    },
    ignore=["transformer.rotary_emb.inv_freq", "transformer.h.*.attn.masked_bias", "transformer.h.*.attn.logn_tensor"],
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("QWenLMHeadModel",), QwenConfig, build, WEIGHTS, description="Qwen (the first)")]
