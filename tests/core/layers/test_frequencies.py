"""Frequencies and attention factors against transformers' own, over many settings; exact equality."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config, PhiConfig, StableLmConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

from fastgen.core.hf_config import HFConfig
from fastgen.core.layers.frequencies import inverse_frequencies
from fastgen.core.rope_config import RopeConfig
from fastgen.errors import ConfigError, UnsupportedModelError

pytestmark = pytest.mark.slow


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def settings(rope_type: str, **choices: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Every combination; ``None`` leaves a key out."""
    rows = itertools.product(*choices.values())
    return [
        {"rope_type": rope_type, **{k: v for k, v in zip(choices, row, strict=True) if v is not None}} for row in rows
    ]


class Part(HFConfig):
    """A family that turns a part of each head."""

    spellings = {"partial_rotary_factor": ("partial_rotary_factor", "rotary_pct")}
    use_parallel_residual: bool = True


THETAS = (None, 10_000.0, 500_000.0, 123.4)
CASES = [
    *settings("default", rope_theta=THETAS),
    *settings("linear", rope_theta=THETAS, factor=(1.0, 2.0, 7.3, 8)),
    *settings("dynamic", rope_theta=THETAS, factor=(1.0, 2.0, 7.3, 8)),
    *settings(
        "llama3",
        rope_theta=(10_000.0, 500_000.0),
        factor=(8.0, 32.0),
        low_freq_factor=(1.0, 1.7),
        high_freq_factor=(4.0, 9),
        original_max_position_embeddings=(16, 64, 8192),
    ),
    *settings(
        "yarn",
        rope_theta=(10_000.0, 1e6),
        factor=(1.0, 4.0, 16.0, 64.0),
        original_max_position_embeddings=(None, 32, 4096),
        attention_factor=(None, 1.0, 0.7),
        mscale=(None, 0.707, 1.0),
        mscale_all_dim=(None, 1.3),
        truncate=(None, False),
    ),
    *settings("yarn", factor=(16.0,), original_max_position_embeddings=(32,), beta_fast=(16.0, 40), beta_slow=(0.5, 2)),
]


def raw_config(rope: dict[str, Any], head_dim: int, **more: Any) -> dict[str, Any]:
    return {**SIZES, "head_dim": head_dim, "max_position_embeddings": 512, "rope_parameters": dict(rope), **more}


@pytest.mark.parametrize("head_dim", [16, 128])
def test_equal_to_transformers(head_dim: int) -> None:
    """Includes A4: yarn's attention_factor, mscale, mscale_all_dim, original length and truncate."""
    for rope in CASES:
        raw = raw_config(rope, head_dim)
        theirs = LlamaRotaryEmbedding(LlamaConfig(**raw_config(rope, head_dim)))
        config = HFConfig.from_raw(raw).rope
        ours, attention_factor = inverse_frequencies(config, config.rotary_dim)
        assert ours.dtype == torch.float32, rope
        assert torch.equal(ours, theirs.inv_freq), rope
        assert attention_factor == theirs.attention_scaling, rope


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "beta_fast", "truncate"])
def test_comparison_sees_a_dropped_yarn_key(key: str) -> None:
    """Negative control: leaving out one key of a full yarn setting changes the frequencies."""
    full = {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 8.0,
        "truncate": False,
    }
    fewer = {name: value for name, value in full.items() if name != key or key == "factor"}
    if key == "factor":  # which must not be left out
        fewer[key] = None
    tables = [inverse_frequencies(HFConfig.from_raw(raw_config(rope, 64)).rope, 64)[0] for rope in (full, fewer)]
    assert not torch.equal(*tables)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"factor": 64.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 64.0}, 0.1 * math.log(64) + 1),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 16.0}, 1.2772588722239782),
    ],
)
def test_a4_yarn_attention_factor(rope: dict[str, Any], expected: float) -> None:
    raw = raw_config({"rope_type": "yarn", "original_max_position_embeddings": 32, **rope}, 16)
    assert inverse_frequencies(HFConfig.from_raw(raw).rope, 16)[1] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("partial", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "llama3", "yarn"])
def test_a7_partial_rotary(rope_type: str, partial: float) -> None:
    rope = next(case for case in CASES if case["rope_type"] == rope_type and case.get("factor", 1) > 1)
    raw = raw_config(rope, 32, partial_rotary_factor=partial)
    config = Part.from_raw(raw).rope
    theirs, factor = ROPE_INIT_FUNCTIONS[rope_type](LlamaConfig(**raw_config(rope, 32, partial_rotary_factor=partial)))
    ours, attention_factor = inverse_frequencies(config, config.rotary_dim)
    assert config.rotary_dim == int(32 * partial)
    assert torch.equal(ours, theirs)
    assert attention_factor == factor


