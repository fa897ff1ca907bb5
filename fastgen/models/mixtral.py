"""Mixtral: Mistral's attention, and experts of which each token visits a few."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg


class MixtralConfig(fg.HFConfig):
    spellings: ClassVar = {"num_local_experts": ("num_local_experts", "num_experts")}
    defaults: ClassVar = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "norm_eps": 1e-5}
    default_rope_theta = 1_000_000.0
    intermediate_size: fg.Count
    num_local_experts: fg.Count = 8
    num_experts_per_tok: fg.Count = 2
    sliding_window: int | None = None


def build(c: MixtralConfig) -> fg.Decoder:
    rope = fg.Rope(c.rope)
    tokens = fg.Table(c.vocab_size, c.hidden_size)

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.hidden_size, c.norm_eps)

    def block(window: int | None) -> fg.Block:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        attention = fg.Attention(c.hidden_size, *heads, rope=rope, window=window)
        router = fg.Linear(c.hidden_size, c.num_local_experts)
        experts = fg.Experts(c.num_local_experts, c.hidden_size, c.intermediate_size, c.hidden_act)
        mlp = fg.MoE(router, experts, c.num_experts_per_tok, normalise=True)
        return fg.PreNorm(norm(), attention, norm(), mlp)

    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[block(window) for window in c.layer_windows()],
        norm=norm(),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


def weights(mlp: str) -> dict[str, str]:
    return {
        f"{mlp}.gate": "blocks.*.mlp.router",
        **fg.expert_rules(f"{mlp}.experts", "blocks.*.mlp.experts", gate="w1", up="w3", down="w2"),
    }


# Published files have the first name; transformers 5 has the second in memory, and in files if told to keep them.
WEIGHTS = fg.DECODER_WEIGHTS.but(weights("model.layers.*.block_sparse_moe") | weights("model.layers.*.mlp"))


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    return [fg.ModelSpec(("MixtralForCausalLM",), MixtralConfig, build, WEIGHTS, description="Mixtral")]
