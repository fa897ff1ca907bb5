"""Gemma 1: Llama with embeddings scaled by the square root of their width and norms that multiply by ``1 + w``."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg

TANH = "gelu_pytorch_tanh"


class GemmaConfig(fg.HFConfig):
    spellings: ClassVar = {"hidden_act": ("hidden_act",)}  # transformers does not read hidden_activation here
    defaults: ClassVar = {"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192}
    intermediate_size: fg.Count
    hidden_act: str = TANH
    tie_word_embeddings: bool = True
    attention_bias: bool = False


def build(c: GemmaConfig) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)
    # The first published files say "gelu" and mean its approximation.
    activation = TANH if c.hidden_act == "gelu" else c.hidden_act

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps, offset=1.0)

    def block() -> fg.Block:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        bias = c.attention_bias
        attention = fg.Attention(c.hidden_size, *heads, rope=rope, bias=bias, out_bias=bias)
        return fg.PreNorm(norm(), attention, norm(), fg.MLP(c.hidden_size, c.intermediate_size, activation))

    return fg.Decoder(
        embed=fg.Embed(tokens, scale=c.hidden_size**0.5),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("GemmaForCausalLM",), GemmaConfig, build, fg.DECODER_WEIGHTS, description="Gemma 1")]
