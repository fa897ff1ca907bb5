"""Phi-1.5 and 2."""

from __future__ import annotations

import pytest

from fastgen.errors import UnsupportedModelError
from fastgen.testing import ModelConformance


class TestPhi(ModelConformance):
    entry = "fastgen.models.phi"
    hf_config = {
        "phi_1_5": {"model_type": "phi", "hidden_size": 64, "num_key_value_heads": 4},  # half of each head turns
        "phi_2": {"model_type": "phi", "hidden_size": 64, "num_key_value_heads": 4, "partial_rotary_factor": 0.4},
        "qk_layernorm": {"model_type": "phi", "qk_layernorm": True, "hidden_act": "gelu"},
    }


def test_a_tied_head_is_refused(save):
    saved = save(model_type="phi")
    saved.config = saved.config | {"tie_word_embeddings": True}
    saved.tensors = {name: tensor for name, tensor in saved.tensors.items() if name != "lm_head.weight"}
    with pytest.raises(UnsupportedModelError, match="tie_word_embeddings = True"):
        saved.logits([5])
