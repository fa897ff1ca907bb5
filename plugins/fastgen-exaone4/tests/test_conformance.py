"""EXAONE 4 against transformers, and its patterns of layers."""

from __future__ import annotations

import pytest
from fastgen_exaone4 import Exaone4Config, build
from transformers import Exaone4Config as TransformersConfig

from fastgen.api import ConfigError
from fastgen.testing import ModelConformance

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
}


class TestExaone4(ModelConformance):
    entry = "fastgen_exaone4"
    hf_config = {
        "hybrid": {
            "model_type": "exaone4",
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rms_norm_eps": 1e-3,
        },
        "full": {
            "model_type": "exaone4",
            "sliding_window": None,
            "layer_types": [FULL, FULL],
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 1000000.0,
            },
        },
        "no_layer_slides": {"model_type": "exaone4", "sliding_window": 8, "layer_types": [FULL, FULL]},
    }


def layers(**written):
    """For each layer: its window, and whether it has rope."""
    blocks = build(Exaone4Config.from_raw({**SIZES, **written})).blocks
    return [(block.attn.cached.scores.window, block.attn.rope is not None) for block in blocks]


def sliding(kinds):
    return [(8, True) if kind == SLIDING else (None, False) for kind in kinds]


@pytest.mark.parametrize("pattern", [2, 3, 4, 5])
def test_a10_a_pattern_that_is_a_number(pattern):
    assert layers(sliding_window_pattern=pattern) == sliding(
        TransformersConfig(**SIZES, sliding_window_pattern=pattern).layer_types
    )


def test_a10_no_pattern_is_every_fourth():
    assert layers() == sliding(TransformersConfig(**SIZES).layer_types)


def test_a10_a_pattern_of_letters():
    """As published; transformers 5 reads no letters, 4 did: repeated, and the last layer is full whatever they say."""
    assert layers(sliding_window_pattern="LLLG") == sliding([SLIDING, SLIDING, SLIDING, FULL] * 2 + [FULL])
    assert layers(sliding_window_pattern="GL") == sliding([FULL, SLIDING] * 4 + [FULL])


def test_a10_layer_types_win():
    kinds = [FULL, FULL, SLIDING] * 3
    assert layers(sliding_window_pattern="LLLG", layer_types=kinds) == sliding(kinds)


def test_a10_without_a_window_every_layer_is_full_and_has_rope():
    """As in the 1.2B: whatever the pattern says. (transformers 5 writes 0.)"""
    for pattern in (None, 0, 4, "LLLG"):
        assert layers(sliding_window=None, sliding_window_pattern=pattern) == [(None, True)] * 9


@pytest.mark.parametrize("pattern", ["", "LLX", "llg"])
def test_a_pattern_of_other_letters_is_refused(pattern):
    with pytest.raises(ConfigError, match=f"sliding_window_pattern must be made of L and G, got '{pattern}'"):
        layers(sliding_window_pattern=pattern)


@pytest.mark.parametrize("written", [{"sliding_window": None, "layer_types": [SLIDING] * 9}, {"layer_types": [FULL]}])
def test_layer_types_that_contradict_the_file_are_refused(written):
    with pytest.raises(ConfigError, match="layer_types"):
        layers(**written)
