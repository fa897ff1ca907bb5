"""Qwen2-MoE: the shared expert behind its gate, weights of the chosen normalised or not, and dense layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.hf_config import read_raw_config
from fastgen.core.layers import Linear, MoE
from fastgen.errors import ConfigError, UnsupportedModelError
from fastgen.kernels.ops import KernelTable
from fastgen.kernels.reference import IMPLEMENTATIONS
from fastgen.testing import TINY, ModelConformance
from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.testing.driver import HandDriver, load_decoder

SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
MOE = {"model_type": "qwen2_moe", **SIZES}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}
IDS = [5, 9, 33, 17, 40, 61, 8, 22, 12]


class TestQwen2Moe(ModelConformance):
    entry = "fastgen.models.qwen2_moe"
    hf_config: ClassVar = {
        "plain": MOE,
        "normalised": {**MOE, "norm_topk_prob": True},
        "mlp_only_layers": {**MOE, "mlp_only_layers": [0], "norm_topk_prob": True},
        "sparse_step": {**MOE, "decoder_sparse_step": 2, "num_hidden_layers": 3},
        "no_qkv_bias": {**MOE, "qkv_bias": False},
        "window": {**MOE, **SLIDING, "max_window_layers": 3, "num_hidden_layers": 4},
        "layer_types": {**MOE, **SLIDING, "layer_types": ["full_attention", "sliding_attention"]},
        "tied": {**MOE, "tie_word_embeddings": True},
    }


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, Qwen2MoeConfig(**TINY, **SIZES), tokenizer=False)


def logits(directory: Path) -> torch.Tensor:
    driver = HandDriver(load_decoder(directory))
    return driver.read(driver.add(IDS), len(IDS))


class Recorder(torch.nn.Module):
    """Stands for the experts: keeps what the router decided."""

    count = 4

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.chosen, self.weights = chosen, weights
        return x


@pytest.mark.parametrize(("normalise", "weights"), [(False, [0.644, 0.237]), (True, [0.731, 0.269])])
def test_a14_router_arithmetic(normalise: bool, weights: list[float]) -> None:
    """Scores 2, 1, 0, -1 and two experts: softmax over all four first, divided by the sum of two only if told to."""
    router, recorder = Linear(1, 4), Recorder()
    router.weight.copy_(torch.tensor([[0.0], [2.0], [-1.0], [1.0]]))
    moe = MoE(router, recorder, 2, normalise=normalise)
    router.bind(KernelTable("cpu", "float32", list(IMPLEMENTATIONS)))
    moe(torch.ones(3, 1))
    assert recorder.chosen.tolist() == [[1, 3]] * 3
    assert recorder.weights.tolist() == [pytest.approx(weights, abs=5e-4)] * 3


def test_a14_normalising_is_read_from_the_file(tiny: Path) -> None:
    """The flag leaves no trace in the tensors: the same weights give other logits, as transformers' do."""
    raw = read_raw_config(tiny)
    found = []
    for value in (False, True):
        (tiny / "config.json").write_text(json.dumps({**raw, "norm_topk_prob": value}))
        found.append(logits(tiny))
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
        with torch.inference_mode():
            assert (found[-1] - model(torch.tensor([IDS])).logits[0]).abs().max() < 1e-4
    assert (found[0] - found[1]).abs().max() > 1e-2
    del raw["norm_topk_prob"]
    (tiny / "config.json").write_text(json.dumps(raw))
    assert torch.equal(logits(tiny), found[0])  # the class's default


def test_stacked_experts(tiny: Path, tmp_path: Path) -> None:
    """As transformers 5 writes them if it is told to keep its own layout."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert torch.equal(logits(tmp_path / "stacked"), logits(tiny))


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"num_experts_per_tok": 5}, ConfigError, "visits 5 of 4 experts"),
        ({"num_experts": 0}, ConfigError, "num_experts"),
        ({"decoder_sparse_step": 0}, ConfigError, "decoder_sparse_step"),
        ({"mlp_only_layers": "0"}, ConfigError, "mlp_only_layers"),
        ({"num_local_experts": 3}, ConfigError, "num_experts = 4 and num_local_experts = 3"),
        ({"layer_types": ["linear_attention"] * 2}, UnsupportedModelError, "'linear_attention'"),
        ({"embedding_multiplier": 2.0}, UnsupportedModelError, "embedding_multiplier = 2.0"),
    ],
)
def test_refused(tiny: Path, changes: dict[str, Any], error: type[Exception], named: str) -> None:
    (tiny / "config.json").write_text(json.dumps({**read_raw_config(tiny), **changes}))
    with pytest.raises(error, match=named):
        draw(tiny, EngineConfig.of({"device": "cpu"}))
