"""What fastgen promises of every model holds for a hosted one: an answer does not depend on how it came about."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

MODEL = "cohere2"  # local layers, with a window of 8 tokens, and global ones
CHOOSE = random.Random(1)
SHARED = [CHOOSE.randrange(3, 128) for _ in range(24)]
PROMPTS = [SHARED + [CHOOSE.randrange(3, 128) for _ in range(length)] for length in (1, 9, 17)] + [[5], [7, 8, 9]]


@pytest.fixture(scope="module")
def directory(checkpoint):
    return checkpoint(MODEL)


@pytest.fixture(scope="module")
def expected(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def test_alone(directory, load, answer, expected):
    with load(directory, prefix_caching=False) as engine:
        assert [answer(engine, [prompt])[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("budget", [5, 16, 33, 256])
def test_batched_and_in_pieces(directory, load, answer, expected, budget):
    with load(directory, max_batch_tokens=budget, prefix_caching=False) as engine:
        assert answer(engine, PROMPTS) == expected


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_any_block_size(directory, load, answer, expected, block_size):
    with load(directory, block_size=block_size, num_blocks=400 // block_size) as engine:
        assert answer(engine, PROMPTS) == expected


def test_from_the_prefix_cache(directory, load, answer, expected):
    with load(directory) as engine:
        answer(engine, [SHARED])
        assert answer(engine, PROMPTS) == expected
        assert engine.stats().prefix_hit_tokens >= 3 * 20


def test_preempted_and_resumed(directory, load, answer, expected):
    short = [[n, n + 1, n + 2] for n in range(10, 16)]  # all start in 12 blocks, and grow to twice as many
    with load(directory, prefix_caching=False) as engine:
        roomy = answer(engine, [*short, *PROMPTS])
    assert roomy[len(short) :] == expected
    with load(directory, num_blocks=12, prefix_caching=False, max_model_len=40) as engine:
        assert answer(engine, short) == roomy[: len(short)]
        assert engine.stats().preemptions > 0


def test_bfloat16_and_shards_load_as_transformers_loads_them(directory, load):
    with load(directory, dtype="bfloat16") as engine:
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict()
        ours = engine._model.hosted.model.state_dict()
        assert ours.keys() == reference.keys()
        assert all(torch.equal(ours[name], reference[name]) for name in reference)
        assert all(ours[name].dtype == reference[name].dtype for name in reference)
