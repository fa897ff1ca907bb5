"""What is decided before weights are read, and what is refused."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgen.api import ModelSpec, hookimpl, registered
from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.plugin import registry
from fastgen.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedModelError
from fastgen.testing.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


def sketch(directory, **options):
    return draw(directory, EngineConfig.of({"device": "cpu", "num_blocks": 8, **options}))


def test_nothing_is_allocated(directory):
    assert {p.device.type for p in sketch(directory).model.parameters()} == {"meta"}


def test_weight_bytes_follow_the_dtype(directory):
    wide, narrow = sketch(directory), sketch(directory, dtype="bfloat16")
    assert wide.weight_bytes == 2 * narrow.weight_bytes == sum(p.numel() for p in wide.model.parameters()) * 4
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)


def test_cache_counts_each_layers_keys_and_values(directory):
    cache = sketch(directory, block_size=4).cache
    layers, keys_and_values, kv_heads, head_dim = 2, 2, 2, 8
    assert cache.bytes_per_block == 4 * layers * keys_and_values * kv_heads * head_dim * 4
    assert (cache.num_blocks, cache.tokens) == (8, 32)


def test_a8_cache_follows_an_explicit_head_dim(tmp_path):
    narrow = sketch(tiny_llama(tmp_path / "a", tokenizer=False)).cache
    wide = sketch(tiny_llama(tmp_path / "b", tokenizer=False, head_dim=16)).cache
    assert wide.bytes_per_block == 2 * narrow.bytes_per_block


def test_cache_memory(directory):
    per_block = sketch(directory).cache.bytes_per_block
    sized = sketch(directory, num_blocks=None, cache_memory=str(10 * per_block + 1), max_sequences=100).cache
    assert sized.num_blocks == 10
    full = sketch(directory, num_blocks=None, max_sequences=3, max_model_len=100).cache
    assert full.num_blocks == 3 * -(-100 // 16)
    assert "3 full-length sequences" in full.reason
    with pytest.raises(ConfigError, match=f"no room for one block.*{per_block:,} bytes"):
        sketch(directory, num_blocks=None, cache_memory="100")
    with pytest.raises(ConfigError, match="999GiB is more than"):
        sketch(directory, num_blocks=None, cache_memory="999GiB")
    with pytest.raises(ConfigError, match=r"num_blocks: 10\d+ blocks take .* room for \d+ blocks"):
        sketch(directory, num_blocks=10**12)


def test_the_weights_are_taken_off_what_is_free(directory, monkeypatch):
    from fastgen.core.runtime import kv_cache

    drawn = sketch(directory)
    monkeypatch.setattr(kv_cache, "available_memory", lambda _: drawn.weight_bytes + 10 * drawn.cache.bytes_per_block)
    cache = sketch(directory, num_blocks=None, cache_memory=0.5, max_sequences=1000).cache
    assert cache.num_blocks == 5
    with pytest.raises(ConfigError, match="room for 10 blocks"):
        sketch(directory, num_blocks=11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu9"}, "'tpu9'"),
        ({"device": "meta"}, "'meta' is not supported"),
        ({"device": "cuda:99"}, "torch sees"),
        ({"max_model_len": 10**6}, "more than the 512 positions"),
    ],
    ids=str,
)
def test_refused_options(directory, options, message):
    with pytest.raises(ConfigError, match=message):
        sketch(directory, **options)


def test_a4_yarn_does_not_lengthen_the_model_twice(tmp_path):
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    assert sketch(tiny_llama(tmp_path, tokenizer=False, rope_parameters=rope)).max_model_len == 512


def test_float16_of_a_bfloat16_checkpoint_is_warned_about(tmp_path):
    directory = tiny_llama(tmp_path, tokenizer=False, dtype="bfloat16")
    assert any("overflow" in warning for warning in sketch(directory, dtype="float16").warnings)
    assert not sketch(directory, dtype="bfloat16").warnings


def test_unsupported_architecture(directory, tmp_path):
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLn"]}))
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*"):
        sketch(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": None}))
    with pytest.raises(UnsupportedModelError, match="names no architecture"):
        sketch(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="holds no weights"):
        sketch(tmp_path)


def test_integer_weights_are_refused(tmp_path):
    """They are quantised or damaged; read as floats they would answer nonsense."""
    from safetensors.torch import load_file, save_file

    directory = tiny_llama(tmp_path, tokenizer=False)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored as int32"):
        sketch(directory)


def test_a_pipe_is_no_checkpoint(tmp_path):
    """Opening one would wait for ever."""
    directory = tiny_llama(tmp_path, tokenizer=False)
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        sketch(directory)


@pytest.mark.parametrize("ends", ["x", 1.5, [None], -1, [2, "y"]])
def test_a19_end_tokens_that_are_none_are_warned_about(tmp_path, ends):
    directory = tiny_llama(tmp_path, tokenizer=False)
    assert not sketch(directory).warnings
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert any("eos_token_id" in warning for warning in sketch(directory).warnings)


@pytest.mark.parametrize("model", [None, 5, [], b"x"])
def test_a_model_is_a_name_or_a_path(model):
    with pytest.raises(ModelNotFoundError, match="a name, a directory or a file"):
        sketch(model)


def test_a11_what_is_not_served_is_left_unread_aloud(tmp_path):
    """Parts of a checkpoint that a family says it does not serve; anything else that is too much stays an error."""
    directory = tiny_llama(tmp_path, tokenizer=False)
    file = directory / "model.safetensors"
    extra = {f"tower.{n}.weight": torch.ones(2) for n in range(3)}
    save_file({**load_file(file), **extra}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"nothing in the model takes: tower\.0\.weight"):
        sketch(directory)

    seen = []

    def unused(tensor, config):
        seen.append(config.hidden_size)
        return tensor.startswith("tower.")

    spec = registry().find_model("LlamaForCausalLM")
    weights = spec.load().weights.but({}, unused=unused)
    served = ModelSpec(("TowerForCausalLM",), spec.load().config, spec.load().build, weights)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "architectures": ["TowerForCausalLM"]}))

    class Plugin:
        @hookimpl
        def fastgen_models(self):
            return [served]

    with registered(Plugin(), name="tower"):
        drawn = sketch(directory)
    assert drawn.warnings == [
        "3 tensors of the checkpoint belong to parts that are not served here and are left unread: "
        "tower.0.weight, tower.1.weight, ..."
    ]
    assert not {placement.name for placement in drawn.placements} & extra.keys()
    assert set(seen) == {32}