@pytest.mark.parametrize(
    ("config_class", "rotary", "partial"),
    [
        (GPTNeoXConfig, GPTNeoXRotaryEmbedding, {"rotary_pct": 0.25}),
        (PhiConfig, PhiRotaryEmbedding, {"partial_rotary_factor": 0.5}),
        (PhiConfig, PhiRotaryEmbedding, {"partial_rotary_factor": 0.4}),
        (StableLmConfig, StableLmRotaryEmbedding, {"partial_rotary_factor": 0.25}),
    ],
)
def test_a7_partial_rotary_of_families(config_class: Any, rotary: Any, partial: dict[str, float]) -> None:
    """Both the file as written by hand and as transformers saves it (inside rope_parameters)."""
    sizes = {**SIZES, "hidden_size": 80 * 4, "num_key_value_heads": 4}
    theirs = config_class(**sizes, **partial)
    expected = rotary(theirs).inv_freq
    for raw in ({**sizes, **partial}, theirs.to_dict()):
        config = Part.from_raw(raw).rope
        assert config.rotary_dim == int(80 * next(iter(partial.values())))
        assert torch.equal(inverse_frequencies(config, config.rotary_dim)[0], expected)


@pytest.mark.parametrize("length", [1, 16, 17, 30, 64, 1000])
def test_a6_dynamic_base_follows_the_length_given(length: int) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    raw = {**SIZES, "max_position_embeddings": 16, "rope_parameters": rope}
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](LlamaConfig(**raw), seq_len=length)
    config = HFConfig.from_raw(raw).rope
    ours = inverse_frequencies(config, 8, sequence_length=length)[0]
    short = inverse_frequencies(config, 8)[0]
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, short) == (length <= 16)


LONGROPE = [
    {"short_factor": [1.0 + 0.25 * n for n in range(8)], "long_factor": [2.0 + 3 * n for n in range(8)], **more}
    for more in (
        {},
        {"attention_factor": 1.3},
        {"attention_factor": None, "factor": None},
        {"factor": 4.0},
        {"factor": 0.5},
        {"factor": 16.0, "attention_factor": 0.9},
    )
]


@pytest.mark.parametrize("length", [None, 1, 32, 33, 500])
@pytest.mark.parametrize("top_level", [None, 32, 64])
def test_longrope(length: int | None, top_level: int | None) -> None:
    """Factors of both lists by the length, and the attention factor: given, or of the factor, or of the two lengths
    (the top level's original length before the dictionary's)."""
    more = {} if top_level is None else {"original_max_position_embeddings": top_level}
    for keys in LONGROPE:
        rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, **keys}
        theirs_config = LlamaConfig(**raw_config(rope, 16, **more))
        theirs, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs_config, seq_len=length)
        config = HFConfig.from_raw(raw_config(rope, 16, **more)).rope
        ours, attention_factor = inverse_frequencies(config, config.rotary_dim, sequence_length=length)
        assert torch.equal(ours, theirs), keys
        assert attention_factor == factor, keys


def test_longrope_without_an_original_length_is_never_long() -> None:
    """The length the model has stands for it."""
    raw = raw_config({"rope_type": "longrope", **LONGROPE[0]}, 16)
    config = HFConfig.from_raw(raw).rope
    assert config.original_max_position_embeddings == 512
    assert inverse_frequencies(config, 16)[1] == 1.0


@pytest.mark.parametrize("partial", [0.25, 0.75])
def test_longrope_of_a_part_of_the_head(partial: float) -> None:
    pairs = int(32 * partial) // 2
    rope = {"rope_type": "longrope", "short_factor": [1.5] * pairs, "long_factor": [4.0] * pairs}
    raw = {**SIZES, "hidden_size": 128, "partial_rotary_factor": partial, "original_max_position_embeddings": 32}
    theirs = Phi3Config(**raw, max_position_embeddings=512, rope_parameters=dict(rope))
    expected = Phi3RotaryEmbedding(theirs)
    for written in ({**raw, "rope_parameters": rope}, theirs.to_dict()):
        config = Part.from_raw({**written, "max_position_embeddings": 512}).rope
        ours, attention_factor = inverse_frequencies(config, config.rotary_dim)
        assert torch.equal(ours, expected.inv_freq)
        assert attention_factor == expected.attention_scaling


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_longrope_lists_of_the_wrong_length_are_refused(name: str) -> None:
    rope = {"rope_type": "longrope", **LONGROPE[0], name: [1.0] * 7}
    with pytest.raises(ConfigError, match=f"{name} has 7 numbers; 16 rotated dimensions need 8"):
        HFConfig.from_raw(raw_config(rope, 16))


def test_unknown_type_raises() -> None:
    rope = RopeConfig(rotary_dim=8, max_position_embeddings=16).model_copy(update={"type": "spiral"})
    with pytest.raises(UnsupportedModelError, match="spiral"):
        inverse_frequencies(rope, 8)


def test_on_the_cpu_whatever_the_default_device() -> None:
    rope = RopeConfig(
        type="yarn", factor=2, original_max_position_embeddings=8, rotary_dim=8, max_position_embeddings=16
    )
    with torch.device("meta"):
        assert inverse_frequencies(rope, 8)[0].device.type == "cpu"
