"""Admission and resolution of requests."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest

from fastgen.core.request import DEFAULT_MAX_NEW_TOKENS, Limits, Sampling, resolve
from fastgen.errors import InvalidRequestError
from fastgen.types import SamplingParams

LIMITS = Limits(max_model_len=16, vocab_rows=72, valid_ids=61, cache_tokens=1000)
WIDE = Limits(max_model_len=8192, vocab_rows=72, valid_ids=61, cache_tokens=100_000)


def ask(
    prompt: Any = (1, 2, 3),
    *,
    file: dict[str, Any] | None = None,
    eos: frozenset[int] = frozenset(),
    limits: Limits = WIDE,
    chat: bool = False,
    seeds: random.Random | None = None,
    **fields: Any,
) -> Sampling:
    return resolve(
        SamplingParams.of(**fields),
        list(prompt),
        generation_config=file or {},
        eos_ids=eos,
        limits=limits,
        chat=chat,
        seeds=seeds or random.Random(0),
    )


def test_needs_no_torch() -> None:
    code = "import sys, fastgen.core.request; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_is_left_open() -> None:
    sampling = ask()
    assert all(getattr(sampling, name) is not None for name in Sampling.__slots__)


# -- randomness: the request, then the file, then the default


def test_silence_everywhere_is_greedy() -> None:
    sampling = ask()
    assert sampling.greedy
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0, 1, 0)
    assert sampling.from_model == ()


def test_do_sample_brings_transformers_own_defaults() -> None:
    """The distribution of ``generate()`` with nothing else in the file: temperature 1, top_k 50."""
    sampling = ask(file={"do_sample": True})
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 50, 1, 0)
    assert sampling.from_model == ("do_sample",)


def test_a19_file_values_are_used_and_reported() -> None:
    file = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    sampling = ask(file=file)
    taken = {name: getattr(sampling, name) for name in file if name != "do_sample"}
    assert taken == {name: value for name, value in file.items() if name != "do_sample"}
    assert set(sampling.from_model) == set(file)


def test_a19_override_of_one_key_keeps_the_others() -> None:
    file = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9}
    sampling = ask(file=file, temperature=0.3)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.3, 20, 0.9)
    assert sampling.from_model == ("top_k", "top_p")


def test_a19_file_without_do_sample_still_shapes_an_asked_temperature() -> None:
    sampling = ask(file={"top_p": 0.9}, temperature=0.8)
    assert (sampling.top_p, sampling.top_k, sampling.from_model) == (0.9, 0, ("top_p",))


def test_file_temperature_without_do_sample_is_greedy_as_in_transformers() -> None:
    sampling = ask(file={"temperature": 0.6, "top_p": 0.9})
    assert sampling.greedy
    assert sampling.from_model == ()


def test_request_wins_over_the_file_even_with_an_off_value() -> None:
    file = {"do_sample": True, "top_k": 20, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.3}
    sampling = ask(file=file, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0, 1, 0, 1)


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (60, 60), (61, 0), (10**12, 0)])
def test_c4_top_k_off_values(top_k: int, expected: int) -> None:
    assert ask(temperature=1.0, top_k=top_k).top_k == expected
    assert ask(file={"do_sample": True, "top_k": top_k}).top_k == expected


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1e-7}, {"temperature": 1.0, "top_p": 0.0}])
def test_greedy_spellings(fields: dict[str, float]) -> None:
    assert ask(**fields).greedy
    assert not ask(temperature=1e-4, top_p=1.0).greedy


# -- what ends an answer


def test_a19_end_ids_are_a_union() -> None:
    sampling = ask(eos=frozenset({5, 6}), file={"eos_token_id": [7, 8]}, stop_token_ids=[9])
    assert sampling.stop_ids == {5, 6, 7, 8, 9}


def test_a19_ignore_eos_keeps_the_requests_own() -> None:
    sampling = ask(eos=frozenset({5}), file={"eos_token_id": 7}, stop_token_ids=[9], ignore_eos=True)
    assert sampling.stop_ids == {9}


def test_an_end_id_that_cannot_be_produced_is_left_out() -> None:
    assert ask(eos=frozenset({5, 61, 70000}), file={"eos_token_id": -1}).stop_ids == {5}


# -- lengths


@pytest.mark.parametrize("length", [0, 16, 17])
def test_b8_prompts_that_are_refused(length: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask([1] * length, limits=LIMITS)
    words = str(caught.value)
    assert "empty" in words if length == 0 else (f"{length} tokens" in words and "16" in words)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(("asked", "total"), [(None, 16), (1, 16)])
def test_b8_prompt_one_below_the_limit(asked: int | None, total: int) -> None:
    assert ask([1] * 15, limits=LIMITS, max_new_tokens=asked).max_tokens == total


def test_b8_explicit_length_beyond_the_limit_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"max_new_tokens .* 17 in all.* 16 \(max_model_len\)") as caught:
        ask([1] * 15, limits=LIMITS, max_new_tokens=2)
    assert "at most 1" in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, True, "5", 2.5])
def test_b8_lengths_that_are_no_count(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="max_new_tokens"):
        ask(max_new_tokens=value)


def test_b8_defaults_of_completion_and_chat() -> None:
    assert ask().max_new_tokens == DEFAULT_MAX_NEW_TOKENS
    assert ask(chat=True).max_tokens == WIDE.max_model_len
    assert ask(limits=LIMITS).max_tokens == ask(limits=LIMITS, chat=True).max_tokens == 16


def test_b8_max_length_counts_the_prompt() -> None:
    assert ask([1] * 5, limits=LIMITS, max_length=12).max_new_tokens == 7
    with pytest.raises(InvalidRequestError, match=r"max_length is 5.* prompt alone has 5"):
        ask([1] * 5, limits=LIMITS, max_length=5)
    with pytest.raises(InvalidRequestError, match=r"max_length .* 17 in all"):
        ask([1] * 5, limits=LIMITS, max_length=17)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({"max_new_tokens": 40}, 40),
        ({"max_length": 50}, 47),
        ({"max_new_tokens": 40, "max_length": 50}, 40),
        ({"max_new_tokens": 10**6}, 8189),
    ],
)
def test_length_from_the_file(file: dict[str, int], expected: int, chat: bool) -> None:
    sampling = ask(file=file, chat=chat)
    assert sampling.max_new_tokens == expected
    assert sampling.from_model == (next(iter(file)),)
    assert ask(file=file, chat=chat, max_new_tokens=3).max_new_tokens == 3


def test_max_length_of_the_file_that_the_prompt_fills_is_not_used() -> None:
    sampling = ask([1] * 20, file={"max_length": 20})
    assert (sampling.max_new_tokens, sampling.from_model) == (DEFAULT_MAX_NEW_TOKENS, ())


def test_min_new_tokens() -> None:
    assert ask(file={"min_new_tokens": 4}).min_new_tokens == 4
    assert ask(file={"min_length": 10}).min_new_tokens == 7
    assert ask(file={"min_new_tokens": 4}, min_new_tokens=0).min_new_tokens == 0
    assert ask(file={"min_new_tokens": 400}, max_new_tokens=5).min_new_tokens == 5


def test_min_new_tokens_raises_an_open_length_and_must_fit() -> None:
    sampling = ask(min_new_tokens=300)
    assert (sampling.min_new_tokens, sampling.max_new_tokens) == (300, 300)
    with pytest.raises(InvalidRequestError, match=r"min_new_tokens .* 23 in all"):
        ask(limits=LIMITS, min_new_tokens=20)
    with pytest.raises(InvalidRequestError, match="min_new_tokens is 8, but max_length 10 leaves room for 7"):
        ask(min_new_tokens=8, max_length=10)


POOL = Limits(max_model_len=64, vocab_rows=72, valid_ids=61, cache_tokens=16)


@pytest.mark.parametrize(
    ("prompt", "fields"), [(20, {}), (17, {}), (8, {"max_new_tokens": 20}), (8, {"max_length": 18})]
)
def test_d1_what_can_never_fit_is_refused_with_the_remedy(prompt: int, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match=r"KV cache holds 16.* num_blocks or cache_memory"):
        ask([1] * prompt, limits=POOL, **fields)


@pytest.mark.parametrize(("prompt", "fields"), [(16, {"max_new_tokens": 1}), (8, {"max_new_tokens": 9}), (6, {})])
def test_d1_what_just_fits_is_let_in(prompt: int, fields: dict[str, int]) -> None:
    """The answer's last token is never run, so 17 tokens fit 16 places; an open length is cut to that."""
    assert ask([1] * prompt, limits=POOL, **fields).max_tokens == 17
    assert ask([1] * prompt, limits=POOL, chat=True, **fields).max_tokens == 17


