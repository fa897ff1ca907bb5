"""Picking tokens for whole batches: isolation of rows, seeds, penalties, corner values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgen.core.request import Limits, Sampling, resolve
from fastgen.core.runtime import logits as stages
from fastgen.core.runtime.sampler import Picks, Sampler, SequenceSampler, make_processors
from fastgen.core.runtime.sequence_sampler import uniforms
from fastgen.errors import InvalidRequestError
from fastgen.types import SamplingParams

VOCAB = 64
INF = float("inf")
Processors = Sequence[tuple[str, Callable[[list[int], Tensor], Tensor]]]


def ask(*, prompt: Sequence[int] = (1, 1, 2), vocab: int = VOCAB, **fields: Any) -> Sampling:
    limits = Limits(max_model_len=10**6, vocab_rows=10**6, valid_ids=vocab, cache_tokens=10**6)
    return resolve(
        SamplingParams.of(**fields),
        list(prompt),
        generation_config={},
        eos_ids=frozenset({3}),
        limits=limits,
        chat=False,
        seeds=random.Random(0),
    )


def start(
    *, prompt: Sequence[int] = (1, 1, 2), index: int = 0, processors: Processors = (), vocab: int = VOCAB, **fields: Any
) -> SequenceSampler:
    sampling = ask(prompt=prompt, vocab=vocab, **fields)
    return SequenceSampler(sampling, list(prompt), index, processors, vocab_size=vocab)


def pick(logits: Tensor, *states: SequenceSampler) -> Picks:
    return Sampler(valid_rows=logits.shape[-1]).pick(logits.reshape(len(states), -1), states)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def run(state: SequenceSampler, logits: Tensor, *, mates: Sequence[SequenceSampler] = (), row: int = 0) -> list[int]:
    """Samples one token from each of ``logits [steps, vocab]``, with batch mates that see logits of their own."""
    tokens = []
    for step in range(len(logits)):
        states = [*mates[:row], state, *mates[row:]]
        batch = random_logits(len(states), logits.shape[1], seed=1000 + step)
        batch[row] = logits[step]
        picks = pick(batch, *states)
        for mate, token in zip(states, picks.tokens, strict=True):
            assert token is not None
            mate.observe(token)
        tokens.append(picks.tokens[row])
    return tokens


# -- greedy


def test_greedy_is_the_argmax_of_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = random_logits(8).to(dtype)
        assert pick(logits, *[start() for _ in range(8)]).tokens == logits.argmax(-1).tolist()


def test_greedy_takes_the_first_of_equals_alone_or_beside_processed_rows() -> None:
    logits = torch.zeros(2, VOCAB)
    assert pick(logits, start(), start(logit_bias={5: -1.0})).tokens == [0, 0]


def test_neither_logits_nor_states_change() -> None:
    logits = random_logits(3)
    before = logits.clone()
    states = [
        start(temperature=1.0, top_k=5, logit_bias={1: 3.0}),
        start(repetition_penalty=2.0),
        start(min_new_tokens=2),
    ]
    assert pick(logits, *states) == pick(logits, *states)
    assert torch.equal(logits, before)


def test_a18_padding_rows_of_the_head_are_never_chosen() -> None:
    """Head of 72 rows, ids up to 60 (with a hole): row 70 is the highest, the added id 60 is reachable."""
    logits = random_logits(4, 72)
    logits[:, 70] = 50.0
    logits[:2, 60] = 40.0
    states = [
        start(vocab=61),
        start(vocab=61, temperature=1.0),
        start(vocab=61, temperature=5.0),
        start(vocab=61, frequency_penalty=1.0),
    ]
    tokens = Sampler(valid_rows=61).pick(logits, states).tokens
    assert tokens[:2] == [60, 60]
    assert all(token is not None and token < 61 for token in tokens)
    assert Sampler(valid_rows=72).pick(logits, states).tokens[0] == 70, "the control"


def test_prompt_ids_beyond_the_output_head_carry_no_penalty() -> None:
    state = start(prompt=[1, 500, 70], repetition_penalty=2.0)
    assert state.counts is not None
    assert state.counts.ids.tolist() == [1]


def test_the_operation_handed_in_finds_the_best_of_raw_and_of_processed_rows() -> None:
    looked_at: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def argmax(x: Tensor) -> Tensor:
        looked_at.append((x.dtype, tuple(x.shape)))
        return x.argmax(-1)

    logits = random_logits(3).bfloat16()
    states = [start(vocab=60), start(vocab=60, logit_bias={7: 100.0}), start(vocab=60, temperature=1.0)]
    tokens = Sampler(valid_rows=60, argmax=argmax).pick(logits, states).tokens
    assert tokens[:2] == [int(logits[0, :60].argmax()), 7]
    assert looked_at == [(torch.bfloat16, (3, 60)), (torch.float32, (1, 60))]
    assert Sampler(valid_rows=60).pick(logits, states).tokens == tokens


def test_batch_and_states_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows of logits came with 1 states"):
        Sampler(valid_rows=VOCAB).pick(random_logits(2), [start()])
    with pytest.raises(ValueError, match="64 columns, fewer than the 65 valid ids"):
        Sampler(valid_rows=VOCAB + 1).pick(random_logits(1), [start()])


# -- C1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
def test_c1_tiny_temperatures_are_greedy(dtype: torch.dtype, temperature: float) -> None:
    logits = (random_logits(50) * 1000).to(dtype)
    logits[7, 10:] = -INF
    logits = logits[(logits.topk(2).values.diff() != 0).flatten()]  # of exact equals any may be drawn
    assert len(logits) > 40
    states = [start(temperature=temperature, seed=seed) for seed in range(len(logits))]
    picks = pick(logits, *states)
    assert picks.errors == {}
    assert picks.tokens == logits.argmax(-1).tolist()


def test_c1_a_small_temperature_still_draws() -> None:
    """The control: 1e-4 is not simply greedy. Two logits 1e-4 apart are e : 1."""
    logits = torch.full((4000, VOCAB), -1.0)
    logits[:, 5], logits[:, 9] = 0.0, 1e-4
    tokens = pick(logits, *[start(temperature=1e-4, seed=seed) for seed in range(4000)]).tokens
    assert abs(tokens.count(9) / 4000 - math.e / (1 + math.e)) < 0.03
    assert tokens.count(5) + tokens.count(9) == 4000


# -- C3


def adjusted(state: SequenceSampler, logits: list[float]) -> list[float]:
    """The logits after penalties, as a last processor sees them."""
    seen: list[Tensor] = []

    def spy(output_ids: list[int], row: Tensor) -> Tensor:
        seen.append(row.clone())
        return row

    state.processors = (("spy", spy),)
    longer = start(prompt=list(range(40)), repetition_penalty=1.7, frequency_penalty=2.0, vocab=len(logits))
    pick(torch.tensor([logits, [9.0] * len(logits)]), state, longer)
    return seen[0].tolist()


def test_c3_penalties_by_hand() -> None:
    """Prompt [1, 1, 2]; the answer becomes [4, 4]; ids 0..5. A neighbour with a longer history changes nothing."""
    logits = [1.0, 2.0, -2.0, 0.5, 3.0, -1.0]
    state = start(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, vocab=6)
    assert adjusted(state, logits) == [1.0, 1.0, -4.0, 0.5, 3.0, -1.0]
    state.observe(4)
    assert adjusted(state, logits) == [1.0, 1.0, -4.0, 0.5, 1.5 - 0.75, -1.0]
    state.observe(4)
    assert adjusted(state, logits) == [1.0, 1.0, -4.0, 0.5, 1.5 - 1.0, -1.0]


def test_c3_presence_and_frequency_leave_the_prompt_alone() -> None:
    logits = [1.0, 2.0, -2.0, 0.5, 3.0, -1.0]
    state = start(presence_penalty=1.0, frequency_penalty=-0.5, vocab=6)
    assert adjusted(state, logits) == logits
    state.observe(1)
    state.observe(5)
    state.observe(1)
    assert adjusted(state, logits) == [1.0, 2.0, -2.0, 0.5, 3.0, -1.5]
    assert pick(torch.tensor(logits), start(vocab=6)).tokens == [4]


def test_counts_grow_with_the_answer() -> None:
    answer = [int(token) for token in np.random.default_rng(0).integers(0, 300, 2000)]
    state = start(prompt=[7, 7, 8], repetition_penalty=1.1, vocab=300)
    for token in answer:
        state.observe(token)
    assert state.counts is not None
    found = dict(zip(state.counts.ids.tolist(), state.counts.counts.tolist(), strict=True))
    assert found == {token: float(answer.count(token)) for token in {7, 8, *answer}}


# -- ends


def test_min_new_tokens_masks_every_end() -> None:
    """The model's end token 3 and the request's 9 lead; neither comes within the first two tokens."""
    logits = torch.zeros(VOCAB)
    logits[3], logits[9], logits[20] = 30.0, 20.0, 10.0
    state = start(min_new_tokens=2, stop_token_ids=[9])
    assert run(state, logits.expand(4, -1)) == [20, 20, 3, 3]
    eos_is_a_token = start(min_new_tokens=2, stop_token_ids=[9], ignore_eos=True)
    assert run(eos_is_a_token, logits.expand(2, -1)) == [3, 3]


# -- C4 at the request's level


def test_c4_top_p_zero_is_the_best_token_only() -> None:
    logits = random_logits(30)
    states = [start(temperature=3.0, top_p=0.0, seed=seed) for seed in range(30)]
    assert pick(logits, *states).tokens == logits.argmax(-1).tolist()


def test_c4_off_values_leave_the_draw_alone() -> None:
    logits = random_logits(1).expand(500, -1)
    plain = pick(logits, *[start(temperature=0.9, seed=seed) for seed in range(500)]).tokens
    off = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert plain == pick(logits, *[start(temperature=0.9, seed=seed, **off) for seed in range(500)]).tokens
    cut = pick(logits, *[start(temperature=0.9, seed=seed, top_p=0.5) for seed in range(500)]).tokens
    assert plain != cut, "the control"


def test_a_row_pays_only_for_its_own_settings() -> None:
    """Every request draws in a mixed batch what it draws alone."""
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.6},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logit_bias": {5: 4.0}},
        {"repetition_penalty": 3.0, "logit_bias": {1: 50.0}},
        {"frequency_penalty": 1.0, "temperature": 1.0, "min_new_tokens": 3},
    ]
    logits = random_logits(len(settings))
    together = pick(logits, *[start(seed=i, **fields) for i, fields in enumerate(settings)])
    alone = [pick(logits[i], start(seed=i, **fields)).tokens[0] for i, fields in enumerate(settings)]
    assert together.tokens == alone


SHAPES: list[dict[str, Any]] = [
    {"top_k": 50},
    {"top_k": 3, "top_p": 0.7},
    {"top_k": 100, "min_p": 0.05},
    {"top_k": 1},
    {"top_p": 0.9},
    {"top_k": 1500, "top_p": 0.95},
    {},
]


def wide_batch() -> tuple[Tensor, list[SequenceSampler]]:
    """42 rows of 2000 tokens, every third with many equal logits, of every shape of distribution."""
    logits = random_logits(42, 2000)
    logits[::3] = (logits[::3] / 2).round()
    states = [start(vocab=2000, temperature=1.1, seed=row, **SHAPES[row % len(SHAPES)]) for row in range(42)]
    return logits, states


def test_any_grouping_of_rows_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, states = wide_batch()
    together = pick(logits, *states).tokens
    assert together == [pick(row, state).tokens[0] for row, state in zip(logits, states, strict=True)]
    monkeypatch.setattr(stages, "rows_at_once", lambda logits: 5)
    assert together == pick(logits, *states).tokens


def test_a_draw_from_candidates_is_a_draw_from_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, states = wide_batch()
    narrow = pick(logits, *states).tokens
    monkeypatch.setattr(stages, "candidate_width", lambda k: 0)
    assert narrow == pick(logits, *states).tokens


# -- C9: NaN, masked tokens, seeds


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"logit_bias": {1: 1.0}}])
@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (INF, r"\+inf")])
def test_c9_a_broken_row_fails_alone(fields: dict[str, Any], value: float, word: str) -> None:
    logits = random_logits(3).half()
    expected = pick(logits, *[start(seed=1, **fields) for _ in range(3)]).tokens
    logits[1, 17] = value
    picks = pick(logits, *[start(seed=1, logprobs=1, **fields) for _ in range(3)])
    assert picks.tokens == [expected[0], None, expected[2]]
    assert list(picks.errors) == [1]
    assert word.strip("\\") in picks.errors[1]
    assert set(picks.logprobs) == {0, 2}


def test_c9_nan_in_padding_rows_is_seen_and_minus_inf_is_not() -> None:
    logits = random_logits(3, 72)
    logits[0, 70], logits[1, 70] = math.nan, INF
    logits[2, 64:] = -INF
    picks = Sampler(valid_rows=64).pick(logits, [start() for _ in range(3)])
    assert list(picks.errors) == [0, 1]
    assert picks.tokens[2] is not None


def test_c9_a_row_without_any_token_fails() -> None:
    logits = torch.full((2, VOCAB), -INF)
    logits[1, 3] = 1.0
    states = [start(), start(min_new_tokens=1)]
    errors = pick(logits, *states).errors
    assert "the model's logits leave no token" in errors[0]
    assert "the processed logits leave no token" in errors[1]


CHI_SQUARE_3 = 16.27  # three degrees of freedom: exceeded by chance once in 1000


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    live = expected > 0
    return float(((counts[live] - expected[live]) ** 2 / expected[live]).sum())


def test_c9_frequencies_are_the_distribution() -> None:
    """10^5 draws with 60 of 64 logits at -inf: chi-square against softmax, and nothing masked."""
    logits = torch.full((VOCAB,), -INF)
    logits[torch.tensor([0, 13, 40, 63])] = torch.tensor([0.3, -1.0, 1.2, -3.0])
    tokens: list[int] = []
    states = [start(temperature=1.0, seed=seed) for seed in range(1000)]
    for _ in range(100):
        for state, token in zip(states, pick(logits.expand(1000, -1), *states).tokens, strict=True):
            assert token is not None
            state.observe(token)
            tokens.append(token)
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = torch.softmax(logits.double(), -1).numpy() * len(tokens)
    assert len(tokens) == 100_000
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts, expected) < CHI_SQUARE_3
    skewed = torch.softmax(logits.double() * 1.03, -1).numpy() * len(tokens)
    assert chi_square(counts, skewed) > CHI_SQUARE_3, "the control"


def test_c9_one_stream_is_uniform_and_its_neighbours_independent() -> None:
    """2·10^4 numbers of one sequence, against the next seed and the next choice."""
    streams = []
    for seed, index in ((5, 0), (6, 0), (5, 1)):
        key = start(temperature=1.0, seed=seed, index=index).key
        streams.append(uniforms([SimpleNamespace(key=key, num_output=position) for position in range(20_000)]))
    for numbers in streams:
        steps = np.arange(len(numbers) + 1) / len(numbers)
        distance = max(abs(np.sort(numbers) - steps[1:]).max(), abs(np.sort(numbers) - steps[:-1]).max())
        assert distance < 1.95 / math.sqrt(len(numbers))  # Kolmogorov-Smirnov, 0.001
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(streams[one], streams[other])[0, 1]) < 0.03


def test_c9_seeded_draws_ignore_batch_mates_and_row_order() -> None:
    logits = random_logits(30)
    fields: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95, "seed": 42, "repetition_penalty": 1.2}
    alone = run(start(**fields), logits)
    mates = [start(temperature=0.7, top_k=5), start(), start(temperature=1.0, frequency_penalty=1.0, seed=42)]
    for row in range(4):
        assert run(start(**fields), logits, mates=mates, row=row) == alone
    assert run(start(**{**fields, "seed": 43}), logits) != alone, "the control"


def test_c9_choices_of_one_request_differ_and_repeat() -> None:
    logits = random_logits(20)
    answers = [tuple(run(start(temperature=1.5, seed=9, index=index), logits)) for index in range(4)]
    assert len(set(answers)) == 4
    assert tuple(run(start(temperature=1.5, seed=9, index=2), logits)) == answers[2]


def test_state_survives_preemption() -> None:
    """Preempted after 10 tokens: the state sits out passes, and one discarded pass, and goes on as if nothing was."""
    logits = random_logits(25)
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.2}
    straight = run(start(**fields), logits)
    state = start(**fields)
    begun = run(state, logits[:10])
    run(start(temperature=1.0, seed=77), logits)
    pick(logits[10], state)  # its token is thrown away
    assert begun + run(state, logits[10:]) == straight


# -- C8


def test_c8_logprobs_are_the_models_own() -> None:
    logits = random_logits(2, 72)
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.1, "logit_bias": {5: 20.0}, "logprobs": 2}
    picks = Sampler(valid_rows=VOCAB).pick(logits, [start(**fields), start(logprobs=0)])
    raw = torch.log_softmax(logits, -1)
    assert picks.tokens[0] == 5
    assert picks.logprobs[0].logprob == float(raw[0, 5])
    assert picks.logprobs[0].rank == 1 + int((raw[0] > raw[0, 5]).sum())
    assert [top.token_id for top in picks.logprobs[0].top] == raw[0].topk(2).indices.tolist()
    assert picks.logprobs[1].logprob == float(raw[1, picks.tokens[1]])
    assert picks.logprobs[1].top == ()


def test_logprobs_only_where_asked_for() -> None:
    picks = pick(random_logits(3), start(), start(logprobs=1), start(temperature=1.0))
    assert set(picks.logprobs) == {1}


# -- E8: processors


def count_ids(output_ids: list[int], logits: Tensor) -> Tensor:
    """Forces the token whose id is the number of tokens so far."""
    forced = torch.full_like(logits, -INF)
    forced[len(output_ids)] = 0.0
    return forced


def fail_at_2(output_ids: list[int], logits: Tensor) -> Tensor:
    if len(output_ids) == 2:
        raise RuntimeError("no rule for this")
    return logits


def test_e8_a_raising_processor_ends_its_own_row() -> None:
    logits = random_logits(5)
    healthy = run(start(temperature=1.0, seed=4), logits)
    sick, well, counting = (
        start(processors=[("fails", fail_at_2)]),
        start(temperature=1.0, seed=4),
        start(processors=[("count", count_ids)]),
    )
    for step in range(5):
        states = [sick, well, counting] if step <= 2 else [well, counting]
        picks = pick(logits[step].expand(len(states), -1), *states)
        assert picks.errors == (
            {0: "logits processor 'fails' failed: RuntimeError: no rule for this"} if step == 2 else {}
        )
        assert picks.tokens[-2:] == [healthy[step], step]
        for state, token in zip(states, picks.tokens, strict=True):
            if token is not None:
                state.observe(token)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "NoneType instead of a tensor"),
        ([1.0] * VOCAB, "list instead of a tensor"),
        (torch.zeros(VOCAB + 1), "shape (65,), not floats of shape (64,)"),
        (torch.zeros(1), "shape (1,)"),
        (torch.zeros(VOCAB, dtype=torch.long), "torch.int64"),
        (torch.full((VOCAB,), math.nan), "the processed logits hold NaN"),
        (torch.full((VOCAB,), INF), "the processed logits hold +inf"),
        (torch.full((VOCAB,), -INF), "leave no token"),
    ],
)
def test_e8_a_processor_that_returns_nonsense(result: Any, words: str) -> None:
    bad = start(processors=[("odd", lambda output_ids, logits: result)], temperature=1.0)
    logits = random_logits(2)
    picks = pick(logits, bad, start())
    assert picks.tokens == [None, int(logits[1].argmax())]
    assert words in picks.errors[0]


def test_e8_processors_run_in_order_on_processed_logits_of_any_dtype() -> None:
    def first(output_ids: list[int], logits: Tensor) -> Tensor:
        assert logits.dtype == torch.float32
        assert float(logits[8]) == 60.0  # the bias came before
        return (logits * 0).half()

    def second(output_ids: list[int], logits: Tensor) -> Tensor:
        assert not logits.any()
        logits[50] = 1.0
        return logits

    picks = pick(torch.zeros(VOCAB), start(logit_bias={8: 60.0}, processors=[("a", first), ("b", second)]))
    assert (picks.tokens, picks.errors) == ([50], {})


class Factory:
    def __call__(self, options: Any, *, vocab_size: int, prompt_token_ids: list[int]) -> Any:
        assert (vocab_size, prompt_token_ids) == (VOCAB, [1, 2])
        if options is None:
            raise KeyError("rule")
        return count_ids if options == {} else options


def make(requested: dict[str, Any]) -> list[tuple[str, Any]]:
    return make_processors(requested.items(), {"count": Factory()}, vocab_size=VOCAB, prompt_token_ids=[1, 2])


def test_e8_processors_are_made_at_the_front_or_refused() -> None:
    assert make({"count": {}}) == [("count", count_ids)]
    with pytest.raises(InvalidRequestError, match=r"unknown logits processor 'cuont'.*Did you mean 'count'"):
        make({"cuont": {}})
    with pytest.raises(InvalidRequestError, match="'count' refused its options None: KeyError"):
        make({"count": None})
    with pytest.raises(InvalidRequestError, match="made 7, which cannot be called"):
        make({"count": 7})
