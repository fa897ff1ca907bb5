"""GPT-2: learned positions, and matrices stored the other way round (``[in, out]``)."""

from __future__ import annotations

from typing import Any, ClassVar

from fastgen import api as fg


class GPT2Config(fg.HFConfig):
    spellings: ClassVar = {
        "intermediate_size": ("n_inner",),
        "max_position_embeddings": ("n_positions", "max_position_embeddings"),
    }
    has_rope = False
    hidden_act: str = "gelu_new"
    norm_eps: float = 1e-5
    max_position_embeddings: fg.Count = 1024
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


def build(c: GPT2Config) -> fg.Decoder:
    tokens, positions = fg.Table(c.vocab_size, c.hidden_size), fg.Table(c.max_position_embeddings, c.hidden_size)

    def norm() -> fg.LayerNorm:
        return fg.LayerNorm(c.hidden_size, c.norm_eps)

    def block(layer: int) -> fg.Block:
        heads, width = c.num_attention_heads, c.intermediate_size or 4 * c.hidden_size
        scale = c.head_dim**-0.5 if c.scale_attn_weights else 1.0
        scale /= layer + 1 if c.scale_attn_by_inverse_layer_idx else 1
        attention = fg.Attention(c.hidden_size, heads, heads, c.head_dim, bias=True, out_bias=True, scale=scale)
        return fg.PreNorm(norm(), attention, norm(), fg.PlainMLP(c.hidden_size, width, c.hidden_act, bias=True))

    return fg.Decoder(
        embed=fg.Embed(tokens, positions=positions),
        blocks=[block(layer) for layer in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


def turned(tensor: Any, c: GPT2Config) -> dict[str, Any]:
    return {"": tensor.t()}


def turned_qkv(tensor: Any, c: GPT2Config) -> dict[str, Any]:
    return fg.split_qkv(tensor.t(), c)


WEIGHTS = fg.WeightMap(
    {
        "transformer.wte": "embed.tokens",
        "transformer.wpe": "embed.positions",
        "transformer.ln_f": "norm",
        "lm_head": "head.proj",
        "transformer.h.*.ln_1": "blocks.*.norm1",
        "transformer.h.*.ln_2": "blocks.*.norm2",
        "transformer.h.*.attn.c_attn": ("blocks.*.attn.qkv", turned_qkv),
        "transformer.h.*.attn.c_proj": ("blocks.*.attn.out", turned),
        "transformer.h.*.mlp.c_fc": ("blocks.*.mlp.up", turned),
        "transformer.h.*.mlp.c_proj": ("blocks.*.mlp.down", turned),
    },
    ignore=["*.attn.bias", "*.attn.masked_bias"],  # the causal mask, and what it masks with
    roots={"": "transformer."},
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("GPT2LMHeadModel",), GPT2Config, build, WEIGHTS, description="GPT-2")]
