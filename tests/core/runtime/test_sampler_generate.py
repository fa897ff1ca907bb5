"""The order of the stages, against ``transformers.generate`` and its own list of processors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from fastgen.core.request import Limits, Sampling, resolve
from fastgen.core.runtime import logits as stages
from fastgen.core.runtime.sampler import Sampler, SequenceSampler
from fastgen.types import SamplingParams

pytestmark = pytest.mark.slow

VOCAB = 96
EOS = [7, 8]
LIMITS = Limits(max_model_len=512, vocab_rows=VOCAB, valid_ids=VOCAB, cache_tokens=10_000)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.6,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def ask(prompt: list[int], file: dict[str, Any] | None = None, **fields: Any) -> Sampling:
    return resolve(
        SamplingParams.of(**fields),
        prompt,
        generation_config=file or {},
        eos_ids=frozenset(EOS),
        limits=LIMITS,
        chat=False,
        seeds=random.Random(1),
    )


def generate(model: LlamaForCausalLM, prompts: list[list[int]], processors: Any = (), **fields: Any) -> list[list[int]]:
    """The answers, all sequences in one batch of logits, the whole context recomputed at each step."""
    states = [SequenceSampler(ask(p, **fields), p, 0, processors, vocab_size=VOCAB) for p in prompts]
    tokens = [list(prompt) for prompt in prompts]
    running = list(range(len(prompts)))
    while running:
        with torch.no_grad():
            rows = torch.stack([model(torch.tensor([tokens[i]])).logits[0, -1] for i in running])
        picks = Sampler(valid_rows=VOCAB).pick(rows, [states[i] for i in running])
        assert picks.errors == {}
        for i, token in zip(list(running), picks.tokens, strict=True):
            assert token is not None
            tokens[i].append(token)
            states[i].observe(token)
            if token in states[i].sampling.stop_ids or len(tokens[i]) == states[i].sampling.max_tokens:
                running.remove(i)
    return [known[len(prompt) :] for known, prompt in zip(tokens, prompts, strict=True)]


def reference(model: LlamaForCausalLM, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def prompts() -> list[list[int]]:
    generator = random.Random(3)
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in (1, 3, 8, 20, 33, 5)]


class Cycle(LogitsProcessor):
    """Lifts one id above half of the best logit: what it does depends on all that ran before it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, 11] = scores.amax(-1) * 0.5 + 0.4
        return scores


def cycle(output_ids: list[int], logits: Tensor) -> Tensor:
    return Cycle()(torch.tensor([output_ids]), logits[None])[0]


BIAS = {token: (-7.0, 5.0, 9.0)[token % 5 % 3] for token in range(0, VOCAB, 2)}
GREEDY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    ({"logit_bias": BIAS}, {"sequence_bias": {(token,): bias for token, bias in BIAS.items()}}),
    ({"min_new_tokens": 12, "logit_bias": {7: 30.0}}, {"min_new_tokens": 12, "sequence_bias": {(7,): 30.0}}),
    (
        {"repetition_penalty": 1.3, "logit_bias": BIAS, "min_new_tokens": 6},
        {"repetition_penalty": 1.3, "sequence_bias": {(t,): b for t, b in BIAS.items()}, "min_new_tokens": 6},
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), GREEDY)
@pytest.mark.parametrize("custom", [False, True])
def test_greedy_answers_equal_generate(
    model: LlamaForCausalLM, ours: dict[str, Any], theirs: dict[str, Any], custom: bool
) -> None:
    found = generate(model, prompts(), [("cycle", cycle)] if custom else (), max_new_tokens=16, **ours)
    extra = {"logits_processor": LogitsProcessorList([Cycle()])} if custom else {}
    assert found == reference(model, prompts(), max_new_tokens=16, **theirs, **extra)


def test_the_order_of_bias_and_repetition_penalty_shows(model: LlamaForCausalLM) -> None:
    """The control: with the bias as a custom processor, after the penalty, the answers are different."""

    def late_bias(output_ids: list[int], logits: Tensor) -> Tensor:
        for token, bias in BIAS.items():
            logits[token] += bias
        return logits

    late = generate(model, prompts(), [("bias", late_bias)], max_new_tokens=16, repetition_penalty=1.3)
    assert late != generate(model, prompts(), max_new_tokens=16, repetition_penalty=1.3, logit_bias=BIAS)


