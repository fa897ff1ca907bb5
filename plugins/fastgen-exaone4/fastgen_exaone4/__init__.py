"""EXAONE 4: norms after the branches, normed queries and keys, and in hybrid models rope on the sliding layers only."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class Exaone4Config(fg.HFConfig):
    defaults: ClassVar = {"num_key_value_heads": 32, "norm_eps": 1e-5}
    intermediate_size: fg.Count
    sliding_window: fg.Count | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: list[str] | None = None


def slides(c: Exaone4Config, layer: int) -> bool:
    """What the pattern says of a layer, in a file that names no layer types."""
    if isinstance(pattern := c.sliding_window_pattern, str):
        if not pattern or set(pattern) - set("LG"):
            raise fg.ConfigError(f"config.json: sliding_window_pattern must be made of L and G, got {pattern!r}")
        return layer != c.num_hidden_layers - 1 and pattern[layer % len(pattern)] == "L"
    return pattern is not None and pattern != 0 and (layer + 1) % pattern != 0


def build(c: Exaone4Config) -> fg.Decoder:
    rope, tokens = fg.Rope(c.rope), fg.Table(c.vocab_size, c.hidden_size)

    def norm(size: int = c.hidden_size) -> fg.RMSNorm:
        return fg.RMSNorm(size, c.norm_eps)

    def block(window: int | None) -> fg.Block:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        turns = rope if window or c.sliding_window is None else None
        q_norm, k_norm = norm(c.head_dim), norm(c.head_dim)
        attention = fg.Attention(c.hidden_size, *heads, rope=turns, q_norm=q_norm, k_norm=k_norm, window=window)
        return fg.PostNorm(attention, norm(), fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act), norm())

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block(window) for window in c.layer_windows(lambda layer: slides(c, layer))],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


WEIGHTS = fg.DECODER_WEIGHTS.but(
    {
        "model.layers.*.input_layernorm": None,
        "model.layers.*.post_attention_layernorm": "blocks.*.norm1",
        "model.layers.*.post_feedforward_layernorm": "blocks.*.norm2",
    }
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("Exaone4ForCausalLM",), Exaone4Config, build, WEIGHTS, description="EXAONE 4")]
