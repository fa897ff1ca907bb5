"""A7: families of which only a part of each head turns, however their files say how much."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

PLACES = [0, 1, 40]
FAMILIES = {
    "gpt_neox": ({"model_type": "gpt_neox", "rotary_pct": 0.25}, "rotary_pct", 0.25),
    "phi_2": ({"model_type": "phi", "partial_rotary_factor": 0.4}, "partial_rotary_factor", 0.5),
    "phi_1_5": ({"model_type": "phi", "partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5),
    "stablelm": ({"model_type": "stablelm", "partial_rotary_factor": 0.25}, "partial_rotary_factor", 0.25),
    "phi_4_mini": ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "partial_rotary_factor", 1.0),
}


@pytest.fixture(params=FAMILIES)
def family(request, save):
    """A checkpoint with heads of 16, its key of the factor, its class's default, the factor."""
    fields, key, default = FAMILIES[request.param]
    return save(hidden_size=64, **fields), key, default, fields[key]


def written(saved, key, factor):
    """The config as transformers 4 wrote it: everything at the top level; no factor at all for ``None``."""
    rope = saved.config["rope_parameters"]
    theta = {"rotary_emb_base" if key == "rotary_pct" else "rope_theta": rope["rope_theta"]}
    rest = {name: value for name, value in saved.config.items() if name not in ("rope_parameters", key)}
    return rest | theta | ({} if factor is None else {key: factor})


def test_a7_as_saved_today(family, prompt):
    saved, _, _, factor = family
    assert saved.config["rope_parameters"]["partial_rotary_factor"] == factor
    difference = saved.logits(prompt) - saved.expected(prompt)
    assert difference[PLACES].abs().max() < 1e-4


def test_a7_as_saved_by_transformers_4(family, prompt):
    saved, key, _, factor = family
    want = saved.expected(prompt)
    saved.config = written(saved, key, factor)
    assert (saved.logits(prompt) - want)[PLACES].abs().max() < 1e-4


def test_a7_the_rope_dictionary_comes_first(family, prompt):
    saved, key, _, _ = family
    want = saved.expected(prompt)
    saved.config = saved.config | {key: 1.0}
    assert (saved.logits(prompt) - want)[PLACES].abs().max() < 1e-4


def test_a7_the_default_that_the_file_does_not_name(family, prompt):
    saved, key, default, factor = family
    before = saved.logits(prompt)
    saved.config = written(saved, key, None)
    got = saved.logits(prompt)
    assert (got - saved.expected(prompt))[PLACES].abs().max() < 1e-4
    assert bool((got - before).abs().max() < 1e-4) == (default == factor)


def test_a7_the_control(family, prompt):
    """Another factor agrees at position 0 and nowhere else: a test of one token sees nothing."""
    saved, key, _, factor = family
    want = saved.expected(prompt)
    saved.config = written(saved, key, factor + 0.25)
    off = (saved.logits(prompt) - want)[PLACES].abs().amax(-1)
    assert off[0] < 1e-4
    assert off[1:].min() > 1e-2
