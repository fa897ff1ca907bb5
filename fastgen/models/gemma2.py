"""Gemma 2: norms on both sides of each branch, capped scores and logits, a window on every other layer."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class Gemma2Config(fg.HFConfig):
    spellings: ClassVar = {"hidden_act": ("hidden_act",)}  # which old files have too, and nothing reads
    defaults: ClassVar = {"head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    intermediate_size: fg.Count
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: fg.Positive = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    sliding_window: fg.Count | None = 4096
    layer_types: list[str] | None = None


def build(c: Gemma2Config) -> fg.Decoder:
    rope, bias = fg.Rope(c.rope), c.attention_bias
    heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    scale, cap = c.query_pre_attn_scalar**-0.5, c.attn_logit_softcapping

    def attention(window: int | None) -> fg.Attention:
        return fg.Attention(
            c.hidden_size, *heads, rope=rope, bias=bias, out_bias=bias, window=window, scale=scale, softcap=cap
        )

    return decoder(c, [attention(window) for window in c.layer_windows(lambda layer: layer % 2 == 0)])


def decoder(c: Gemma2Config, attentions: list[fg.Attention]) -> fg.Decoder:
    """All but the attention, which Gemma 3 has otherwise."""
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps, offset=1.0)

    def block(attention: fg.Attention) -> fg.Block:
        mlp = fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_activation)
        return fg.Sandwich(norm(), attention, norm(), norm(), mlp, norm())

    return fg.Decoder(
        embed=fg.Embed(tokens, scale=c.hidden_size**0.5),
        blocks=[block(attention) for attention in attentions],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings, softcap=c.final_logit_softcapping),
    )


PARTS = {"input": "pre1", "post_attention": "post1", "pre_feedforward": "pre2", "post_feedforward": "post2"}
NORMS = {f"model.layers.*.{name}_layernorm": f"blocks.*.{part}" for name, part in PARTS.items()}


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    weights = fg.DECODER_WEIGHTS.but(NORMS)
    return [fg.ModelSpec(("Gemma2ForCausalLM",), Gemma2Config, build, weights, description="Gemma 2")]
