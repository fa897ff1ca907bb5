"""Llama: every rope type, both kinds of biases, and heads of all numbers and widths."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastgen.errors import CheckpointError, UnsupportedModelError
from fastgen.testing import ModelConformance
from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.driver import HandDriver, load_decoder

TOLERANCE = 1e-4
BLOCK = 4
LLAMA = {"model_type": "llama"}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


YARN = {"factor": 16.0, "original_max_position_embeddings": 32}


class TestLlama(ModelConformance):
    entry = "fastgen.models.llama"
    hf_config: ClassVar = {
        "plain": LLAMA,
        "tied": {**LLAMA, "tie_word_embeddings": True},
        "attention_bias": {**LLAMA, "attention_bias": True},
        "mlp_bias": {**LLAMA, "mlp_bias": True},
        "head_dim_16": {**LLAMA, "head_dim": 16},
        "multi_query": {**rope("default", rope_theta=100_000.0), "num_key_value_heads": 1},
        "multi_head": {**LLAMA, "num_key_value_heads": 4},
        "linear": rope("linear", factor=4.0),
        "llama3": rope(
            "llama3",
            rope_theta=500_000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        "yarn": rope("yarn", **YARN),
        "yarn_attention_factor": rope("yarn", **YARN, attention_factor=1.0),
        "yarn_mscale": rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.5),
        "yarn_betas": rope("yarn", **YARN, beta_fast=8.0, beta_slow=2.0, truncate=False),
        "dynamic": {**rope("dynamic", factor=4.0), "max_position_embeddings": 16},
    }


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(count)]


@torch.inference_mode()
def expected(reference, ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([ids])).logits[0]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= TOLERANCE


def test_a6_dynamic_does_not_leak(tmp_path):
    """A short prompt after a long one, and in a batch with it, has exactly its own frequencies."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    decoder = load_decoder(tiny_llama(tmp_path, tokenizer=False, max_position_embeddings=16, rope_parameters=rope))
    short, long = tokens(8), tokens(30, seed=1)

    driver = HandDriver(decoder)
    alone = driver.read(driver.add(short), 8)
    driver = HandDriver(decoder)
    driver.read(driver.add(long), 30)
    after = driver.read(driver.add(short), 8)
    driver = HandDriver(decoder)
    together = driver.run([(driver.add(long), 30), (driver.add(short), 8)])[1]
    assert torch.equal(alone, after)
    assert_close(together, alone)
    assert decoder.regime(8) == () != decoder.regime(30)


def test_a6_dynamic_keeps_the_base_of_the_prompt(tmp_path):
    """The base is chosen from the prompt's length and kept while the answer grows past it."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    directory = tiny_llama(tmp_path, tokenizer=False, max_position_embeddings=16, rope_parameters=rope)
    ids, driver = tokens(30), HandDriver(load_decoder(directory))
    sequence = driver.add(ids, num_prompt=12)
    grown = torch.cat([*driver.run([(sequence, 12)]), *(driver.run([(sequence, 1)])[0] for _ in range(18))])
    plain = load_decoder(tiny_llama(tmp_path / "plain", tokenizer=False))  # the same weights, no scaling
    other = HandDriver(plain)
    assert_close(grown, other.read(other.add(ids), 30))
    whole = HandDriver(load_decoder(directory))
    assert (whole.read(whole.add(ids), 30) - grown).abs().max() > 100 * TOLERANCE  # as a prompt it has another base


@pytest.mark.parametrize(
    ("flag", "modules"),
    [
        ("attention_bias", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("mlp_bias", {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_a9_each_flag_names_its_biases(tmp_path: Path, flag: str, modules: set[str]) -> None:
    """Biases of about 3, so that one left out would change the best token."""
    directory = tiny_llama(tmp_path, tokenizer=False, **{flag: True})
    tensors = load_file(directory / "model.safetensors")
    assert {name.split(".")[-2] for name in tensors if name.endswith("bias")} == modules
    loud = {name: tensor * (3 if name.endswith("bias") else 1) for name, tensor in tensors.items()}
    save_file(loud, directory / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    want = expected(reference, tokens(22))
    driver = HandDriver(load_decoder(directory))
    assert_close(driver.read(driver.add(tokens(22)), 22), want)
    for module in modules:
        quiet = {name: tensor * (not name.endswith(f"{module}.bias")) for name, tensor in loud.items()}
        save_file(quiet, directory / "model.safetensors", metadata={"format": "pt"})
        driver = HandDriver(load_decoder(directory))
        assert (driver.read(driver.add(tokens(22)), 22).argmax(-1) != want.argmax(-1)).any(), module


def test_a9_a_bias_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path, tokenizer=False)
    tensors = load_file(directory / "model.safetensors")
    extra = "model.layers.0.self_attn.q_proj.bias"
    save_file({**tensors, extra: torch.zeros(32)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=extra):
        load_decoder(directory)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sliding_window": 4}, "sliding_window = 4"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
    ],
)
def test_refused(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    """What would change the maths and has no part here is refused by its name."""
    directory = tiny_llama(tmp_path, tokenizer=False)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, **fields}))
    with pytest.raises(UnsupportedModelError, match=named):
        load_decoder(directory)


def test_stale_cache_values_cannot_reach_a_neighbour(tmp_path):
    """C9: NaN left behind in a block by a request that overflowed does not leak to the block's next owner."""
    directory = tiny_llama(tmp_path, tokenizer=False)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    driver = HandDriver(load_decoder(directory), block_size=BLOCK)
    for cache in driver.builder.caches:
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    first, second = driver.add(tokens(11)), driver.add(tokens(30, seed=2))
    driver.run([(first, 5), (second, 25)])
    rows = [driver.run([(first, 1), (second, 1)]) for _ in range(5)]
    assert_close(torch.cat([r[0] for r in rows]), expected(reference, first.tokens)[5:10])
    assert_close(torch.cat([r[1] for r in rows]), expected(reference, second.tokens)[25:])
