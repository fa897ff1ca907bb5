"""Llama's logits equal transformers', for every way of cutting the work into passes."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastgen.core.layers import Rope
from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.driver import HandDriver, load_decoder

TOLERANCE = 1e-4
BLOCK = 4
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}

VARIANTS = {
    "plain": {},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "both_biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim_16": {"head_dim": 16},
    "tied": {"tie_word_embeddings": True},
    "multi_query": {"num_key_value_heads": 1},
    "multi_head": {"num_key_value_heads": 4},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 500000.0,
        }
    },
    "yarn": {"rope_parameters": YARN},
    "yarn_attention_factor": {"rope_parameters": {**YARN, "attention_factor": 1.0}},
    "yarn_mscale": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "dynamic_within": {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "dynamic_beyond": {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """A variant's (decoder, transformers model)."""
    directory = tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=False, **VARIANTS[request.param])
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return load_decoder(directory), reference.eval()


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(count)]


@torch.inference_mode()
def expected(reference, ids: list[int]) -> torch.Tensor:
    reference(torch.tensor([ids[:1]]))  # a short call: the dynamic rope type forgets the longer ones before it
    return reference(torch.tensor([ids])).logits[0]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("length", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 5)), 40])
def test_prefill(pair, length):
    decoder, reference = pair
    driver = HandDriver(decoder, block_size=BLOCK)
    ids = tokens(length)
    assert_close(driver.read(driver.add(ids), length), expected(reference, ids))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, BLOCK - 1, BLOCK, BLOCK + 1, 7])
@pytest.mark.parametrize("shuffle", [None, 3])
def test_chunks(pair, chunk, shuffle):
    decoder, reference = pair
    driver = HandDriver(decoder, block_size=BLOCK, shuffle=shuffle)
    ids = tokens(22)
    assert_close(driver.read(driver.add(ids), chunk), expected(reference, ids))


@pytest.mark.slow
def test_prefill_then_decode(pair):
    decoder, reference = pair
    driver = HandDriver(decoder, block_size=BLOCK)
    ids = tokens(30)
    sequence = driver.add(ids)
    rows = [*driver.run([(sequence, 18)]), *(driver.run([(sequence, 1)])[0] for _ in range(12))]
    assert_close(torch.cat(rows), expected(reference, ids))


@pytest.mark.slow
def test_ragged_mixture(pair):
    """Decodes of unlike lengths, prompt pieces and whole prompts in one pass, in any order, with scattered blocks."""
    decoder, reference = pair
    driver = HandDriver(decoder, block_size=BLOCK, shuffle=5)
    rng = random.Random(1)
    sequences = [driver.add(tokens(length, seed=length)) for length in (1, 2, 6, 9, 13, 21, 33, 48)]
    rows: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(sequences))}
    while pending := [s for s in sequences if s.num_computed < len(s.tokens)]:
        rng.shuffle(pending)
        work = [(s, rng.choice([1, 1, 1, min(5, r), r])) for s in pending if (r := len(s.tokens) - s.num_computed)]
        work = work[: rng.randint(1, len(work))]
        for (sequence, _), logits in zip(work, driver.run(work), strict=True):
            rows[sequences.index(sequence)].append(logits)
    for i, sequence in enumerate(sequences):
        assert_close(torch.cat(rows[i]), expected(reference, sequence.tokens))


def test_a6_dynamic_does_not_leak(tmp_path):
    """A short prompt after a long one, and in a batch with it, has exactly its own frequencies."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    decoder = load_decoder(tiny_llama(tmp_path, tokenizer=False, max_position_embeddings=16, rope_parameters=rope))
    short, long = tokens(8), tokens(30, seed=1)

    driver = HandDriver(decoder)
    alone = driver.read(driver.add(short), 8)
    driver = HandDriver(decoder)
    driver.read(driver.add(long), 30)
    after = driver.read(driver.add(short), 8)
    driver = HandDriver(decoder)
    together = driver.run([(driver.add(long), 30), (driver.add(short), 8)])[1]
    assert torch.equal(alone, after)
    assert_close(together, alone)
    assert decoder.regime(8) == () != decoder.regime(30)


@pytest.mark.parametrize("fault", ["block_table", "rope_pairing", "kv_head"])
def test_planted_faults_are_caught(tmp_path, monkeypatch, fault):
    """Negative controls: the comparison above fails when the model is wrong."""
    directory = tiny_llama(tmp_path, tokenizer=False)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    decoder = load_decoder(directory)
    driver = HandDriver(decoder, block_size=BLOCK)
    sequence = driver.add(tokens(22))
    if fault == "rope_pairing":
        for rope in (module for module in decoder.modules() if isinstance(module, Rope)):
            right = rope._rotary
            monkeypatch.setattr(
                rope,
                "_rotary",
                lambda x, cos, sin, right=right: right(
                    x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin
                ),
            )
    first = driver.run([(sequence, 9)])
    if fault == "block_table":
        driver.builder._table[sequence.slot, 1] = driver._blocks[0]  # somebody else's
    if fault == "kv_head":
        for cache in driver.builder.caches:
            cache.keys.copy_(cache.keys.flip(2))
    got = torch.cat([*first, *driver.run([(sequence, 13)])])
    assert (got - expected(reference, sequence.tokens)).abs().max() > 100 * TOLERANCE


def test_stale_cache_values_cannot_reach_a_neighbour(tmp_path):
    """C9: NaN left behind in a block by a request that overflowed does not leak to the block's next owner."""
    directory = tiny_llama(tmp_path, tokenizer=False)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    driver = HandDriver(load_decoder(directory), block_size=BLOCK)
    for cache in driver.builder.caches:
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    first, second = driver.add(tokens(11)), driver.add(tokens(30, seed=2))
    driver.run([(first, 5), (second, 25)])
    rows = [driver.run([(first, 1), (second, 1)]) for _ in range(5)]
    assert_close(torch.cat([r[0] for r in rows]), expected(reference, first.tokens)[5:10])
    assert_close(torch.cat([r[1] for r in rows]), expected(reference, second.tokens)[25:])