# -- ids


@pytest.mark.parametrize("bad", [-1, 72, 10**12, "abc", 1.5, True, None])
@pytest.mark.parametrize("position", [0, 2])
def test_c5_prompt_ids(bad: object, position: int) -> None:
    prompt: list[object] = [1, 2, 3]
    prompt[position] = bad
    with pytest.raises(InvalidRequestError, match=rf"prompt_token_ids\[{position}\] is {bad!r}"):
        ask(prompt)


def test_c5_the_whole_embedding_may_be_read() -> None:
    assert ask([0, 71]).max_tokens == 2 + DEFAULT_MAX_NEW_TOKENS


@pytest.mark.parametrize("bad", [-1, 61, 10**12])
def test_c5_ids_of_an_answer(bad: int) -> None:
    for fields in ({"logit_bias": {3: 1.0, bad: 1.0}}, {"stop_token_ids": [3, bad]}):
        (name,) = fields
        with pytest.raises(InvalidRequestError, match=f"{name} names the token id {bad}; .* 0 to 60"):
            ask(**fields)


@pytest.mark.parametrize("bad", ["abc", "1.5", 1.5, True])
def test_c5_keys_that_are_no_ids(bad: object) -> None:
    for fields in ({"logit_bias": {bad: 1.0}}, {"stop_token_ids": [bad]}):
        with pytest.raises(InvalidRequestError, match=next(iter(fields))):
            ask(**fields)


# -- seeds


def test_c9_unseeded_requests_draw_from_the_engines_generator() -> None:
    seeds = random.Random(7)
    first, second = ask(seeds=seeds).seed, ask(seeds=seeds).seed
    assert first != second
    assert [first, second] == [ask(seeds=again).seed for again in [random.Random(7)] for _ in range(2)]


def test_a_seeded_request_leaves_the_engines_generator_alone() -> None:
    seeds = random.Random(7)
    assert ask(seeds=seeds, seed=0).seed == 0
    assert seeds.getstate() == random.Random(7).getstate()


def test_unset_logprobs_differ_from_none_besides_the_chosen() -> None:
    assert (ask().logprobs, ask(logprobs=0).logprobs, ask(prompt_logprobs=3).prompt_logprobs) == (-1, 0, 3)
