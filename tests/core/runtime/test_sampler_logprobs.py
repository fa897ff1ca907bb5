"""Reported log-probabilities, against torch's log-softmax."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from fastgen.core.runtime.logprobs import LOWEST_LOGPROB, prompt_logprobs, token_logprobs
from fastgen.types import TokenLogprob


def random_logits(rows: int, vocab: int = 300, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 4).to(dtype)


def by_definition(logits: Tensor, token: int, count: int) -> TokenLogprob:
    values = torch.log_softmax(logits.float(), -1).tolist()
    order = sorted(range(len(values)), key=lambda other: (-values[other], other))[:count]

    def rank(of: int) -> int:
        return 1 + sum(value > values[of] for value in values)

    top = tuple(TokenLogprob(other, values[other], rank(other)) for other in order)
    return TokenLogprob(token, values[token], rank(token), top=top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_c8_values_ranks_and_order(dtype: torch.dtype, count: int) -> None:
    """In half precision many values are equal: those are listed by ascending id, also where the list ends."""
    logits = random_logits(9, dtype=dtype)
    tokens = [0, 299, 7, 7, 150, 33, 12, 290, 1]
    found = token_logprobs(logits, tokens, [count] * 9)
    assert found == [by_definition(row, token, count) for row, token in zip(logits, tokens, strict=True)]


def test_ties_at_the_end_of_the_list_do_not_depend_on_batch_mates() -> None:
    logits = torch.randint(0, 4, (6, 200), generator=torch.Generator().manual_seed(0)).float()
    tops = [0, 3, 100, 1, 60, 20]
    together = token_logprobs(logits, [5] * 6, tops)
    assert together == [token_logprobs(logits[i : i + 1], [5], [tops[i]])[0] for i in range(6)]
    assert together == [by_definition(logits[i], 5, tops[i]) for i in range(6)]


def test_more_rows_than_are_worked_on_at_once() -> None:
    logits = random_logits(150, vocab=20)
    tokens = [row % 20 for row in range(150)]
    assert token_logprobs(logits, tokens, [2] * 150) == [
        by_definition(row, token, 2) for row, token in zip(logits, tokens, strict=True)
    ]


def test_more_asked_for_than_there_are_tokens() -> None:
    logits = random_logits(2, vocab=5)
    assert [len(found.top) for found in token_logprobs(logits, [0, 1], [100, 5])] == [5, 5]


def test_a_prompt_token_beyond_the_output_head_is_impossible() -> None:
    beyond, within = token_logprobs(random_logits(2, vocab=5), [5, 4], [1, 1])
    assert (beyond.token_id, beyond.logprob, beyond.rank) == (5, LOWEST_LOGPROB, 6)
    assert within == by_definition(random_logits(2, vocab=5)[1], 4, 1)


def test_c6_masked_values_become_a_documented_number() -> None:
    logits = torch.tensor([[1.0, -math.inf, -math.inf, -math.inf], [math.nan, 1.0, 2.0, 3.0]])
    found = token_logprobs(logits, [2, 1], [3, 3])
    words = json.dumps([asdict(entry) for entry in found], allow_nan=False)
    assert "9999.0" in words
    assert found[0].logprob == LOWEST_LOGPROB
    assert [(top.token_id, top.logprob, top.rank) for top in found[0].top] == [
        (0, 0.0, 1),
        (1, LOWEST_LOGPROB, 2),
        (2, LOWEST_LOGPROB, 2),
    ]


def test_c6_without_the_clamp_json_would_refuse() -> None:
    """The control: log-softmax itself does give what JSON cannot say."""
    raw = torch.log_softmax(torch.tensor([1.0, -math.inf]), -1).tolist()
    with pytest.raises(ValueError, match="JSON compliant"):
        json.dumps(raw, allow_nan=False)


def test_d9_prompt_logprobs_in_chunks_equal_one_pass() -> None:
    """Nine tokens: eight are predicted. Cut after 4: token 4 is scored from the first piece's last row."""
    logits = random_logits(9)
    prompt = [3, 8, 8, 1, 0, 299, 5, 6, 7]
    whole = prompt_logprobs(logits[:8], prompt[1:], 4)
    pieces = prompt_logprobs(logits[:4], prompt[1:5], 4) + prompt_logprobs(logits[4:8], prompt[5:], 4)
    assert whole == pieces == [by_definition(logits[i], prompt[i + 1], 4) for i in range(8)]
    assert prompt_logprobs(logits[:0], [], 4) == []
