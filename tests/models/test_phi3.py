"""Phi-3, 3.5 and 4: fused projections, and LongRoPE on both sides of the original length."""

from __future__ import annotations

import pytest
import torch

from fastgen.core.engine import Engine
from fastgen.testing import ModelConformance
from fastgen.testing.driver import HandDriver, load_decoder
from fastgen.types import SamplingParams


def longrope(pairs, **more):
    short, long = ([scale * (1 + 0.3 * pair) for pair in range(pairs)] for scale in (1.0, 2.5))
    return {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long, **more}


ORIGINAL = 32
LENGTHS = {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": 128}
LONG = {"model_type": "phi3", **LENGTHS, "hidden_size": 64, "rope_parameters": longrope(8)}


class TestPhi3(ModelConformance):
    entry = "fastgen.models.phi3"
    hf_config = {
        "mini_4k": {"model_type": "phi3", "sliding_window": 8},
        "medium": {"model_type": "phi3", "num_key_value_heads": 1},
        "mini_128k": LONG,
        "4_mini": {
            **LONG,
            "rope_parameters": longrope(6),
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "sliding_window": 40,
        },
        "attention_factor": {**LONG, "rope_parameters": longrope(8, attention_factor=1.7)},
        "factor": {**LONG, "rope_parameters": longrope(8, factor=9.0)},
    }


@pytest.mark.parametrize("length", [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1])
def test_prompts_at_the_original_length(save, prompt, length):
    saved = save(**LONG)
    ids = prompt[:length]
    assert (saved.logits(ids) - saved.expected(ids)).abs().max() < 1e-4


def test_both_sides_in_one_batch(save, prompt):
    """Each prompt has the factors of its own length; the long one's do not reach the short one."""
    saved = save(**LONG)
    short, long = prompt[:ORIGINAL], prompt[10 : 10 + ORIGINAL + 1]
    driver = HandDriver(load_decoder(saved.directory))
    first, second = driver.add(long), driver.add(short)
    rows = driver.run([(first, 7), (second, 20)])
    more = driver.run([(second, ORIGINAL - 20), (first, ORIGINAL + 1 - 7)])
    for ids, got in ((long, (rows[0], more[1])), (short, (rows[1], more[0]))):
        assert (torch.cat(got) - saved.expected(ids)).abs().max() < 1e-4


@pytest.mark.parametrize("length", [ORIGINAL - 5, ORIGINAL, ORIGINAL + 1])
def test_an_answer_that_crosses_the_original_length(save, prompt, length):
    """transformers' ``generate`` computes all keys anew, with the factors for long requests, when a request crosses."""
    from transformers import AutoModelForCausalLM

    saved = save(**LONG)
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    with Engine.load(saved.directory, device="cpu", num_blocks=64, block_size=4) as engine:
        engine.add(prompt[:length], params)
        answer = [output.token_id for _ in range(40) if engine.has_work for output in engine.step()]
    model = AutoModelForCausalLM.from_pretrained(saved.directory, dtype=torch.float32).eval()
    ids = torch.tensor([prompt[:length]])
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    want = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()
    assert [token for token in answer if token is not None] == want


# ---- what files say --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_old_names_of_the_rope_type(save, prompt, name):
    """The files of transformers 4: ``rope_scaling`` with ``type``; "yarn" meant LongRoPE in this family."""
    saved = save(**LONG)
    want = saved.logits(prompt)
    raw = saved.config
    rope = raw.pop("rope_parameters")
    saved.config = raw | {
        "rope_scaling": {"type": name, "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]},
        "rope_theta": 10000.0,
    }
    assert torch.equal(saved.logits(prompt), want)


def test_the_original_length_is_the_top_levels(save, prompt):
    """It comes before the one in the rope dictionary, even where only the class's default (4096) says it."""
    saved = save(**LONG)
    raw = saved.config
    for keys, length in (({"original_max_position_embeddings": 16}, 16), ({}, 4096)):
        changed = {key: value for key, value in raw.items() if key != "original_max_position_embeddings"} | keys
        changed["rope_parameters"] = raw["rope_parameters"] | {"original_max_position_embeddings": 40}
        changed["max_position_embeddings"] = 8192
        saved.config = changed
        decoder = load_decoder(saved.directory)
        assert decoder.regime(length) == () != decoder.regime(length + 1)
        assert (saved.logits(prompt) - saved.expected(prompt)).abs().max() < 1e-4
