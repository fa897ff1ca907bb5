"""Tiny checkpoints: loaded by transformers, far from ties, and sensitive to every tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, FalconConfig, GPT2Config, OPTConfig, Qwen3MoeConfig

from fastgen.testing.checkpoints import split_shards, tiny_checkpoint, tiny_llama

pytestmark = pytest.mark.slow


IDS = torch.randint(3, 64, (4, 40), generator=torch.Generator().manual_seed(1))


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(IDS).logits


VARIANTS = [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True, "head_dim": 16}]


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
def test_logits_are_spread_and_far_from_ties(tmp_path: Path, overrides: dict[str, Any]) -> None:
    found = logits(tiny_llama(tmp_path, tokenizer=False, **overrides))
    best, second = found.topk(2).values.unbind(-1)
    assert 2 < found.std() < 8
    assert (best - second).median() > 0.5
    assert (best - second).min() > 1e-3
    assert (found.argmax(-1) == IDS).float().mean() < 0.3  # not just the input again


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
def test_every_tensor_matters(tmp_path: Path, overrides: dict[str, Any]) -> None:
    """Dropping (norms: resetting) any one tensor changes the best token somewhere."""
    directory = tiny_llama(tmp_path, tokenizer=False, **overrides)
    file = directory / "model.safetensors"
    tensors, whole = load_file(file), logits(directory)
    for name, tensor in tensors.items():
        plain = torch.ones_like(tensor) if "norm" in name else torch.zeros_like(tensor)
        save_file({**tensors, name: plain}, file, metadata={"format": "pt"})
        assert (logits(directory).argmax(-1) != whole.argmax(-1)).any(), name


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    files = [
        (tiny_llama(tmp_path / name, seed=seed, tokenizer=False) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert files[0] == files[1] != files[2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_with_a_tokenizer(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer.decode(tokenizer("naïve ☕", add_special_tokens=False).input_ids) == "naïve ☕"
    assert tokenizer.chat_template
    with pytest.raises(ValueError, match="vocab_size 64 does not cover"):
        tiny_llama(tmp_path / "small", vocab_size=64)
    assert json.loads((tiny_llama(tmp_path / "large", vocab_size=300) / "config.json").read_text())["vocab_size"] == 300


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype(tmp_path: Path, dtype: str) -> None:
    directory = tiny_llama(tmp_path, dtype=dtype, tokenizer=False)
    assert {str(tensor.dtype) for tensor in load_file(directory / "model.safetensors").values()} == {f"torch.{dtype}"}
    assert json.loads((directory / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("shards", [2, 5, 21])
def test_shards(tmp_path: Path, shards: int) -> None:
    whole = logits(tiny_llama(tmp_path / "whole", tokenizer=False))
    directory = tiny_llama(tmp_path / "sharded", tokenizer=False, shards=shards)
    assert len(list(directory.glob("*.safetensors"))) == shards
    assert torch.equal(logits(directory), whole)


def test_more_shards_than_tensors(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path, tokenizer=False)
    with pytest.raises(ValueError, match="21 tensors over 22 shards"):
        split_shards(directory, 22)


COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
        OPTConfig(**COMMON, ffn_dim=64, word_embed_proj_dim=32, pad_token_id=1),
        FalconConfig(**COMMON, alibi=False, bias=True),
        Qwen3MoeConfig(
            **COMMON, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_other_families(tmp_path: Path, config: Any) -> None:
    found = logits(tiny_checkpoint(tmp_path, config, tokenizer=False))
    best, second = found.topk(2).values.unbind(-1)
    assert 2 < found.std() < 8
    assert (best - second).median() > 0.3
