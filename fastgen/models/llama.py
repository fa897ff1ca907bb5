"""Llama 1 to 3.x and everything saved as ``LlamaForCausalLM`` (SmolLM2, Yi, TinyLlama, ...)."""

from __future__ import annotations

from fastgen import api as fg


class LlamaConfig(fg.HFConfig):
    intermediate_size: fg.Count
    attention_bias: bool = False
    mlp_bias: bool = False


def build(c: LlamaConfig) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps)

    def block() -> fg.Block:
        attention = fg.Attention(
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            rope=rope,
            bias=c.attention_bias,
            out_bias=c.attention_bias,
        )
        mlp = fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)
        return fg.PreNorm(norm(), attention, norm(), mlp)

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("LlamaForCausalLM",), LlamaConfig, build, fg.DECODER_WEIGHTS, description="Llama 1 to 3.x")]
