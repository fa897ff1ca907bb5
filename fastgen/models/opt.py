"""OPT: learned positions from row 2 on, LayerNorm, biases; 350m norms after its additions and has narrow embeddings."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class OPTConfig(fg.HFConfig):
    spellings: ClassVar = {
        "intermediate_size": ("ffn_dim",),
        "hidden_act": ("activation_function",),
        "remove_final_norm": ("_remove_final_layer_norm",),
    }
    has_rope = False
    intermediate_size: fg.Count
    hidden_act: str = "relu"
    word_embed_proj_dim: fg.Count | None = None
    do_layer_norm_before: bool = True
    remove_final_norm: bool = False
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True


def build(c: OPTConfig) -> fg.Decoder:
    from fastgen.models import opt_parts as parts

    width = c.word_embed_proj_dim or c.hidden_size
    tokens, positions = fg.Table(c.vocab_size, width), fg.Table(c.max_position_embeddings + 2, c.hidden_size)

    def norm() -> fg.Norm:
        learned = c.layer_norm_elementwise_affine
        return fg.LayerNorm(c.hidden_size, 1e-5, weight=learned, bias=learned)

    def block() -> fg.Block:
        heads, bias = c.num_attention_heads, c.enable_bias
        attention = fg.Attention(c.hidden_size, heads, heads, c.head_dim, bias=bias, out_bias=bias)
        mlp = fg.PlainMLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=bias)
        order = fg.PreNorm if c.do_layer_norm_before else parts.NormAfterSum
        return order(norm(), attention, norm(), mlp)

    narrow = width != c.hidden_size
    return fg.Decoder(
        embed=parts.NarrowEmbed(tokens, positions)
        if narrow
        else fg.Embed(tokens, positions=positions, position_offset=2),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm() if c.do_layer_norm_before and not c.remove_final_norm else parts.NoNorm(),
        head=parts.NarrowHead(c.hidden_size, tokens, c.tie_word_embeddings)
        if narrow
        else fg.Head(tokens, tied=c.tie_word_embeddings),
    )


LAYER = "model.decoder.layers.*."
WEIGHTS = fg.WeightMap(
    {
        "model.decoder.embed_tokens": "embed.tokens",
        "model.decoder.embed_positions": "embed.positions",
        "model.decoder.project_in": "embed.project",
        "model.decoder.project_out": "head.project",
        "model.decoder.final_layer_norm": "norm",
        "lm_head": "head.proj",
        LAYER + "self_attn_layer_norm": "blocks.*.norm1",
        LAYER + "final_layer_norm": "blocks.*.norm2",
        LAYER + "self_attn.q_proj": "blocks.*.attn.qkv[q]",
        LAYER + "self_attn.k_proj": "blocks.*.attn.qkv[k]",
        LAYER + "self_attn.v_proj": "blocks.*.attn.qkv[v]",
        LAYER + "self_attn.out_proj": "blocks.*.attn.out",
        LAYER + "fc1": "blocks.*.mlp.up",
        LAYER + "fc2": "blocks.*.mlp.down",
    },
    roots={"decoder.": "model.decoder."},
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("OPTForCausalLM",), OPTConfig, build, WEIGHTS, description="OPT 125m to 66b")]
