"""GPT-NeoX and Pythia: attention and MLP beside each other, each with its norm; partial rotary; queries, keys and
values fused head by head."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class GPTNeoXConfig(fg.HFConfig):
    spellings: ClassVar = {"rope_theta": ("rotary_emb_base",), "partial_rotary_factor": ("rotary_pct",)}
    default_partial_rotary_factor = 0.25
    intermediate_size: fg.Count
    hidden_act: str = "gelu"
    norm_eps: float = 1e-5
    attention_bias: bool = True
    use_parallel_residual: bool = True


def build(c: GPTNeoXConfig) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.LayerNorm:
        return fg.LayerNorm(c.hidden_size, c.norm_eps)

    def block() -> fg.Block:
        heads, bias = c.num_attention_heads, c.attention_bias
        attention = fg.Attention(c.hidden_size, heads, heads, c.head_dim, rope=rope, bias=bias, out_bias=bias)
        mlp = fg.PlainMLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True)
        order = fg.ParallelNorms if c.use_parallel_residual else fg.PreNorm
        return order(norm(), attention, norm(), mlp)

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


LAYER = "gpt_neox.layers.*."
WEIGHTS = fg.WeightMap(
    {
        "gpt_neox.embed_in": "embed.tokens",
        "gpt_neox.final_layer_norm": "norm",
        "embed_out": "head.proj",
        "lm_head": "head.proj",
        LAYER + "input_layernorm": "blocks.*.norm1",
        LAYER + "post_attention_layernorm": "blocks.*.norm2",
        LAYER + "attention.query_key_value": ("blocks.*.attn.qkv", fg.split_qkv_groups),
        LAYER + "attention.dense": "blocks.*.attn.out",
        LAYER + "mlp.dense_h_to_4h": "blocks.*.mlp.up",
        LAYER + "mlp.dense_4h_to_h": "blocks.*.mlp.down",
    },
    ignore=["*.attention.bias", "*.attention.masked_bias", "*rotary_emb.inv_freq"],
    roots={"": "gpt_neox."},
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("GPTNeoXForCausalLM",), GPTNeoXConfig, build, WEIGHTS, description="GPT-NeoX, Pythia")]