# -- the sampled distribution


class Caught(Exception):
    pass


def our_distribution(
    monkeypatch: pytest.MonkeyPatch, sampling: Sampling, history: list[list[int]], raw: Tensor
) -> Tensor:
    """The probabilities the draw is made from, by stopping just before it."""
    columns = torch.arange(VOCAB).expand(len(raw), -1)
    seen: list[Tensor] = []

    def watch(scores: Tensor, k: Tensor, width: int) -> stages.Candidates:
        nonlocal columns
        found = narrow(scores, k, width)
        columns = found.ids
        assert not found.incomplete.any()
        return found

    def stop(scores: Tensor, uniforms: Tensor) -> Tensor:
        seen.append(torch.zeros(raw.shape).scatter(1, columns, scores.softmax(-1)))
        raise Caught

    narrow = stages.candidates
    monkeypatch.setattr(stages, "candidates", watch)

    states = [SequenceSampler(sampling, row[:4], vocab_size=VOCAB) for row in history]
    for state, row in zip(states, history, strict=True):
        for token in row[4:]:
            state.observe(token)
    monkeypatch.setattr(stages, "draw", stop)
    with pytest.raises(Caught):
        Sampler(valid_rows=VOCAB).pick(raw, states)
    return seen[0]


def assert_same(found: Tensor, expected: Tensor) -> None:
    """The same tokens survive, with the same probabilities up to the rounding of sums of different length."""
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


def their_distribution(
    model: LlamaForCausalLM, options: dict[str, Any], history: list[list[int]], raw: Tensor
) -> Tensor:
    """What ``generate`` draws from: its own choice and order of processors, its own defaults."""
    config, _ = model._prepare_generation_config(GenerationConfig(eos_token_id=EOS, pad_token_id=0, **options))
    model._prepare_special_tokens(config, True, device="cpu")
    processors = model._get_logits_processor(generation_config=config, input_ids_seq_length=4, device="cpu")
    return processors(torch.tensor(history), raw.clone()).softmax(-1)


# Ours as asked of fastgen, theirs as asked of generate, ``{}`` and a file: the model's own defaults on both sides.
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 10},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 30},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.9, "min_new_tokens": 20, "repetition_penalty": 0.8},
    {"temperature": 1.0, "logit_bias": BIAS, "repetition_penalty": 1.3, "top_p": 0.7},
]


def history_and_logits() -> tuple[list[list[int]], Tensor]:
    generator = torch.Generator().manual_seed(8)
    history = torch.randint(0, VOCAB, (40, 9), generator=generator).tolist()
    return history, torch.randn(40, VOCAB, generator=generator) * 4


@pytest.mark.parametrize("fields", SAMPLED)
def test_sampled_distribution_equals_transformers(
    monkeypatch: pytest.MonkeyPatch, model: LlamaForCausalLM, fields: dict[str, Any]
) -> None:
    history, raw = history_and_logits()
    options = {"do_sample": True, "top_k": 0, **fields}  # transformers' top_k is 50 unless told otherwise
    if "logit_bias" in options:
        options["sequence_bias"] = {(token,): bias for token, bias in options.pop("logit_bias").items()}
    expected = their_distribution(model, options, history, raw)
    found = our_distribution(monkeypatch, ask(history[0][:4], **fields), history, raw)
    assert_same(found, expected)


@pytest.mark.parametrize(
    "file",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        {"do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.05},
        {"do_sample": True, "top_k": 0, "min_p": 0.2},
        {"do_sample": True, "min_length": 30},
    ],
)
def test_a19_a_models_own_defaults_give_transformers_distribution(
    monkeypatch: pytest.MonkeyPatch, model: LlamaForCausalLM, file: dict[str, Any]
) -> None:
    history, raw = history_and_logits()
    expected = their_distribution(model, file, history, raw)
    found = our_distribution(monkeypatch, ask(history[0][:4], file), history, raw)
    assert_same(found, expected)
    monkeypatch.undo()
    other = our_distribution(monkeypatch, ask(history[0][:4], {"do_sample": True, "top_k": 5}), history, raw)
    with pytest.raises(AssertionError):  # the control
        assert_same(other, expected)
