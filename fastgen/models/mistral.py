"""Mistral (7B, Nemo, Small) and Ministral: Llama with a sliding window on all layers, on some, or on none."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class MistralConfig(fg.HFConfig):
    defaults: ClassVar = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
    intermediate_size: fg.Count
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None


def build(c: MistralConfig) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps)

    def block(window: int | None) -> fg.Block:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        attention = fg.Attention(c.hidden_size, *heads, rope=rope, window=window)
        mlp = fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act)
        return fg.PreNorm(norm(), attention, norm(), mlp)

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block(window) for window in c.layer_windows()],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    names = ("MistralForCausalLM", "MinistralForCausalLM")
    return [fg.ModelSpec(names, MistralConfig, build, fg.DECODER_WEIGHTS, description="Mistral, Ministral")]
