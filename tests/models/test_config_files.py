"""What families read from config.json where a key is absent or in the spelling of transformers 4: what transformers'
own class makes of the same file."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from transformers import AutoConfig

from fastgen.core.config_class import realise
from fastgen.core.hf_config import HFConfig
from fastgen.testing import TINY

MOE = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 24}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
FILES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "mixtral": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 3},
    "qwen2": WINDOW,
    "qwen3": {**WINDOW, "head_dim": 16, "attention_bias": True},
    "qwen2_moe": {**WINDOW, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "qwen3_moe": {
        **MOE,
        "use_sliding_window": True,
        "sliding_window": 8,
        "num_experts": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
}
REQUIRED = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
SAME = [
    *("num_key_value_heads", "max_position_embeddings", "hidden_act", "tie_word_embeddings", "attention_bias"),
    *("mlp_bias", "qkv_bias", "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step"),
]
"""Fields that mean the same under the same name in transformers' class."""


def whole(family: str) -> dict[str, Any]:
    """A file in which every key has a value that is not the class's own."""
    return {
        **TINY,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-3,
        "rope_theta": 500.0,
        **FILES[family],
    }


def read(family: str, raw: dict[str, Any]) -> HFConfig:
    (spec,) = import_module(f"fastgen.models.{family}").fastgen_models()
    return realise(spec.config).from_raw(raw)


def agree(family: str, raw: dict[str, Any]) -> None:
    ours, theirs = read(family, raw), AutoConfig.for_model(family, **raw)
    theirs.standardize_rope_params()
    for name in SAME:
        if hasattr(ours, name):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.type == theirs.rope_parameters["rope_type"]
    assert ours.rope.factor == theirs.rope_parameters.get("factor")
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None)
    if hasattr(ours, "max_window_layers"):
        rule = {"qwen2_moe": lambda i: i % 2 == 0 and i < ours.max_window_layers}
        slides = rule.get(family, lambda i: i >= ours.max_window_layers)
        assert ours.layer_windows(slides) == [window if kind == "sliding_attention" else None for kind in kinds]
    elif family != "llama":
        assert ours.layer_windows() == [window] * 2


def droppable() -> list[tuple[str, str]]:
    return [(family, key) for family in FILES for key in sorted(whole(family).keys() - REQUIRED)]


@pytest.mark.parametrize("family", FILES)
def test_a_whole_file(family: str) -> None:
    agree(family, whole(family))


@pytest.mark.parametrize(("family", "key"), droppable())
def test_an_absent_key_is_what_the_class_says(family: str, key: str) -> None:
    raw = whole(family)
    del raw[key]
    if key == "num_key_value_heads":  # so many that the class's own number of key heads divides them
        raw |= {"num_attention_heads": 32, "hidden_size": 128}
    agree(family, raw)


@pytest.mark.parametrize("family", FILES)
def test_files_of_transformers_4(family: str) -> None:
    """``rope_theta`` beside ``rope_scaling``, and ``torch_dtype``; and the file that transformers 5 makes of it."""
    old = {**whole(family), "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"}
    agree(family, old)
    saved = AutoConfig.for_model(family, **old).to_dict()
    assert "rope_scaling" not in saved
    assert saved["rope_parameters"] == {"type": "linear", "rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    ours, again = read(family, old), read(family, {**saved, "dtype": "bfloat16"})
    for name in type(ours).model_fields.keys() - {"architectures", "model_type", "layer_types"}:
        assert getattr(again, name) == getattr(ours, name), name


def test_the_comparison_notices_a_default() -> None:
    """A negative control: another family's default for an absent key is not taken for right."""
    raw = {key: value for key, value in whole("mixtral").items() if key != "rope_theta"}
    (spec,) = import_module("fastgen.models.mistral").fastgen_models()
    theirs = AutoConfig.for_model("mixtral", **raw)
    assert realise(spec.config).from_raw(raw).rope.theta != theirs.rope_parameters["rope_theta"]
