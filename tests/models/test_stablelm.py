"""StableLM."""

from __future__ import annotations

import torch

from fastgen.testing import ModelConformance

THREE_B = {"model_type": "stablelm", "hidden_size": 64, "num_key_value_heads": 4}


class TestStableLm(ModelConformance):
    entry = "fastgen.models.stablelm"
    hf_config = {
        "3b": THREE_B,  # a quarter of each head turns
        "1_6b": {"model_type": "stablelm", "use_qkv_bias": True},
        "12b": {
            "model_type": "stablelm",
            "hidden_size": 64,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_theta": 500,
        },
        "norms_in_sequence": {"model_type": "stablelm", "qk_layernorm": True, "partial_rotary_factor": 0.5},
    }


def test_the_first_files(save, prompt):
    """``StableLMEpochForCausalLM``: other names in the config, the same in the weights."""
    saved = save(**THREE_B, partial_rotary_factor=0.5)
    want = saved.logits(prompt)
    raw = saved.config
    for name in ("rope_parameters", "layer_norm_eps", "num_attention_heads"):
        del raw[name]
    raw |= {"architectures": ["StableLMEpochForCausalLM"], "norm_eps": 1e-5, "num_heads": 4, "rope_pct": 0.5}
    saved.config = raw
    assert torch.equal(saved.logits(prompt), want)
