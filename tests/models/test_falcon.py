"""Falcon: every way it lays out queries, keys and values, and what its config files leave out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastgen.core.plugin import registry
from fastgen.core.weight_map import split_qkv
from fastgen.errors import UnsupportedModelError
from fastgen.testing import ModelConformance
from fastgen.testing.driver import load_decoder

LAYOUTS = {
    "7b": {"model_type": "falcon"},
    "40b": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "11b": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "tie_word_embeddings": False,
    },
    "multi_head": {"model_type": "falcon", "multi_query": False, "bias": True},
    "sequential": {
        "model_type": "falcon",
        "parallel_attn": False,
        "multi_query": False,
        "ffn_hidden_size": 96,
        "activation": "relu",
    },
}
ALIBI = {"model_type": "falcon", "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}
SIX_HEADS = {**ALIBI, "num_attention_heads": 6, "hidden_size": 48, "activation": "relu"}
OPTIONAL = {
    *("activation", "alibi", "bias", "ffn_hidden_size", "layer_norm_epsilon", "max_position_embeddings", "multi_query"),
    *("new_decoder_architecture", "num_kv_heads", "num_ln_in_parallel_attn", "parallel_attn", "rope_parameters"),
    *("tie_word_embeddings", "hidden_dropout", "attention_dropout", "use_cache", "initializer_range"),
}


def by_sdpa(directory):
    """transformers' eager attention of ALiBi models adds the bias twice; the one it chooses by itself does not."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    return lambda ids: model(torch.tensor([ids])).logits[0]


class TestFalcon(ModelConformance):
    entry = "fastgen.models.falcon"
    hf_config = LAYOUTS


class TestFalconALiBi(ModelConformance):
    entry = "fastgen.models.falcon"
    hf_config = {"1b": ALIBI, "six_heads": SIX_HEADS}
    reference = staticmethod(by_sdpa)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a12_optional_keys_may_be_absent(save, prompt, layout):
    """Each layout again with every key gone that says only what its class assumes; both read the file alike."""
    saved = save(**LAYOUTS[layout])
    whole = saved.logits(prompt)
    assumed = type_defaults(saved.config)
    saved.config = {key: value for key, value in saved.config.items() if key not in assumed}
    assert not {"alibi", "layer_norm_epsilon"} & saved.config.keys()
    assert torch.equal(saved.logits(prompt), whole)
    assert (saved.expected(prompt) - whole).abs().max() < 1e-4


def type_defaults(raw):
    """The optional keys that hold their class's default; what an absent key means."""
    from transformers import FalconConfig

    default = FalconConfig().to_dict()
    derived = {"ffn_hidden_size": 4 * raw["hidden_size"], "num_kv_heads": raw["num_attention_heads"]}
    free = {"rope_parameters", "max_position_embeddings"}
    return {key for key in OPTIONAL & raw.keys() if key in free or raw[key] == derived.get(key, default.get(key))}


def test_a12_unset_means_two_norms_in_the_new_decoder(save, prompt):
    saved = save(**LAYOUTS["40b"])
    assert "transformer.h.0.ln_mlp.weight" in saved.tensors
    for value in (None, 2):
        saved.config = saved.config | {"num_ln_in_parallel_attn": value}
        assert (saved.logits(prompt) - saved.expected(prompt)).abs().max() < 1e-4


@pytest.mark.parametrize("layout", ["40b", "multi_head"])
def test_a12_rows_taken_apart_otherwise_are_noise(save, prompt, layout, monkeypatch):
    """The control: shapes fit any layout, so only the logits tell."""
    saved = save(**LAYOUTS[layout])
    spec = registry().find_model(["FalconForCausalLM"])
    rule = "transformer.h.*.self_attention.query_key_value"
    wrong = dataclasses.replace(spec, weights=spec.weights.but({rule: ("blocks.*.attn.qkv", split_qkv)}))
    monkeypatch.setattr(type(registry()), "find_model", lambda *_, **__: wrong)
    assert (saved.logits(prompt) - saved.expected(prompt)).abs().max() > 1


FIRST_FILES = {
    "7b": ({"model_type": "falcon"}, {"model_type": "RefinedWebModel", "multi_query": True, "parallel_attn": True}),
    "40b": (LAYOUTS["40b"], {"model_type": "RefinedWeb", "n_head_kv": 2, "parallel_attn": True}),
    "1b": (ALIBI, {"model_type": "RefinedWebModel", "alibi": True, "bias": True}),
}


@pytest.mark.parametrize("size", FIRST_FILES)
def test_a12_first_files(save, prompt, size):
    """As published before transformers had the family: ``RWForCausalLM``, ``n_head``, ``n_layer``, ``n_head_kv``."""
    config, keys = FIRST_FILES[size]
    saved = save(**config)
    raw, want = saved.config, by_sdpa(saved.directory)(prompt)
    names = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "vocab_size": "vocab_size"}
    saved.config = {
        "architectures": ["RWForCausalLM"],
        "hidden_size": raw["hidden_size"],
        "apply_residual_connection_post_layernorm": False,
        **{old: raw[new] for old, new in names.items()},
        **keys,
    }
    assert (saved.logits(prompt) - want).abs().max() < 1e-4


def test_the_7b_of_the_hub_writes_a_key_count_that_it_does_not_use(save, prompt):
    """transformers saves ``num_kv_heads`` = the query heads beside ``multi_query``: one key head."""
    saved = save(**LAYOUTS["7b"])
    assert saved.config["num_kv_heads"] == 4
    assert {attention.kv_heads for attention in load_decoder(saved.directory).attentions()} == {1}


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a15_six_heads_in_chunks(save, prompt, chunk):
    """Slopes of six heads, 1/4, 1/16, 1/64, 1/256, 1/2, 1/8; biases by positions, wherever the prompt is cut."""
    saved = save(**SIX_HEADS)
    scores = next(load_decoder(saved.directory).attentions()).scores
    assert scores.slopes == tuple(slope * 8**-0.5 for slope in (1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8))
    assert (saved.logits(prompt, chunk) - saved.expected(prompt, "sdpa")).abs().max() < 1e-4


def test_a_residual_behind_the_norm_is_refused(save):
    saved = save(**LAYOUTS["7b"])
    saved.config = saved.config | {"apply_residual_connection_post_layernorm": True}
    with pytest.raises(UnsupportedModelError, match="apply_residual_connection_post_layernorm = True"):
        saved.logits([5])
