"""Qwen3-MoE: Qwen3's attention and routed experts, dense in the layers that the config names."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class Qwen3MoeConfig(fg.HFConfig):
    spellings: ClassVar = {"num_experts": ("num_experts", "num_local_experts")}
    defaults: ClassVar = {"max_position_embeddings": 32768, "num_key_value_heads": 4}
    intermediate_size: fg.Count  # of the dense layers
    moe_intermediate_size: fg.Count = 768
    num_experts: fg.Count = 128
    num_experts_per_tok: fg.Count = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: fg.Count = 1
    mlp_only_layers: list[int] | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096


def build(c: Qwen3MoeConfig) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm(size: int = c.hidden_size) -> fg.RMSNorm:
        return fg.RMSNorm(size, c.norm_eps)

    def mlp(layer: int) -> fg.MLP | fg.MoE:
        if layer in (c.mlp_only_layers or ()) or (layer + 1) % c.decoder_sparse_step:
            return fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act)
        experts = fg.Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size, c.hidden_act)
        router = fg.Linear(c.hidden_size, c.num_experts)
        return fg.MoE(router, experts, c.num_experts_per_tok, normalise=c.norm_topk_prob)

    def block(layer: int, window: int | None) -> fg.Block:
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
        return fg.PreNorm(norm(), attention, norm(), mlp(layer))

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block(layer, window) for layer, window in enumerate(c.layer_windows())],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


WEIGHTS = fg.DECODER_WEIGHTS.but(
    {
        "model.layers.*.mlp.gate": "blocks.*.mlp.router",
        **fg.expert_rules("model.layers.*.mlp.experts", "blocks.*.mlp.experts"),
    }
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("Qwen3MoeForCausalLM",), Qwen3MoeConfig, build, WEIGHTS, description="Qwen3-MoE")]
