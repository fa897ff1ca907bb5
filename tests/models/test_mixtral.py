"""Mixtral: both layouts of experts in files, and the router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.hf_config import read_raw_config
from fastgen.errors import CheckpointError, ConfigError, UnsupportedModelError
from fastgen.testing import TINY, ModelConformance
from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.testing.driver import HandDriver, load_decoder

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4}
IDS = [5, 9, 33, 17, 40, 61, 8, 22, 12]


class TestMixtral(ModelConformance):
    entry = "fastgen.models.mixtral"
    hf_config: ClassVar = {
        "plain": MIXTRAL,
        "window": {**MIXTRAL, "sliding_window": 8},
        "head_dim": {**MIXTRAL, "head_dim": 16, "num_experts_per_tok": 3},
        "tied": {**MIXTRAL, "tie_word_embeddings": True},
    }


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, MixtralConfig(**TINY, num_local_experts=3), tokenizer=False)


def logits(directory: Path, ids: list[int] = IDS) -> torch.Tensor:
    driver = HandDriver(load_decoder(directory))
    return driver.read(driver.add(ids), len(ids))


@torch.inference_mode()
def reference(directory: Path, ids: list[int] = IDS) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model(torch.tensor([ids])).logits[0]


def rewrite(directory: Path, **changes: Any) -> Path:
    raw = {name: value for name, value in {**read_raw_config(directory), **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def stack(directory: Path, root: str) -> None:
    """The file as transformers 5 holds it in memory: all experts of a layer in two tensors."""
    tensors = load_file(directory / "model.safetensors")
    for layer in range(2):
        place = f"model.layers.{layer}.block_sparse_moe"

        def take(which: str, place: str = place) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{place}.experts.{expert}.{which}.weight") for expert in range(3)])

        new = f"model.layers.{layer}.{root}"
        tensors[f"{new}.experts.gate_up_proj"] = torch.cat([take("w1"), take("w3")], 1)
        tensors[f"{new}.experts.down_proj"] = take("w2")
        tensors[f"{new}.gate.weight"] = tensors.pop(f"{place}.gate.weight")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("root", ["mlp", "block_sparse_moe"])
def test_stacked_experts(tiny: Path, root: str) -> None:
    """The other layout, which transformers reads too, gives the same logits to the bit."""
    one_by_one = logits(tiny)
    stack(tiny, root)
    assert torch.equal(logits(tiny), one_by_one)
    assert (reference(tiny) - one_by_one).abs().max() < 1e-4


def test_transformers_writes_both_layouts(tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "stacked" / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in load_file(tiny / "model.safetensors")
    assert torch.equal(logits(tmp_path / "stacked"), logits(tiny))


def test_stacked_experts_of_another_number_are_refused(tiny: Path) -> None:
    stack(tiny, "mlp")
    with pytest.raises(CheckpointError, match=r"experts\.(down|gate_up)_proj"):
        logits(rewrite(tiny, num_local_experts=4))


def test_an_expert_missing_from_the_file_is_refused(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tiny / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks\.1\.mlp\.experts\[2\.up\]"):
        logits(tiny)


def test_a14_an_expert_nobody_chose(tiny: Path) -> None:
    """Expert 1 is never first: its score lies half-way between two that mirror each other."""
    tensors = load_file(tiny / "model.safetensors")
    for layer in range(2):
        rows = tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
        rows[1], rows[2] = 0, -rows[0]
    save_file(tensors, tiny / "model.safetensors", metadata={"format": "pt"})
    decoder = load_decoder(rewrite(tiny, num_experts_per_tok=1))
    chosen: list[torch.Tensor] = []
    for block in decoder.blocks:
        block.mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    driver = HandDriver(decoder)
    got = driver.read(driver.add(IDS), len(IDS))
    assert set(torch.cat(chosen).flatten().tolist()) == {0, 2}
    assert (got - reference(tiny)).abs().max() < 1e-4


def test_a14_one_expert_has_all_the_weight(tiny: Path) -> None:
    """k = 1, normalised: 1, whatever the router says."""
    seen: list[torch.Tensor] = []
    decoder = load_decoder(rewrite(tiny, num_experts_per_tok=1))
    decoder.blocks[0].mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    driver = HandDriver(decoder)
    driver.read(driver.add(IDS), len(IDS))
    assert torch.equal(seen[0], torch.ones(len(IDS), 1))


def test_number_of_experts_has_two_spellings(tiny: Path) -> None:
    def drawn(**changes: Any) -> Any:
        return draw(rewrite(tiny, **changes), EngineConfig.of({"device": "cpu"})).model_config

    assert drawn().num_local_experts == 3
    assert drawn(num_local_experts=..., num_experts=3).num_local_experts == 3
    with pytest.raises(ConfigError, match=r"num_local_experts = 4 and num_experts = 3"):
        drawn(num_local_experts=4)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"num_experts_per_tok": 4}, ConfigError, "visits 4 of 3 experts"),
        ({"num_experts_per_tok": 0}, ConfigError, "num_experts_per_tok"),
        ({"num_local_experts": 0}, ConfigError, "num_local_experts"),
        ({"num_local_experts": 10**30}, ConfigError, "num_local_experts"),
        ({"num_local_experts": 2**31 - 1}, ConfigError, "2147483647 experts"),
        (
            {"intermediate_size": 2**31 - 1, "hidden_size": 2**20, "head_dim": 8, "num_local_experts": 2**16},
            ConfigError,
            "part of shape",
        ),
        ({"sliding_window": 10**30}, ConfigError, "sliding_window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, UnsupportedModelError, "layer_types"),
        ({"logit_scale": 2.0}, UnsupportedModelError, "logit_scale = 2.0"),
    ],
)
def test_refused(tiny: Path, changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        draw(rewrite(tiny, **changes), EngineConfig.of({"device": "cpu"}))
