"""The real model: greedy text equals transformers' generate, token for token, however the work is cut and shared."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import fastgen
from fastgen import Engine, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

LENGTHS = [round(5 + 695 * (i / 49) ** 8) for i in range(50)]  # 5 to 700, most of them short
NEW_TOKENS = [8 if length < 40 else 24 if length < 200 else 3 for length in LENGTHS]

# The longest request takes 176 blocks of 4 tokens; some answers grow by six, more than admission leaves spare.
PREEMPTS = {"block_size": 4, "num_blocks": 220}
CIRCUMSTANCES = [
    pytest.param(
        {"max_sequences": 1, "prefix_caching": False}, id="alone, no prefix cache", marks=pytest.mark.thorough
    ),
    pytest.param({}, id="batched"),
    pytest.param({"max_batch_tokens": 64}, id="budget of 64", marks=pytest.mark.thorough),
    pytest.param(PREEMPTS, id="pool that preempts"),
    pytest.param({**PREEMPTS, "prefix_caching": False}, id="pool that preempts, no cache", marks=pytest.mark.thorough),
]


@pytest.fixture(scope="module")
def prompts(real_model, repository: Path) -> list[list[int]]:
    """Pieces of English text; some share their beginnings, so that the prefix cache has something to find."""
    from fastgen.text import Tokenizer

    text = (repository / "LICENSE").read_text() + (repository / "docs" / "OneRequest.md").read_text()
    ids = Tokenizer.load(real_model).encode(" ".join(text.split()))
    starts = [0 if i % 3 == 0 else 37 * i for i in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def expected(real_model, prompts) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for ids, count in zip(prompts, NEW_TOKENS, strict=True):
            out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=2)
            answers.append(out[0, len(ids) :].tolist())
    return answers


@pytest.fixture(scope="module")
def reference_decode(real_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model, trust_remote_code=False)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("options", CIRCUMSTANCES)
def test_greedy_text_equals_generate(real_model, prompts, expected, reference_decode, options):
    with Engine.load(real_model, device="cpu", dtype="float32", **{"num_blocks": 1024, **options}) as engine:
        answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        for i in reversed(range(len(prompts))):  # the longest first: then they are at work side by side
            engine.add(prompts[i], SamplingParams(max_new_tokens=NEW_TOKENS[i], temperature=0.0), request_id=str(i))
        while engine.has_work:
            for output in engine.step():
                assert output.token_id is not None, output
                answers[output.request_id].append(output.token_id)
        stats = engine.stats()
        decode = engine.tokenizer.decode
    assert list(answers.values()) == expected
    assert [decode(ids) for ids in answers.values()] == [reference_decode(ids) for ids in expected]
    assert (stats.preemptions > 0) == (options.get("num_blocks") == 220)
    assert (stats.prefix_hit_tokens > 0) == options.get("prefix_caching", True)
    assert stats.used_blocks == 0


def test_answers_are_sensible(real_model):
    """The weights, the tokenizer and the chat template belong together."""
    with Engine.load(real_model, device="cpu", num_blocks=64) as engine:
        ids = engine.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
        engine.add(ids, SamplingParams(max_new_tokens=24, temperature=0.0))
        answer = []
        while engine.has_work:
            answer += [output.token_id for output in engine.step()]
    assert "Paris" in engine.tokenizer.decode(answer)


@pytest.fixture(scope="module")
def perplexity(real_model, repository):
    """A function of the engine's options: the perplexity of some English, in two prompts of 1,536 tokens."""
    text = (repository / "LICENSE").read_text() + (repository / "docs" / "Parts.md").read_text()

    def measure(**options: object) -> float:
        with fastgen.pipeline(real_model, device="cpu", num_blocks=128, prefix_caching=False, **options) as pipe:
            ids = pipe.engine.tokenizer.encode(" ".join(text.split()))
            pieces = [ids[start : start + 1536] for start in (0, 1536)]
            calls = [pipe(prompt_token_ids=piece, max_new_tokens=1, prompt_logprobs=0) for piece in pieces]
        found = [one.logprob for call in calls for one in call.prompt_logprobs if one is not None]
        assert len(found) == 2 * 1535
        return math.exp(-sum(found) / len(found))

    return measure


@pytest.mark.thorough
def test_perplexity_with_a_cache_of_8_bits(perplexity):
    whole, short = (perplexity(dtype="float32", kv_dtype=kv_dtype) for kv_dtype in ("auto", "int8"))
    assert 0 < abs(short / whole - 1) < 0.005
