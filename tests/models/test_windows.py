"""A10: which layers slide, in the families that have a window, against transformers; whole, in pieces, and from a
cached prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastgen.testing.engine_checks import check_prefix_hit
from fastgen.testing.subject import Subject, serving

W = {"sliding_window": 4, "num_hidden_layers": 4}
ALTERNATING = ["sliding_attention", "full_attention"] * 2

CONFIGS: dict[str, tuple[dict[str, Any], list[int | None]]] = {
    "mistral": ({"model_type": "mistral", **W}, [4, 4, 4, 4]),
    "mistral, null": ({"model_type": "mistral", **W, "sliding_window": None}, [None] * 4),
    "ministral, layer types": (
        {"model_type": "ministral", **W, "head_dim": 8, "layer_types": ALTERNATING},
        [4, None, 4, None],
    ),
    "qwen2, switched off": ({"model_type": "qwen2", **W, "max_window_layers": 0}, [None] * 4),
    "qwen2, upper layers": (
        {"model_type": "qwen2", **W, "use_sliding_window": True, "max_window_layers": 2},
        [None, None, 4, 4],
    ),
    "qwen2, 4 = 4 is no layer": (
        {"model_type": "qwen2", **W, "use_sliding_window": True, "max_window_layers": 4},
        [None] * 4,
    ),
    "qwen3, layer types win": (
        {
            "model_type": "qwen3",
            "head_dim": 8,
            **W,
            "use_sliding_window": True,
            "max_window_layers": 2,
            "layer_types": ALTERNATING,
        },
        [4, None, 4, None],
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a10_windows(case: str, tmp_path: Path) -> None:
    """Window 4, prompt 12, 4 layers: at once, in pieces of 5, and from the prefix cache."""
    fields, windows = CONFIGS[case]
    entry = f"fastgen.models.{str(fields['model_type']).replace('ministral', 'mistral')}"
    with serving(entry) as record:
        one = Subject(record, fields, tmp_path)
        assert [attention.scores.window for attention in one.decoder.attentions()] == windows
        ids = one.ids(12)
        for chunk in (12, 5):
            driver = one.driver()
            one.compare(driver.read(driver.add(ids), chunk), ids, f"12 tokens in pieces of {chunk}")
        check_prefix_hit(one)


def test_a10_the_comparison_notices_a_window(tmp_path: Path) -> None:
    """A negative control: the layers that slide, one further on, are not taken for right."""
    fields, _ = CONFIGS["qwen2, upper layers"]
    with serving("fastgen.models.qwen2") as record:
        one = Subject(record, {**fields, "max_window_layers": 2}, tmp_path)
        scores = [attention.scores for attention in one.decoder.attentions()]
        for attention, other in zip(one.decoder.attentions(), scores[::-1], strict=True):
            attention.scores = other
        ids, driver = one.ids(12), one.driver()
        with pytest.raises(AssertionError):
            one.compare(driver.read(driver.add(ids), 5), ids, "the wrong layers slide")
