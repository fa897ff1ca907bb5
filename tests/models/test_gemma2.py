"""Gemma 2 against transformers, and which layers slide."""

from __future__ import annotations

import pytest
from transformers import Gemma2Config as TransformersConfig

from fastgen.api import ConfigError, UnsupportedModelError
from fastgen.models.gemma2 import Gemma2Config, build
from fastgen.testing import ModelConformance

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = ["full_attention", "sliding_attention"]


class TestGemma2(ModelConformance):
    entry = "fastgen.models.gemma2"
    hf_config = {
        "plain": {
            "model_type": "gemma2",
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 8.0,
            "final_logit_softcapping": 10.0,
        },
        "uncapped": {
            "model_type": "gemma2",
            "head_dim": 8,
            "intermediate_size": 96,
            "sliding_window": 8,
            "layer_types": KINDS,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 8,
        },
    }


def windows(**written):
    decoder = build(Gemma2Config.from_raw({**SIZES, "head_dim": 8, **written}))
    return [block.attn.cached.scores.window for block in decoder.blocks]


def test_a10_every_other_layer_slides_from_the_first():
    """Old files name no layer types."""
    theirs = TransformersConfig(**SIZES, head_dim=8).layer_types
    assert windows(sliding_window=8) == [8 if kind == "sliding_attention" else None for kind in theirs]
    assert windows() == [4096, None, 4096, None, 4096]


def test_a10_layer_types_win():
    assert windows(sliding_window=8, layer_types=[*KINDS, *KINDS, KINDS[1]]) == [None, 8, None, 8, 8]


def test_caps_are_on_unless_the_file_says_null():
    on = build(Gemma2Config.from_raw(SIZES))
    assert (on.blocks[0].attn.cached.scores.softcap, on.head.softcap) == (50.0, 30.0)
    off = build(Gemma2Config.from_raw({**SIZES, "attn_logit_softcapping": None, "final_logit_softcapping": None}))
    assert (off.blocks[0].attn.cached.scores.softcap, off.head.softcap) == (None, None)


@pytest.mark.parametrize("written", [{"hidden_act": "gelu"}, {"hidden_act": "silu", "hidden_activation": None}])
def test_hidden_act_is_not_read(written):
    assert build(Gemma2Config.from_raw({**SIZES, **written})).blocks[0].mlp.activation == "gelu_pytorch_tanh"


@pytest.mark.parametrize("scalar", [0, 0.0, -16])
def test_a_scale_that_is_no_number_is_refused(scalar):
    with pytest.raises(ConfigError, match="query_pre_attn_scalar: must be greater than 0"):
        build(Gemma2Config.from_raw({**SIZES, "query_pre_attn_scalar": scalar}))


def test_seeing_both_ways_is_refused():
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention = True"):
        Gemma2Config.from_raw({**SIZES, "use_bidirectional_attention": True})
    Gemma2Config.from_raw({**SIZES, "use_bidirectional_attention": False})
