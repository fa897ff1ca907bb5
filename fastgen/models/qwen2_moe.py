"""Qwen 1.5-MoE and Qwen2-MoE: routed experts, and one that every token visits, behind a gate of its own."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class Qwen2MoeConfig(fg.HFConfig):
    spellings: ClassVar = {"num_experts": ("num_experts", "num_local_experts")}
    defaults: ClassVar = {"max_position_embeddings": 32768, "num_key_value_heads": 16}
    intermediate_size: fg.Count  # of the dense layers
    moe_intermediate_size: fg.Count = 1408
    shared_expert_intermediate_size: fg.Count = 5632
    num_experts: fg.Count = 60
    num_experts_per_tok: fg.Count = 4
    norm_topk_prob: bool = False
    decoder_sparse_step: fg.Count = 1
    mlp_only_layers: list[int] | None = None
    qkv_bias: bool = True
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None


def build(c: Qwen2MoeConfig) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps)

    def dense(width: int) -> fg.MLP:
        return fg.MLP(c.hidden_size, width, c.hidden_act)

    def mlp(layer: int) -> fg.MLP | fg.SharedExpert:
        if layer in (c.mlp_only_layers or ()) or (layer + 1) % c.decoder_sparse_step:
            return dense(c.intermediate_size)
        experts = fg.Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size, c.hidden_act)
        router = fg.Linear(c.hidden_size, c.num_experts)
        routed = fg.MoE(router, experts, c.num_experts_per_tok, normalise=c.norm_topk_prob)
        return fg.SharedExpert(routed, dense(c.shared_expert_intermediate_size), fg.Linear(c.hidden_size, 1))

    def block(layer: int, window: int | None) -> fg.Block:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        attention = fg.Attention(c.hidden_size, *heads, rope=rope, bias=c.qkv_bias, window=window)
        return fg.PreNorm(norm(), attention, norm(), mlp(layer))

    windows = c.layer_windows(lambda layer: layer % 2 == 0 and layer < c.max_window_layers)
    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block(layer, window) for layer, window in enumerate(windows)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


WEIGHTS = fg.DECODER_WEIGHTS.but(
    {
        "model.layers.*.mlp.gate": "blocks.*.mlp.routed.router",
        **fg.expert_rules("model.layers.*.mlp.experts", "blocks.*.mlp.routed.experts"),
        "model.layers.*.mlp.shared_expert.gate_proj": "blocks.*.mlp.shared.up[gate]",
        "model.layers.*.mlp.shared_expert.up_proj": "blocks.*.mlp.shared.up[up]",
        "model.layers.*.mlp.shared_expert.down_proj": "blocks.*.mlp.shared.down",
        "model.layers.*.mlp.shared_expert_gate": "blocks.*.mlp.gate",
    }
)


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("Qwen2MoeForCausalLM",), Qwen2MoeConfig, build, WEIGHTS, description="Qwen2-MoE")]
