"""Config files as the hub's models spell them (two layers of each): the parts come out as large as transformers'."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastgen.core.layers import Norm, Rope
from fastgen.core.layers.layer import building
from fastgen.core.plugin import registry

pytestmark = pytest.mark.slow

SUMMARY = {"summary_activation": None, "summary_first_dropout": 0.1, "summary_type": "cls_index"}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "hidden_act": "silu",
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [4.5] * 48, "short_factor": [1.25] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
}
FILES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        **SUMMARY,
    },
    "pythia": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "num_attention_heads": 8,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "opt_350m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "do_layer_norm_before": False,
        "ffn_dim": 4096,
        "hidden_size": 1024,
        "max_position_embeddings": 2048,
        "num_attention_heads": 16,
        "prefix": "</s>",
        "vocab_size": 50272,
        "word_embed_proj_dim": 512,
    },
    "falcon_7b": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "bias": False,
        "hidden_size": 4544,
        "layer_norm_epsilon": 1e-05,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
    "falcon_40b": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "alibi": False,
        "bias": False,
        "hidden_size": 8192,
        "layer_norm_epsilon": 1e-05,
        "new_decoder_architecture": True,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
    "falcon_rw_1b": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "alibi": True,
        "bias": True,
        "hidden_size": 2048,
        "layer_norm_epsilon": 1e-05,
        "multi_query": False,
        "new_decoder_architecture": False,
        "num_attention_heads": 32,
        "parallel_attn": False,
        "vocab_size": 50304,
    },
    "phi_2": {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 51200,
    },
    "phi_3_5_mini": {
        **PHI3,
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "phi_4_mini": {
        **PHI3,
        "full_attn_mod": 1,
        "hidden_size": 3072,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "stablelm_2_12b": {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.25,
        "qk_layernorm": True,
        "rope_scaling": None,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "use_qkv_bias": False,
        "vocab_size": 100352,
    },
}


@pytest.mark.parametrize("name", FILES)
def test_published_config(name: str) -> None:
    raw = FILES[name] | {"n_layer" if "n_head" in FILES[name] else "num_hidden_layers": 2}
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**deepcopy(raw)))  # which writes into the rope's
    family = registry().find_model(raw["architectures"]).load()
    config = family.config.from_raw(raw)
    with building(torch.float32, torch.device("meta")):
        ours = family.build(config)

    def count(model: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    assert count(ours) == count(theirs)
    assert config.tie_word_embeddings == theirs.config.tie_word_embeddings
    assert config.max_position_embeddings == theirs.config.max_position_embeddings
    their_eps = {getattr(module, "eps", getattr(module, "variance_epsilon", None)) for module in theirs.modules()}
    assert {module.eps for module in ours.modules() if isinstance(module, Norm)} == their_eps - {None}
    for rope in (module for module in ours.modules() if isinstance(module, Rope)):
        turned = next(module for module in theirs.modules() if hasattr(module, "inv_freq"))
        fresh = type(turned)(theirs.config)  # not on the meta device
        assert torch.equal(rope.inverse, fresh.inv_freq)
        assert rope.scale == fresh.attention_scaling
