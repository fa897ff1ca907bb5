"""Qwen3: norms of each head's query and key, and heads of any width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
from transformers import Qwen3Config

from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.hf_config import read_raw_config
from fastgen.errors import CheckpointError
from fastgen.testing import TINY, ModelConformance
from fastgen.testing.checkpoints import tiny_checkpoint

QWEN3 = {"model_type": "qwen3", "head_dim": 16}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}


class TestQwen3(ModelConformance):
    entry = "fastgen.models.qwen3"
    hf_config: ClassVar = {
        "plain": QWEN3,
        "tied": {**QWEN3, "tie_word_embeddings": True},
        "head_dim_derived": {"model_type": "qwen3", "head_dim": 8},
        "attention_bias": {**QWEN3, "attention_bias": True},
        "window": {**QWEN3, **SLIDING, "max_window_layers": 1},
        "layer_types": {**QWEN3, **SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
        "yarn": {
            **QWEN3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    }


def test_a8_head_dim(tmp_path: Path) -> None:
    """16 of 32 / 4 = 8 everywhere, the norms of a head among them; the class's 128 where the file is silent; derived
    where it says null."""
    directory = tiny_checkpoint(tmp_path, Qwen3Config(**TINY, head_dim=16), tokenizer=False)
    options = EngineConfig.of({"device": "cpu", "num_blocks": 1, "block_size": 4})
    blueprint = draw(directory, options)
    attention = blueprint.model.blocks[1].attn
    assert attention.qkv.slots == {"q": 64, "k": 32, "v": 32}
    assert attention.out.in_features == 64
    assert attention.q_norm.size == attention.k_norm.size == attention.rope.config.rotary_dim == 16
    assert attention.cached.scores.scale == 16**-0.5
    assert blueprint.cache.bytes_per_block == 4 * 2 * 2 * 2 * 16 * 4  # tokens, layers, k and v, heads, width, float32

    raw = read_raw_config(directory)
    config = blueprint.spec.load().config
    del raw["head_dim"]
    assert config.from_raw(raw).head_dim == Qwen3Config(**TINY).head_dim == 128
    assert config.from_raw({**raw, "head_dim": None}).head_dim == 8
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is \[64, 32\], the model wants \[512, 32\]"):
        draw(directory, options)
