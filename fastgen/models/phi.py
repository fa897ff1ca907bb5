"""Phi-1, 1.5 and 2: attention and MLP beside each other, partial rotary, biases everywhere, the head's too."""

from __future__ import annotations

from fastgen import api as fg


class PhiConfig(fg.HFConfig):
    default_partial_rotary_factor = 0.5
    intermediate_size: fg.Count
    hidden_act: str = "gelu_new"
    norm_eps: float = 1e-5
    qk_layernorm: bool = False


def build(c: PhiConfig) -> fg.Decoder:
    if c.tie_word_embeddings:
        raise fg.UnsupportedModelError("config.json: tie_word_embeddings = True: this family's head has a bias")
    rope, tokens = fg.Rope(c.rope), fg.Table(c.vocab_size, c.hidden_size)

    def norm(size: int = c.hidden_size) -> fg.LayerNorm:
        return fg.LayerNorm(size, c.norm_eps)

    def block() -> fg.Block:
        counts = c.num_attention_heads, c.num_key_value_heads
        q_norm, k_norm = (norm(c.head_dim) if c.qk_layernorm else None for _ in counts)
        attention = fg.Attention(
            c.hidden_size, *counts, c.head_dim, rope=rope, bias=True, out_bias=True, q_norm=q_norm, k_norm=k_norm
        )
        return fg.Parallel(norm(), attention, fg.PlainMLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True))

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=False, bias=True),
    )


WEIGHTS = fg.DECODER_WEIGHTS.but(
    {
        "model.final_layernorm": "norm",
        "model.layers.*.self_attn.dense": "blocks.*.attn.out",
        "model.layers.*.self_attn.q_layernorm": "blocks.*.attn.q_norm",
        "model.layers.*.self_attn.k_layernorm": "blocks.*.attn.k_norm",
        "model.layers.*.mlp.fc1": "blocks.*.mlp.up",
        "model.layers.*.mlp.fc2": "blocks.*.mlp.down",
    }
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("PhiForCausalLM",), PhiConfig, build, WEIGHTS, description="Phi-1, 1.5 and 2")]
