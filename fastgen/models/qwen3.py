"""Qwen3: each head's query and key are normed before they turn."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class Qwen3Config(fg.HFConfig):
    defaults: ClassVar = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}
    intermediate_size: fg.Count
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None


def build(c: Qwen3Config) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm(size: int = c.hidden_size) -> fg.RMSNorm:
        return fg.RMSNorm(size, c.norm_eps)

    def block(window: int | None) -> fg.Block:
        attention = fg.Attention(
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            rope=rope,
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            q_norm=norm(c.head_dim),
            k_norm=norm(c.head_dim),
            window=window,
        )
        return fg.PreNorm(norm(), attention, norm(), fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act))

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block(window) for window in c.layer_windows(lambda layer: layer >= c.max_window_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("Qwen3ForCausalLM",), Qwen3Config, build, fg.DECODER_WEIGHTS, description="Qwen3")]
