"""The real model with quantised weights: how much worse it predicts a fixed English text."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from fastgen import Engine, SamplingParams

pytestmark = [pytest.mark.thorough, pytest.mark.real_model]

PIECES, LENGTH = 4, 500


@pytest.fixture(scope="module")
def perplexity(real_model, repository: Path):
    """Of the model under these options, in bfloat16."""
    text = " ".join((repository / name).read_text() for name in ("LICENSE", "CONTRIBUTING.md"))

    @cache
    def measure(**options: str) -> float:
        losses: list[float] = []
        with Engine.load(
            real_model, device="cpu", dtype="bfloat16", num_blocks=256, packed_cache=False, **options
        ) as engine:
            ids = engine.tokenizer.encode(" ".join(text.split()))
            assert len(ids) >= PIECES * LENGTH
            for piece in range(PIECES):
                prompt = ids[piece * LENGTH : (piece + 1) * LENGTH]
                engine.add(prompt, SamplingParams(max_new_tokens=1, prompt_logprobs=0))
            while engine.has_work:
                for output in engine.step():
                    assert output.prompt_logprobs is not None
                    losses += [-one.logprob for one in output.prompt_logprobs[1:] if one is not None]
        assert len(losses) == PIECES * (LENGTH - 1)
        return math.exp(sum(losses) / len(losses))

    return measure


@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.005), ("int4", 0.06)])
def test_perplexity(perplexity, scheme, most):
    worse = perplexity(quantization=scheme) / perplexity() - 1
    assert abs(worse) < most
    assert worse != 0  # it is quantised
