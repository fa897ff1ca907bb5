"""Qwen 1.5, 2 and 2.5: Llama with biases on queries, keys and values, and a sliding window on the upper layers."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class Qwen2Config(fg.HFConfig):
    defaults: ClassVar = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
    intermediate_size: fg.Count
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None


def build(c: Qwen2Config) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps)

    def block(window: int | None) -> fg.Block:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        attention = fg.Attention(c.hidden_size, *heads, rope=rope, bias=True, window=window)
        mlp = fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act)
        return fg.PreNorm(norm(), attention, norm(), mlp)

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block(window) for window in c.layer_windows(lambda layer: layer >= c.max_window_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("Qwen2ForCausalLM",), Qwen2Config, build, fg.DECODER_WEIGHTS, description="Qwen 1.5 to 2.5")]
