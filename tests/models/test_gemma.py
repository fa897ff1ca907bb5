"""Gemma 1 against transformers, and the names its files have for the activation."""

from __future__ import annotations

import pytest

from fastgen.models.gemma import GemmaConfig, build
from fastgen.testing import ModelConformance

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class TestGemma(ModelConformance):
    entry = "fastgen.models.gemma"
    hf_config = {
        "plain": {"model_type": "gemma", "head_dim": 16},
        "multi_query": {"model_type": "gemma", "head_dim": 8, "num_key_value_heads": 1, "hidden_act": "gelu"},
        "bias": {"model_type": "gemma", "head_dim": 8, "attention_bias": True, "rms_norm_eps": 1e-5},
    }


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({}, "gelu_pytorch_tanh"),
        ({"hidden_act": "gelu"}, "gelu_pytorch_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_pytorch_tanh"),
        ({"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"hidden_act": "relu", "hidden_activation": "gelu_pytorch_tanh"}, "relu"),
        ({"hidden_act": "gelu_new"}, "gelu_new"),
    ],
)
def test_activation(written, meant):
    """The first files say "gelu" and mean its approximation; hidden_activation is not read (transformers' neither)."""
    decoder = build(GemmaConfig.from_raw({**SIZES, **written}))
    assert decoder.blocks[0].mlp.activation == meant


def test_defaults_a_file_may_leave_out():
    """A8: head_dim is 256 and not hidden / heads; transformers 4 leaves tie_word_embeddings out, which is true."""
    c = GemmaConfig.from_raw({**SIZES, "num_attention_heads": 16, "num_key_value_heads": 16})
    assert (c.head_dim, c.max_position_embeddings, c.tie_word_embeddings) == (256, 8192, True)
