"""StableLM: LayerNorm, partial rotary; the 12B norms each head apart and sets attention and MLP beside each other."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class StableLmConfig(fg.HFConfig):
    spellings: ClassVar = {"partial_rotary_factor": ("partial_rotary_factor", "rope_pct")}
    defaults: ClassVar = {"num_key_value_heads": 32}
    default_partial_rotary_factor = 0.25
    intermediate_size: fg.Count
    norm_eps: float = 1e-5
    max_position_embeddings: fg.Count = 4096
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


def build(c: StableLmConfig) -> fg.Decoder:
    from fastgen.models.stablelm_parts import NormPerHead

    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.LayerNorm:
        return fg.LayerNorm(c.hidden_size, c.norm_eps)

    def block() -> fg.Block:
        counts = c.num_attention_heads, c.num_key_value_heads
        norms = [NormPerHead(n, c.head_dim, c.norm_eps) for n in counts] if c.qk_layernorm else [None, None]
        attention = fg.Attention(
            c.hidden_size, *counts, c.head_dim, rope=rope, bias=c.use_qkv_bias, q_norm=norms[0], k_norm=norms[1]
        )
        mlp = fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act)
        if c.use_parallel_residual:
            return fg.Parallel(norm(), attention, mlp)
        return fg.PreNorm(norm(), attention, norm(), mlp)

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


WEIGHTS = fg.DECODER_WEIGHTS.but(
    {f"model.layers.*.self_attn.{x}_layernorm.norms.*": f"blocks.*.attn.{x}_norm[*]" for x in "qk"}
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    architectures = ("StableLmForCausalLM", "StableLMEpochForCausalLM")
    return [fg.ModelSpec(architectures, StableLmConfig, build, WEIGHTS, description="StableLM, StableLM 2")]
