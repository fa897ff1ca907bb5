"""Granite, dense and with experts, against transformers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteMoeConfig as TransformersConfig

from fastgen.errors import ConfigError
from fastgen.models.granite import GraniteConfig, build
from fastgen.testing import ModelConformance
from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.testing.driver import HandDriver, load_decoder

MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


class TestGranite(ModelConformance):
    entry = "fastgen.models.granite"
    hf_config = {
        "plain": {"model_type": "granite", **MULTIPLIERS},
        "biases": {
            "model_type": "granite",
            **MULTIPLIERS,
            "attention_multiplier": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    }


class TestGraniteMoe(ModelConformance):
    entry = "fastgen.models.granite"
    hf_config = {
        "plain": {
            "model_type": "granitemoe",
            **MULTIPLIERS,
            "intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    }


def test_logits_divided_by_zero_are_refused():
    with pytest.raises(ConfigError, match="logits_scaling: must be greater than 0"):
        build(GraniteConfig.from_raw({**SIZES, "logits_scaling": 0}))


def test_multipliers_a_file_leaves_out_are_one():
    """The scores' too: not the usual root of the head's width."""
    decoder = build(GraniteConfig.from_raw(SIZES))
    assert decoder.embed.scale == decoder.head.scale == decoder.blocks[0].weight == 1.0
    assert decoder.blocks[0].attn.cached.scores.scale == 1.0


def rename(names: dict[str, str]):
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for old, new in names.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        return tensors

    return change


@pytest.mark.parametrize("names", ["published", "of transformers 5"])
def test_both_names_of_the_experts(tmp_path, names):
    tiny_checkpoint(tmp_path, TransformersConfig(**SIZES, num_local_experts=4), tokenizer=False)
    ids = list(range(3, 20))

    def logits() -> torch.Tensor:
        driver = HandDriver(load_decoder(tmp_path))
        return driver.read(driver.add(ids), 5)

    want = logits()
    pairs = {
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    }
    if names == "published":
        pairs = {new: old for old, new in pairs.items()}
    file = tmp_path / "model.safetensors"
    renamed = rename(pairs)(load_file(file))
    assert any(name.endswith(next(iter(pairs.values()))) for name in renamed)
    save_file(renamed, file, metadata={"format": "pt"})
    assert torch.equal(logits(), want)
