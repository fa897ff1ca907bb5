"""Requests that outgrow the length a LongRoPE model was trained at go on as transformers' ``generate`` does: with every
key computed anew, for long requests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from fastgen import SamplingParams
from fastgen.core.engine import Engine
from fastgen.testing.checkpoints import tiny_checkpoint

ORIGINAL = 16
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1, 1.2],
    "long_factor": [1.0, 3.0, 9.0, 27.0],
    "original_max_position_embeddings": ORIGINAL,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    config = Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=ROPE,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tiny_checkpoint(tmp_path_factory.mktemp("phi3"), config, tokenizer=False)


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, 64) for _ in range(length)]


LENGTHS = [3, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, ORIGINAL + 9]
NEW = 20


@pytest.fixture(scope="module")
def expected(directory) -> dict[int, list[int]]:
    """Each prompt alone, in transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = {}
    for length in LENGTHS:
        ids = torch.tensor([prompt(length)])
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
        found[length] = out[0, length:].tolist()
    return found


def answers(directory: Path, lengths: list[int], **options: object) -> tuple[dict[int, list[int]], Engine]:
    engine = Engine.load(directory, device="cpu", block_size=4, **options)
    params = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
    of = {engine.add(prompt(length), params): length for length in lengths}
    found: dict[int, list[int]] = {length: [] for length in lengths}
    while engine.has_work:
        for output in engine.step():
            if output.token_id is not None:
                found[of[output.request_id]].append(output.token_id)
    return found, engine


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_alone(directory, expected, length):
    assert answers(directory, [length], num_blocks=64)[0] == {length: expected[length]}


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 64},
        {"num_blocks": 64, "max_batch_tokens": 7},
        {"num_blocks": 22},
        {"num_blocks": 64, "prefix_caching": False},
    ],
    ids=str,
)
def test_together(directory, expected, options):
    """Neighbours on either side of the length do not change each other."""
    found, engine = answers(directory, LENGTHS, **options)
    assert found == expected
    if options["num_blocks"] == 22:
        assert engine.stats().preemptions > 0


def test_prefixes_are_not_shared_across_the_length(directory, expected):
    """The same first tokens, short and long: their keys differ, and only a request of the same kind finds them."""
    engine = Engine.load(directory, device="cpu", block_size=4, num_blocks=64)
    params = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
    long = prompt(ORIGINAL + 9)
    seen = []
    for ids in (long, long[:12], long):
        engine.add(ids, params)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        seen.append(([output.token_id for output in outputs], outputs[0].cached_tokens))
    assert [cached for _, cached in seen] == [0, 0, 24]
    assert seen[0][0] == seen[2][0] == expected[ORIGINAL + 9]


def test_without_it_answers_differ(directory, expected, monkeypatch):
    """The negative control: keeping the short factors past the length is seen."""
    monkeypatch.setattr("fastgen.core.containers.Decoder.renewal", lambda self, length: None)
    assert answers(directory, [3], num_blocks=64)[0][3] != expected[3]
