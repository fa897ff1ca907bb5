"""Qwen, the first (1.8B, 7B, 14B and 72B), whose modelling code is published with its weights."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from fastgen import api as fg


class QwenConfig(fg.HFConfig):
    spellings: ClassVar = {"head_dim": ("kv_channels",), "partial_rotary_factor": ("rotary_pct",)}
    defaults: ClassVar = {"head_dim": 128, "max_position_embeddings": 8192}
    intermediate_size: fg.Count  # of gate and up together
    no_bias: bool = True  # beside the biases of queries, keys and values
    seq_length: fg.Count | None = None
    use_dynamic_ntk: bool = True
    use_logn_attn: bool = True


def build(c: QwenConfig) -> fg.Decoder:
    from fastgen.models.qwen_rope import QwenRope

    rope, tokens = QwenRope(c), fg.Table(c.vocab_size, c.hidden_size)
    norm = partial(fg.RMSNorm, c.hidden_size, c.norm_eps)

    def block() -> fg.Block:
        heads, bias = (c.num_attention_heads, c.num_key_value_heads, c.head_dim), not c.no_bias
        attention = fg.Attention(c.hidden_size, *heads, rope=rope, bias=True, out_bias=bias)
        return fg.PreNorm(norm(), attention, norm(), fg.MLP(c.hidden_size, c.intermediate_size // 2, "silu", bias=bias))

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
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
    ignore=["*.rotary_emb.inv_freq", "*.attn.masked_bias"],
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("QWenLMHeadModel",), QwenConfig, build, WEIGHTS, description="Qwen, the first")]
