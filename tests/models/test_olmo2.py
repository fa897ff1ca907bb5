"""OLMo 2 and 3 against transformers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers import Olmo3Config as TransformersConfig

from fastgen.api import UnsupportedModelError
from fastgen.models.olmo2 import Olmo2Config, Olmo3Config, build
from fastgen.testing import ModelConformance
from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.testing.driver import HandDriver, load_decoder

KINDS = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.2}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": KINDS,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}


class TestOlmo2(ModelConformance):
    entry = "fastgen.models.olmo2"
    hf_config = {
        "plain": {"model_type": "olmo2"},
        "bias": {"model_type": "olmo2", "num_key_value_heads": 4, "attention_bias": True, "rms_norm_eps": 1e-3},
    }


class TestOlmo3(ModelConformance):
    entry = "fastgen.models.olmo2"
    hf_config = {
        "sliding": {
            "model_type": "olmo3",
            "sliding_window": 8,
            "layer_types": KINDS,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        "yarn": {
            "model_type": "olmo3",
            "sliding_window": 6,
            "layer_types": KINDS,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    }


@pytest.mark.parametrize("scaling", [None, YARN])
@torch.inference_mode()
def test_a7_ropes_of_files_of_transformers_4(tmp_path, scaling):
    """Flat; the scaling is of the full layers alone, and both kinds have the one theta."""
    tiny_checkpoint(tmp_path, TransformersConfig(**SIZES), tokenizer=False)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    del raw["rope_parameters"]
    file.write_text(json.dumps({**raw, "rope_theta": 500000.0, "rope_scaling": scaling}))
    ids = [3 + i * 7 % 60 for i in range(50)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    driver = HandDriver(load_decoder(tmp_path))
    got = driver.read(driver.add(ids), 7)
    assert (got - model(torch.tensor([ids])).logits[0]).abs().max() < 1e-4


def test_a10_three_of_four_layers_slide_where_no_layer_types_are_given():
    raw = {**SIZES, "num_hidden_layers": 9, "layer_types": None}
    windows = [block.attn.cached.scores.window for block in build(Olmo3Config.from_raw(raw)).blocks]
    theirs = TransformersConfig(**raw).layer_types
    assert windows == [8 if kind == "sliding_attention" else None for kind in theirs]


def test_olmo2_does_not_slide():
    with pytest.raises(UnsupportedModelError, match="sliding_window = 8"):
        Olmo2Config.from_raw({**SIZES, "layer_types": None})


def test_clipped_projections_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"clip_qkv = 8\.0"):
        Olmo2Config.from_raw({**SIZES, "layer_types": None, "sliding_window": None, "clip_qkv": 8.0})
