"""Qwen3-MoE: Qwen3's attention, routed experts without a shared one, and one window for all layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.hf_config import read_raw_config
from fastgen.errors import ConfigError, UnsupportedModelError
from fastgen.testing import TINY, ModelConformance
from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.testing.driver import HandDriver, load_decoder

SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
MOE = {"model_type": "qwen3_moe", **SIZES}
IDS = [5, 9, 33, 17, 40, 61, 8, 22, 12]


class TestQwen3Moe(ModelConformance):
    entry = "fastgen.models.qwen3_moe"
    hf_config: ClassVar = {
        "plain": MOE,
        "normalised": {**MOE, "norm_topk_prob": True, "num_experts_per_tok": 3},
        "mlp_only_layers": {**MOE, "norm_topk_prob": True, "mlp_only_layers": [0]},
        "sparse_step": {**MOE, "decoder_sparse_step": 2, "num_hidden_layers": 3},
        "attention_bias": {**MOE, "attention_bias": True},
        "window": {**MOE, "use_sliding_window": True, "sliding_window": 8},
        "window_switched_off": {**MOE, "use_sliding_window": False, "sliding_window": 8},
        "tied": {**MOE, "tie_word_embeddings": True},
    }


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, Qwen3MoeConfig(**TINY, **SIZES), tokenizer=False)


def logits(directory: Path) -> torch.Tensor:
    driver = HandDriver(load_decoder(directory))
    return driver.read(driver.add(IDS), len(IDS))


def test_stacked_experts(tiny: Path, tmp_path: Path) -> None:
    """As transformers 5 writes them if it is told to keep its own layout."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert torch.equal(logits(tmp_path / "stacked"), logits(tiny))


def test_number_of_experts_has_two_spellings(tiny: Path) -> None:
    """Published files say num_experts; transformers 5 writes num_local_experts."""
    raw = read_raw_config(tiny)
    assert raw["num_local_experts"] == 4
    assert "num_experts" not in raw
    before = logits(tiny)
    del raw["num_local_experts"]
    (tiny / "config.json").write_text(json.dumps({**raw, "num_experts": 4}))
    assert torch.equal(logits(tiny), before)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"num_experts": 3}, ConfigError, "num_experts = 3 and num_local_experts = 4"),
        ({"num_experts_per_tok": 5}, ConfigError, "visits 5 of 4 experts"),
        ({"decoder_sparse_step": 0}, ConfigError, "decoder_sparse_step"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, UnsupportedModelError, "layer_types"),
        ({"routed_scaling_factor": 2.5}, UnsupportedModelError, "routed_scaling_factor = 2.5"),
        ({"scoring_func": "sigmoid"}, UnsupportedModelError, "scoring_func = 'sigmoid'"),
        ({"rope_scaling": {"type": "su2", "factor": 2.0}}, UnsupportedModelError, "'su2'"),
    ],
)
def test_refused(tiny: Path, changes: dict[str, Any], error: type[Exception], named: str) -> None:
    (tiny / "config.json").write_text(json.dumps({**read_raw_config(tiny), **changes}))
    with pytest.raises(error, match=named):
        draw(tiny, EngineConfig.of({"device": "cpu"}))
