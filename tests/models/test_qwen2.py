"""Qwen 1.5 to 2.5: biases on queries, keys and values, and a window on the upper layers if it is switched on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from fastgen.core.hf_config import read_raw_config
from fastgen.errors import CheckpointError, ConfigError
from fastgen.testing import TINY, ModelConformance
from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.testing.driver import HandDriver, load_decoder

SLIDING = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
IDS = [5, 9, 33, 17, 40, 61, 8, 22, 12]


class TestQwen2(ModelConformance):
    entry = "fastgen.models.qwen2"
    hf_config: ClassVar = {
        "plain": {"model_type": "qwen2"},
        "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
        "window_switched_off": {**SLIDING, "use_sliding_window": False, "max_window_layers": 0},
        "window_on_upper_layers": {**SLIDING, "max_window_layers": 1, "num_hidden_layers": 3},
        "window_on_no_layer": {**SLIDING, "max_window_layers": 2},
        "layer_types": {**SLIDING, "max_window_layers": 1, "layer_types": ["sliding_attention", "full_attention"]},
        "head_dim": {"model_type": "qwen2", "head_dim": 16, "rope_parameters": {"rope_theta": 1e6}},
    }


@torch.inference_mode()
def logits(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and transformers'."""
    driver = HandDriver(load_decoder(directory))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return driver.read(driver.add(IDS), len(IDS)), model(torch.tensor([IDS])).logits[0]


def test_a9_large_biases(tmp_path: Path) -> None:
    """Biases of about 3 on q, k and v: a dropped one would change the best token. The output has none."""
    directory = tiny_checkpoint(tmp_path, Qwen2Config(**TINY), tokenizer=False)
    tensors = load_file(directory / "model.safetensors")
    biases = [name for name in tensors if name.endswith("bias")]
    assert {name.split(".")[-2] for name in biases} == {"q_proj", "k_proj", "v_proj"}
    for name in biases:
        tensors[name] *= 3 / tensors[name].std()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = logits(directory)
    assert (ours - theirs).abs().max() < 1e-4

    for which in ("q_proj", "k_proj", "v_proj"):
        dropped = {name: tensor * (not name.endswith(f"{which}.bias")) for name, tensor in tensors.items()}
        save_file(dropped, directory / "model.safetensors", metadata={"format": "pt"})
        assert (logits(directory)[0].argmax(-1) != theirs.argmax(-1)).any(), which


def test_a9_biases_the_family_has_or_has_not(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, Qwen2Config(**TINY), tokenizer=False)
    tensors = load_file(directory / "model.safetensors")
    extra = "model.layers.0.self_attn.o_proj.bias"
    save_file({**tensors, extra: torch.zeros(32)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=extra):
        load_decoder(directory)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attn\.qkv\[k\]\.bias"):
        load_decoder(directory)


def test_a_window_that_says_two_things_is_refused(tmp_path: Path) -> None:
    """Layer types that slide beside a switch that is off: transformers cannot run it either."""
    directory = tiny_checkpoint(tmp_path, Qwen2Config(**TINY), tokenizer=False)
    raw = {**read_raw_config(directory), "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"layer_types has sliding_attention layers, but use_sliding_window is false"):
        load_decoder(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with pytest.raises(ValueError, match="sliding_window"):
        model(torch.tensor([IDS]), use_cache=False)
