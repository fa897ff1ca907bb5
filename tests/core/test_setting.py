"""What makes a calibration another one, and what does not."""

from __future__ import annotations

import json

import pytest

from fastgen.config import EngineConfig
from fastgen.core import setting as module
from fastgen.core.blueprint import draw
from fastgen.core.setting import _INDIFFERENT
from fastgen.testing.adapters import random_lora
from fastgen.testing.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


def setting(directory, **options):
    return draw(directory, EngineConfig.of({"device": "cpu", "num_blocks": 8, "threads": 1, **options})).setting


def test_the_same_again_and_under_another_name(directory, tmp_path):
    assert setting(directory) == setting(directory)
    copy = setting(tiny_llama(tmp_path / "copy", tokenizer=False, seed=5))
    assert copy.model != setting(directory).model
    assert copy.same(setting(directory))
    assert copy.key == setting(directory).key


def test_a_fine_tune_shares_and_another_shape_does_not(directory, tmp_path):
    tuned = tiny_llama(tmp_path / "tuned", tokenizer=False)
    path = tuned / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 5, "_name_or_path": "me/mine"}))
    assert setting(tuned).same(setting(directory))
    deeper = setting(tiny_llama(tmp_path / "deeper", tokenizer=False, num_hidden_layers=3))
    assert not deeper.same(setting(directory))


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"threads": 2}, {"block_size": 8}, {"record_passes": False}], ids=str
)
def test_options_that_bear_upon_it(directory, options):
    assert setting(directory, **options).key != setting(directory).key


@pytest.mark.parametrize(
    "options",
    [{"max_sequences": 3}, {"num_blocks": 9}, {"policy": "prefill-first"}, {"seed": 1}, {"max_batch_tokens": 3}],
    ids=str,
)
def test_options_that_do_not(directory, options):
    assert setting(directory, **options) == setting(directory)


def test_another_processor_and_other_kernels(directory, monkeypatch):
    before = setting(directory)
    monkeypatch.setattr(module, "processor", lambda: "Another")
    assert setting(directory).device == "Another"
    assert not setting(directory).same(before)
    monkeypatch.undo()
    monkeypatch.setattr("fastgen.kernels.cpu.IMPLEMENTATIONS", ())
    assert not setting(directory).same(before)


def test_with_adapters_and_without(directory, tmp_path):
    loras = [random_lora(tmp_path / name, {"model.layers.0.self_attn.q_proj": (32, 32)}, seed=1) for name in "ab"]
    one, other = (setting(directory, lora={path.name: str(path)}) for path in loras)
    assert one.key == other.key != setting(directory).key


def test_another_version(directory, monkeypatch):
    before = setting(directory)
    monkeypatch.setattr(module, "version", lambda _: "9.9")
    assert setting(directory).key != before.key


def test_the_sampler_counts_too(directory):
    assert "argmax" in setting(directory).kernels


def test_every_option_named_is_one():
    assert set(EngineConfig.model_fields) >= _INDIFFERENT


def test_no_secret_is_kept(directory):
    assert "hf_SECRET" not in setting(directory, token="hf_SECRET").model_dump_json()
