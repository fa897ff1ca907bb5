"""DeepSeek V2 and V3 against transformers."""

from __future__ import annotations

from fastgen.testing import ModelConformance

ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}


class TestDeepseekV2(ModelConformance):
    entry = "fastgen_deepseek"
    hf_config = {
        "lite": {
            "model_type": "deepseek_v2",
            **ATTENTION,
            **EXPERTS,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        "whole": {
            "model_type": "deepseek_v2",
            **ATTENTION,
            **EXPERTS,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "rms_norm_eps": 1e-3,
        },
    }


class TestDeepseekV3(ModelConformance):
    entry = "fastgen_deepseek"
    hf_config = {
        "plain": {
            "model_type": "deepseek_v3",
            **ATTENTION,
            **EXPERTS,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "one_group": {
            "model_type": "deepseek_v3",
            **ATTENTION,
            **EXPERTS,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "attention_bias": True,
        },
    }
