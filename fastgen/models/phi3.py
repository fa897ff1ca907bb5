"""Phi-3, 3.5 and 4: Llama with fused projections, a window, and LongRoPE chosen by each request's own length."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class Phi3Config(fg.HFConfig):
    spellings: ClassVar = {"partial_rotary_factor": ("partial_rotary_factor",)}
    rope_types: ClassVar = {"yarn": "longrope"}  # as the first files called it
    intermediate_size: fg.Count
    norm_eps: float = 1e-5
    max_position_embeddings: fg.Count = 4096
    original_max_position_embeddings: fg.Count = 4096
    sliding_window: int | None = None


def build(c: Phi3Config) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps)

    def block() -> fg.Block:
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        attention = fg.Attention(c.hidden_size, heads, kv_heads, c.head_dim, rope=rope, window=c.sliding_window)
        return fg.PreNorm(norm(), attention, norm(), fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act))

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


WEIGHTS = fg.DECODER_WEIGHTS.but(
    {
        "model.layers.*.self_attn.qkv_proj": ("blocks.*.attn.qkv", fg.split_qkv),
        "model.layers.*.mlp.gate_up_proj": ("blocks.*.mlp.up", fg.split_gate_up),
    }
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("Phi3ForCausalLM",), Phi3Config, build, WEIGHTS, description="Phi-3, 3.5 and 4")]
