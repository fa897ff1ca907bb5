"""Gemma 3 against transformers: its two ropes in every spelling, and the language model of a multimodal file."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForConditionalGeneration
from transformers import Gemma3TextConfig as TransformersConfig

from fastgen.api import ConfigError, UnsupportedModelError
from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.models.gemma3 import Gemma3Config, build
from fastgen.testing import ModelConformance
from fastgen.testing.checkpoints import randomise
from fastgen.testing.driver import HandDriver, load_decoder

KINDS = ["sliding_attention", "full_attention"]
LINEAR = {"rope_type": "linear", "factor": 8.0}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": KINDS,
    "query_pre_attn_scalar": 24,
    "pad_token_id": None,
}
IDS = [3, 17, 40, 9, 9, 33, 61, 5, 12, 28, 50, 7, 19, 44, 3, 21]


class TestGemma3(ModelConformance):
    entry = "fastgen.models.gemma3"
    hf_config = {
        "plain": {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "layer_types": KINDS,
        },
        "long": {
            "model_type": "gemma3_text",
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "layer_types": KINDS,
            "num_key_value_heads": 1,
            "final_logit_softcapping": 10.0,
            "rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 100.0}, "sliding_attention": None},
        },
    }


def saved(directory, kind=AutoModelForCausalLM, config=None):
    model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    randomise(model)
    model.eval().save_pretrained(directory)
    return model


def rewrite(directory, change):
    file = directory / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@torch.inference_mode()
def agree(directory, ids=IDS):
    """Against transformers' own reading of the same directory."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    driver = HandDriver(load_decoder(directory))
    return bool((driver.read(driver.add(ids), 5) - model(torch.tensor([ids])).logits[0]).abs().max() < 1e-4)


FLAT = {
    "nothing": {},
    "theta": {"rope_theta": 50.0},
    "local": {"rope_local_base_freq": 20.0},
    "scaling": {"rope_theta": 50.0, "rope_local_base_freq": 20.0, "rope_scaling": LINEAR},
    "nested in part": {"rope_parameters": {"full_attention": LINEAR}, "rope_theta": 50.0, "rope_local_base_freq": 20.0},
    "both": {"rope_parameters": {"full_attention": {"rope_theta": 30.0}}, "rope_scaling": LINEAR},
}


@pytest.mark.parametrize("written", FLAT.values(), ids=FLAT)
def test_a7_ropes_of_files_of_transformers_4(tmp_path, written):
    """Scaling is of the global layers alone; each kind has its theta and its default."""
    saved(tmp_path, config=TransformersConfig(**SIZES))
    rewrite(tmp_path, lambda raw: {k: v for k, v in raw.items() if k != "rope_parameters"} | written)
    assert agree(tmp_path)


def test_a7_the_comparison_above_would_notice(tmp_path, monkeypatch):
    saved(tmp_path, config=TransformersConfig(**SIZES))
    rewrite(tmp_path, lambda raw: {k: v for k, v in raw.items() if k != "rope_parameters"} | FLAT["scaling"])
    monkeypatch.setattr("fastgen.models.gemma3.Gemma3Config._realised.local_rope_theta", ("rope_theta", 1.0))
    assert not agree(tmp_path)


def test_a7_the_oldest_name_of_the_rope_type():
    """``type``, as transformers 4 took it; 5 reads it as no scaling at all in this family."""
    c = Gemma3Config.from_raw({**SIZES, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert [rope.factor for rope in c.rope_by_layer_type.values()] == [4.0, None]


def test_rope_parameters_that_say_not_whose_they_are():
    with pytest.raises(UnsupportedModelError, match=r"rope_parameters has 'rope_theta'.*'sliding_attention'"):
        Gemma3Config.from_raw({**SIZES, "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}})


def test_a10_patterns():
    """``layer_types`` before ``sliding_window_pattern``, six where there is neither."""
    raw = {**SIZES, "num_hidden_layers": 12, "layer_types": None}

    def windows(**written):
        decoder = build(Gemma3Config.from_raw({**raw, **written}))
        return ["sliding_attention" if b.attn.cached.scores.window else "full_attention" for b in decoder.blocks]

    for written in ({}, {"sliding_window_pattern": 3}, {"layer_types": KINDS * 6, "sliding_window_pattern": 3}):
        assert windows(**written) == TransformersConfig(**{**raw, **written}).layer_types


def test_a_scale_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="query_pre_attn_scalar: must be greater than 0"):
        build(Gemma3Config.from_raw({**SIZES, "query_pre_attn_scalar": -1}))


def test_scores_capped_is_refused():
    """transformers does not cap them, whatever the file says; files of this family do not."""
    Gemma3Config.from_raw({**SIZES, "attn_logit_softcapping": None})
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        Gemma3Config.from_raw({**SIZES, "attn_logit_softcapping": 50.0})


# ---- multimodal files ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    directory = tmp_path_factory.mktemp("multimodal")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={"model_type": "gemma3_text", **SIZES},
        vision_config={"model_type": "siglip_vision_model", **vision, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=63,
    )
    saved(directory, Gemma3ForConditionalGeneration, config)
    return directory


def test_multimodal_files_answer_text(multimodal):
    assert agree(multimodal)


def test_a11_multimodal_files_of_transformers_5(multimodal, tmp_path):
    """``save_pretrained`` writes the names of transformers 4; those that 5 has in memory are read as well."""
    shutil.copytree(multimodal, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert {name.split(".")[0] for name in tensors} == {"language_model", "vision_tower", "multi_modal_projector"}
    renamed = {f"model.{n.replace('language_model.model.', 'language_model.')}": t for n, t in tensors.items()}
    save_file(renamed, file, metadata={"format": "pt"})
    assert "model.language_model.layers.0.mlp.up_proj.weight" in renamed

    def logits(directory):
        driver = HandDriver(load_decoder(directory))
        return driver.read(driver.add(IDS), 5)

    assert torch.equal(logits(tmp_path), logits(multimodal))


def test_multimodal_vision_is_left_unread_aloud(multimodal):
    (warning,) = draw(multimodal, EngineConfig.of({"device": "cpu", "num_blocks": 1})).warnings
    assert "tensors of the checkpoint belong to parts that are not served here and are left unread" in warning
    assert "vision_tower" in warning or "multi_modal_projector" in warning


def test_multimodal_file_that_leaves_out_defaults():
    """As the published ones: heads, head_dim, vocabulary are the class's; end tokens and tie are the outer file's."""
    nested = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {"model_type": "gemma3_text", "rope_scaling": LINEAR, "eos_token_id": 1, **nested},
    }
    c, theirs = Gemma3Config.from_raw(raw), TransformersConfig(**raw["text_config"])
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        assert getattr(c, name) == getattr(theirs, name)
    assert (c.tie_word_embeddings, c.eos_token_ids, c.torch_dtype) == (True, {1, 106}, "bfloat16")
    full, sliding = c.rope_by_layer_type["full_attention"], c.rope_by_layer_type["sliding_attention"]
    assert (full.type, full.factor, full.theta, sliding.type, sliding.theta) == ("linear", 8.0, 1e6, "default", 1e4)


def test_quantised_multimodal_file_is_refused():
    raw = {"text_config": SIZES, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UnsupportedModelError, match=r"quantised.*'fp8'"):
        Gemma3Config.from_raw(raw)
