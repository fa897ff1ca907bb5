"""Granite 3, dense and with experts: Llama and Mixtral, with multipliers on embeddings, scores, branches and logits."""

from __future__ import annotations

from fastgen import api as fg


class GraniteConfig(fg.HFConfig):
    intermediate_size: fg.Count
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: fg.Positive = 1.0


class GraniteMoeConfig(GraniteConfig):
    num_local_experts: fg.Count = 8
    num_experts_per_tok: fg.Count = 2


def build(c: GraniteConfig) -> fg.Decoder:
    from fastgen.models.granite_block import WeightedPreNorm

    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps)

    def mlp() -> fg.MLP | fg.MoE:
        if not isinstance(c, GraniteMoeConfig):
            return fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)
        experts = fg.Experts(c.num_local_experts, c.hidden_size, c.intermediate_size, c.hidden_act)
        router = fg.Linear(c.hidden_size, c.num_local_experts)
        return fg.MoE(router, experts, c.num_experts_per_tok, normalise=True)

    def block() -> fg.Block:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        bias, scale = c.attention_bias, c.attention_multiplier
        attention = fg.Attention(c.hidden_size, *heads, rope=rope, bias=bias, out_bias=bias, scale=scale)
        return WeightedPreNorm(norm(), attention, norm(), mlp(), c.residual_multiplier)

    return fg.Decoder(
        embed=fg.Embed(tokens, scale=c.embedding_multiplier),
        blocks=[block() for _ in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings, scale=1 / c.logits_scaling),
    )


EXPERTS = fg.DECODER_WEIGHTS.but(
    {
        "model.layers.*.block_sparse_moe.router.layer": "blocks.*.mlp.router",
        "model.layers.*.block_sparse_moe.input_linear": "blocks.*.mlp.experts[gate_up]",
        "model.layers.*.block_sparse_moe.output_linear": "blocks.*.mlp.experts[down]",
        "model.layers.*.block_sparse_moe.router": "blocks.*.mlp.router",  # as transformers 5 has them in memory
        "model.layers.*.block_sparse_moe.experts": "blocks.*.mlp.experts",
    }
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [
        fg.ModelSpec(("GraniteForCausalLM",), GraniteConfig, build, fg.DECODER_WEIGHTS, description="Granite 3"),
        fg.ModelSpec(("GraniteMoeForCausalLM",), GraniteMoeConfig, build, EXPERTS, description="Granite 3 MoE"),
    ]
