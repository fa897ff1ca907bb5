"""DeepSeek V2 and V3: latent attention, and experts behind routers of their own."""

from __future__ import annotations

from typing import ClassVar, Literal

from fastgen import api as fg
from fastgen_deepseek.weights import WEIGHTS


class DeepseekConfig(fg.HFConfig):
    spellings: ClassVar = {"head_dim": ("qk_rope_head_dim",)}  # the part of a head that turns: what the rope is for
    intermediate_size: fg.Count
    moe_intermediate_size: fg.Count
    attention_bias: bool = False
    q_lora_rank: fg.Count | None = 1536
    kv_lora_rank: fg.Count = 512
    qk_nope_head_dim: fg.Count = 128
    v_head_dim: fg.Count = 128
    n_routed_experts: fg.Count
    n_shared_experts: fg.Count
    num_experts_per_tok: fg.Count
    first_k_dense_replace: int
    moe_layer_freq: fg.Count = 1
    routed_scaling_factor: float
    num_nextn_predict_layers: int = 0


class DeepseekV2Config(DeepseekConfig):
    defaults: ClassVar = {
        "head_dim": 64,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    }
    mlp_bias: bool = False
    n_group: fg.Count | None = None
    topk_group: fg.Count | None = None
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"
    norm_topk_prob: Literal[False] = False  # the original code divides by the sum, transformers does not
    rope_interleave: Literal[True] = True


class DeepseekV3Config(DeepseekConfig):
    defaults: ClassVar = {
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    }
    n_group: fg.Count = 8
    topk_group: fg.Count = 4
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"
    norm_topk_prob: bool = True
    rope_interleave: bool = True
    num_nextn_predict_layers: int = 1


def build(c: DeepseekV2Config | DeepseekV3Config) -> fg.Decoder:
    from fastgen_deepseek.attention import LatentAttention
    from fastgen_deepseek.router import RoutedExperts, SigmoidRouter, SoftmaxRouter

    rope, tokens = fg.Rope(c.rope), fg.Table(c.vocab_size, c.hidden_size)
    bias = isinstance(c, DeepseekV2Config) and c.mlp_bias

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps)

    def router() -> SoftmaxRouter | SigmoidRouter:
        sizes, scale = (c.hidden_size, c.n_routed_experts, c.num_experts_per_tok), c.routed_scaling_factor
        if isinstance(c, DeepseekV3Config):
            return SigmoidRouter(*sizes, c.n_group, c.topk_group, scale, normalise=c.norm_topk_prob)
        groups = (c.n_group or 1, c.topk_group or 1) if c.topk_method == "group_limited_greedy" else (1, 1)
        return SoftmaxRouter(*sizes, *groups, scale)

    def mlp(layer: int) -> fg.MLP | fg.SharedExpert:
        if layer < c.first_k_dense_replace or layer % c.moe_layer_freq:
            return fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=bias)
        experts = fg.Experts(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, c.hidden_act)
        shared = fg.MLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts, c.hidden_act, bias=bias)
        return fg.SharedExpert(RoutedExperts(router(), experts), shared)

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[fg.PreNorm(norm(), LatentAttention(c, rope), norm(), mlp(n)) for n in range(c.num_hidden_layers)],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [
        fg.ModelSpec(("DeepseekV2ForCausalLM",), DeepseekV2Config, build, WEIGHTS, description="DeepSeek V2"),
        fg.ModelSpec(("DeepseekV3ForCausalLM",), DeepseekV3Config, build, WEIGHTS, description="DeepSeek V3 and R1"),
    ]
