"""Mistral and Ministral: the window on every layer, on some or on none, and heads of any width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import MistralConfig

from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.hf_config import read_raw_config
from fastgen.errors import ConfigError, UnsupportedModelError
from fastgen.testing import TINY, ModelConformance
from fastgen.testing.checkpoints import tiny_checkpoint

LAYERS = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
MINISTRAL = {"model_type": "ministral", "sliding_window": 8, "head_dim": 8}  # transformers derives no head_dim here


class TestMistral(ModelConformance):
    entry = "fastgen.models.mistral"
    hf_config: ClassVar = {
        "window": {"model_type": "mistral", "sliding_window": 8},
        "no_window": {"model_type": "mistral", "sliding_window": None},
        "nemo": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        "tied": {"model_type": "mistral", "sliding_window": 8, "tie_word_embeddings": True},
        "ministral": {**MINISTRAL, "layer_types": LAYERS, "num_hidden_layers": 4},
        "ministral_all": MINISTRAL,
        "ministral_none": {**MINISTRAL, "layer_types": ["full_attention"] * 2},
    }


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, MistralConfig(**TINY, head_dim=16, sliding_window=4), tokenizer=False)


def rewrite(directory: Path, **changes: Any) -> Path:
    """The same weights, said to be something else; a value of ``...`` takes the key away."""
    raw = {name: value for name, value in {**read_raw_config(directory), **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def windows(directory: Path) -> list[int | None]:
    blueprint = draw(directory, EngineConfig.of({"device": "cpu", "num_blocks": 1}))
    return [attention.scores.window for attention in blueprint.model.attentions()]


def test_a8_head_dim_wins_everywhere(tiny: Path) -> None:
    """Projections, rope, scale and the bytes of a cached token are those of 16, not of 32 / 4."""
    blueprint = draw(tiny, EngineConfig.of({"device": "cpu", "num_blocks": 1, "block_size": 4}))
    attention = blueprint.model.blocks[0].attn
    assert attention.qkv.slots == {"q": 64, "k": 32, "v": 32}
    assert attention.out.in_features == 64
    assert attention.rope.config.rotary_dim == 16
    assert attention.cached.scores.scale == 16**-0.5
    assert blueprint.cache.bytes_per_block == 4 * 2 * 2 * 2 * 16 * 4  # tokens, layers, k and v, heads, width, float32


def test_a8_null_means_derived(tmp_path: Path, tiny: Path) -> None:
    directory = tiny_checkpoint(tmp_path / "derived", MistralConfig(**TINY, sliding_window=4), tokenizer=False)
    for value in (None, ...):
        assert draw(rewrite(directory, head_dim=value), EngineConfig.of({"device": "cpu"})).model_config.head_dim == 8
        with pytest.raises(Exception, match="shapes that do not fit"):  # weights of 16 beside a config that says 8
            draw(rewrite(tiny, head_dim=value), EngineConfig.of({"device": "cpu"}))


def test_a10_where_the_window_is(tiny: Path) -> None:
    """All layers as the first Mistral; none for null; the class's 4096 where the file is silent; layer types win."""
    assert windows(tiny) == [4, 4]
    assert windows(rewrite(tiny, sliding_window=None)) == [None, None]
    assert windows(rewrite(tiny, sliding_window=...)) == [4096, 4096]
    assert windows(rewrite(tiny, sliding_window=4, layer_types=LAYERS[:2])) == [None, 4]
    assert windows(rewrite(tiny, layer_types=None)) == [4, 4]
    assert windows(rewrite(tiny, layer_types=["full_attention"] * 2, sliding_window=None)) == [None, None]


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"layer_types": LAYERS}, ConfigError, "layer_types names 4 layers, num_hidden_layers is 2"),
        ({"layer_types": LAYERS[:2], "sliding_window": None}, ConfigError, "sliding_window is not set"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, UnsupportedModelError, "'chunked_attention'"),
        ({"sliding_window": 0}, ConfigError, "window of 0 tokens"),
        ({"sliding_window": "4"}, ConfigError, "sliding_window"),
        ({"attention_chunk_size": 8}, UnsupportedModelError, "attention_chunk_size = 8"),
        ({"final_logit_softcapping": 30.0}, UnsupportedModelError, "final_logit_softcapping = 30.0"),
        ({"hidden_act": "sillu"}, UnsupportedModelError, "'sillu'"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModelError, "'awq'"),
    ],
)
def test_refused(tiny: Path, changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        windows(rewrite(tiny, **changes))
