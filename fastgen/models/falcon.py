"""Falcon: queries, keys and values fused in one tensor; 7B, 40B and 11B, 180B in parallel blocks, RW in sequence with
ALiBi."""

from __future__ import annotations

from typing import Any, ClassVar

from fastgen import api as fg


class FalconConfig(fg.HFConfig):
    spellings: ClassVar = {
        "hidden_size": ("hidden_size", "n_embed"),
        "intermediate_size": ("ffn_hidden_size",),
        "hidden_act": ("activation",),
    }
    hidden_act: str = "gelu"
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    bias: bool = False
    alibi: bool = False
    new_decoder_architecture: bool = False
    multi_query: bool | None = True  # null is false
    parallel_attn: bool | None = True
    num_ln_in_parallel_attn: int | None = None

    @property
    def is_new(self) -> bool:
        return self.new_decoder_architecture

    @property
    def kv_heads(self) -> int:
        """Only the new decoder goes by the file's count; the others write any there."""
        return self.num_key_value_heads if self.is_new else 1 if self.multi_query else self.num_attention_heads


class RefinedWebConfig(FalconConfig):
    """Falcon as published before it was part of transformers: other defaults, and the 40B goes by its type's name."""

    multi_query: bool | None = False
    parallel_attn: bool | None = False

    @property
    def is_new(self) -> bool:
        return self.model_type == "RefinedWeb"


def build(c: FalconConfig) -> fg.Decoder:
    rope = None if c.alibi else fg.Rope(c.rope)
    # The biases are added before the scores are scaled. transformers rounds them to bfloat16; nothing is rounded here.
    slopes = [slope * c.head_dim**-0.5 for slope in fg.alibi_slopes(c.num_attention_heads)] if c.alibi else None
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.LayerNorm:
        return fg.LayerNorm(c.hidden_size, c.norm_eps)

    def block() -> fg.Block:
        heads, width = c.num_attention_heads, c.intermediate_size or 4 * c.hidden_size
        attention = fg.Attention(
            c.hidden_size, heads, c.kv_heads, c.head_dim, rope=rope, slopes=slopes, bias=c.bias, out_bias=c.bias
        )
        mlp = fg.PlainMLP(c.hidden_size, width, c.hidden_act, bias=c.bias)
        if c.is_new and c.num_ln_in_parallel_attn in (None, 2):
            return fg.ParallelNorms(norm(), attention, norm(), mlp)
        if c.is_new or c.parallel_attn:
            return fg.Parallel(norm(), attention, mlp)
        return fg.PreNorm(norm(), attention, norm(), mlp)

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


def split(tensor: Any, c: FalconConfig) -> dict[str, Any]:
    """Every layout is the grouped one, with its own number of groups."""
    return fg.split_qkv_groups(tensor, c.model_copy(update={"num_key_value_heads": c.kv_heads}))


LAYER = "transformer.h.*."
WEIGHTS = fg.WeightMap(
    {
        "transformer.word_embeddings": "embed.tokens",
        "transformer.ln_f": "norm",
        "lm_head": "head.proj",
        LAYER + "input_layernorm": "blocks.*.norm1",
        LAYER + "post_attention_layernorm": "blocks.*.norm2",
        LAYER + "ln_attn": "blocks.*.norm1",
        LAYER + "ln_mlp": "blocks.*.norm2",
        LAYER + "self_attention.query_key_value": ("blocks.*.attn.qkv", split),
        LAYER + "self_attention.dense": "blocks.*.attn.out",
        LAYER + "mlp.dense_h_to_4h": "blocks.*.mlp.up",
        LAYER + "mlp.dense_4h_to_h": "blocks.*.mlp.down",
    },
    ignore=["*.inv_freq"],
    roots={"": "transformer."},
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [
        fg.ModelSpec(("FalconForCausalLM",), FalconConfig, build, WEIGHTS, description="Falcon 1B to 180B"),
        fg.ModelSpec(("RWForCausalLM",), RefinedWebConfig, build, WEIGHTS, description="Falcon's first files"),
    ]
