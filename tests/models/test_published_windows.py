"""Config files as the hub's Gemma, OLMo and Granite models spell them (eight layers): the parts are transformers'."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastgen.core.layers import CachedAttention, Norm
from fastgen.core.layers.layer import building
from fastgen.core.plugin import registry

pytestmark = pytest.mark.slow

LAYERS = 8
GEMMA = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
OLMO = {"attention_bias": False, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008}
FILES: dict[str, dict[str, Any]] = {
    "gemma-2b": {
        **GEMMA,
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_activation": None,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 256000,
    },
    "gemma-2-27b": {
        **GEMMA,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "vocab_size": 256000,
    },
    "gemma-3-1b": {
        **GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "gemma-3-270m": {
        **GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "_sliding_window_pattern": 6,
        "head_dim": 256,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "use_bidirectional_attention": False,
        "vocab_size": 262144,
    },
    "OLMo-2-7B": {
        **OLMO,
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "Olmo-3-7B": {
        **OLMO,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 100278,
    },
    "granite-3.1-8b": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "logits_scaling": 16.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "granite-3.0-1b-a400m": {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 4096,
        "num_attention_heads": 16,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", FILES)
def test_published_config(name: str) -> None:
    raw = FILES[name] | {"num_hidden_layers": LAYERS}
    told = AutoConfig.for_model(**deepcopy(raw))  # which writes into the rope's
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(told)
    family = registry().find_model(raw["architectures"]).load()
    config = family.config.from_raw(raw)
    with building(torch.float32, torch.device("meta")):
        ours = family.build(config)
    assert count(ours) == count(theirs)
    assert config.tie_word_embeddings == told.tie_word_embeddings
    assert config.max_position_embeddings == told.max_position_embeddings
    assert {module.eps for module in ours.modules() if isinstance(module, Norm)} == {told.rms_norm_eps}

    kinds = getattr(told, "layer_types", None) or ["full_attention"] * LAYERS
    turned = next(module for module in theirs.modules() if type(module).__name__.endswith("RotaryEmbedding"))
    fresh = type(turned)(told)  # not on the meta device
    for kind, block, layer in zip(kinds, ours.blocks, theirs.model.layers, strict=True):
        scores = next(module for module in block.modules() if isinstance(module, CachedAttention)).scores
        assert scores.window == (told.sliding_window if kind == "sliding_attention" else None)
        assert scores.scale == layer.self_attn.scaling
        prefix = f"{kind}_" if hasattr(fresh, f"{kind}_inv_freq") else ""
        assert torch.equal(block.attn.rope.inverse, getattr(fresh, f"{prefix}inv_freq"))
        assert block.attn.rope.scale == getattr(fresh, f"{prefix}attention_scaling")
