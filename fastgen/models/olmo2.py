"""OLMo 2 and 3: norms after the branches, queries and keys normed over all heads at once; OLMo 3 slides."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class Olmo2Config(fg.HFConfig):
    defaults: ClassVar = {"norm_eps": 1e-5}
    intermediate_size: fg.Count
    attention_bias: bool = False


class Olmo3Config(Olmo2Config):
    default_rope_theta = 500_000.0
    local_rope_theta = ("rope_theta", 500_000.0)  # the same, and never scaled
    sliding_window: fg.Count | None = 4096
    layer_types: list[str] | None = None


def build(c: Olmo2Config) -> fg.Decoder:
    by_kind = {"full_attention": c.rope, **c.rope_by_layer_type}
    ropes = {kind: fg.Rope(rope) for kind, rope in by_kind.items()}
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm(size: int = c.hidden_size) -> fg.RMSNorm:
        return fg.RMSNorm(size, c.norm_eps)

    def block(window: int | None) -> fg.Block:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        rope = ropes["sliding_attention" if window else "full_attention"]
        q_norm, k_norm = norm(heads[0] * c.head_dim), norm(heads[1] * c.head_dim)
        bias = c.attention_bias
        attention = fg.Attention(
            c.hidden_size, *heads, rope=rope, bias=bias, out_bias=bias, q_norm=q_norm, k_norm=k_norm, window=window
        )
        mlp = fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act)
        return fg.PostNorm(attention, norm(), mlp, norm())

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block(window) for window in c.layer_windows(lambda layer: layer % 4 != 3)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


NORMS = {"input": None, "post_attention": "blocks.*.norm1", "post_feedforward": "blocks.*.norm2"}
WEIGHTS = fg.DECODER_WEIGHTS.but({f"model.layers.*.{name}_layernorm": part for name, part in NORMS.items()})


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [
        fg.ModelSpec(("Olmo2ForCausalLM",), Olmo2Config, build, WEIGHTS, description="OLMo 2"),
        fg.ModelSpec(("Olmo3ForCausalLM",), Olmo3Config, build, WEIGHTS, description="OLMo 3"),
    ]
