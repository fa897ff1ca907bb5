"""The engine, driven by hand, against transformers' generate and against itself under other circumstances."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastgen import api as fg
from fastgen.core.engine import Engine
from fastgen.errors import EngineClosedError, InvalidRequestError, PluginError
from fastgen.testing.checkpoints import tiny_llama
from fastgen.types import SamplingParams, StepOutput


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture(scope="module")
def reference(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def load(directory, **options) -> Engine:
    return Engine.load(directory, **{"device": "cpu", "block_size": 4, "num_blocks": 256, **options})


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(length)]


def drain(engine: Engine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(10_000):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(f"{output.request_id}", []).append(output)
    raise AssertionError("the engine does not come to an end")


def token_ids(outputs: list[StepOutput], index: int = 0) -> list[int]:
    return [o.token_id for o in outputs if o.token_id is not None and o.index == index]


GREEDY = {"temperature": 0.0, "ignore_eos": True}
LENGTHS = (1, 3, 4, 5, 17, 40, 63)


@torch.inference_mode()
def generate(reference, ids: list[int], count: int, **options) -> list[int]:
    out = reference.generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 7},
        {"max_batch_tokens": 64, "max_sequences": 3},
        {"num_blocks": 24},  # preempts: 7 prompts of up to 63 tokens want 60 blocks
        {"num_blocks": 24, "prefix_caching": False},
        {"prefix_caching": False},
        {"block_size": 1, "num_blocks": 512},
        {"block_size": 16, "num_blocks": 64},
        {"queue_order": "lpm"},
        {"queue_order": "random"},
        {"queue_order": "priority"},
        {"policy": "prefill-first"},
        {"policy": "prefill-first", "num_blocks": 24},
        {"policy": "whole-prompt", "max_batch_tokens": 7},
        {"policy": "whole-prompt", "num_blocks": 24},
    ],
    ids=str,
)
def test_greedy_equals_transformers(directory, reference, options):
    engine = load(directory, **options)
    for length in LENGTHS:
        engine.add(prompt(length, length), SamplingParams(max_new_tokens=20, **GREEDY), request_id=str(length))
    outputs = drain(engine)
    for length in LENGTHS:
        assert token_ids(outputs[str(length)]) == generate(reference, prompt(length, length), 20)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    assert (stats.preemptions > 0) == (options.get("num_blocks") == 24)


def test_repetition_penalty_equals_transformers(directory, reference):
    engine = load(directory)
    engine.add(prompt(9), SamplingParams(max_new_tokens=24, repetition_penalty=1.7, **GREEDY))
    assert token_ids(drain(engine)["r0"]) == generate(reference, prompt(9), 24, repetition_penalty=1.7)


def test_prefix_hits_are_reported_and_change_nothing(directory, reference):
    """D4: prompts around a block's edge, twice each; at least one token runs."""
    engine = load(directory, max_batch_tokens=3)
    for length in (4, 5, 7, 8, 9):
        for again in (False, True):
            engine.add(prompt(length, 7), SamplingParams(max_new_tokens=5, **GREEDY), request_id="x")
            outputs = drain(engine)["x"]
            assert token_ids(outputs) == generate(reference, prompt(length, 7), 5)
            if again:
                assert outputs[0].cached_tokens == (length - 1) // 4 * 4


def test_d1_what_can_never_fit_is_refused(directory):
    engine = load(directory, num_blocks=4, max_model_len=64)
    with pytest.raises(InvalidRequestError, match="20"):
        engine.add(prompt(20), SamplingParams(max_new_tokens=1))
    with pytest.raises(InvalidRequestError, match="num_blocks"):
        engine.add(prompt(8), SamplingParams(max_new_tokens=20))
    assert not engine.has_work
    engine.add(prompt(8), SamplingParams(temperature=0.0, ignore_eos=True))  # open: takes what there is
    outputs = drain(engine)["r0"]
    assert (len(outputs), outputs[-1].finish_reason) == (9, "length")


def test_d1_three_that_fit_only_one_by_one(directory):
    def run(*seeds: int) -> list[list[int]]:
        engine = load(directory, num_blocks=4)
        for seed in seeds:
            engine.add(prompt(6, seed), SamplingParams(max_new_tokens=10, **GREEDY), request_id=str(seed))
        outputs = drain(engine)
        return [token_ids(outputs[str(seed)]) for seed in seeds]

    assert run(1, 2, 3) == [*run(1), *run(2), *run(3)]


@pytest.mark.slow
def test_d2_random_arrivals_in_a_tight_pool(directory):
    alone = {}
    for seed in range(6):
        engine = load(directory, num_blocks=8)
        engine.add(prompt(14, seed), SamplingParams(max_new_tokens=12, **GREEDY))
        alone[seed] = token_ids(drain(engine)["r0"])
    for arrival in range(10):
        rng, engine = random.Random(arrival), load(directory, num_blocks=8, max_batch_tokens=4)
        outputs: list[StepOutput] = []
        waiting = rng.sample(range(6), 6)
        while waiting or engine.has_work:
            if waiting and rng.random() < 0.3:
                seed = waiting.pop()
                engine.add(prompt(14, seed), SamplingParams(max_new_tokens=12, **GREEDY), request_id=str(seed))
            outputs += engine.step()
        assert engine.stats().preemptions <= 12
        for seed in range(6):
            assert token_ids([o for o in outputs if o.request_id == str(seed)]) == alone[seed]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 10, 13])
def test_d8_abort_at_any_point(directory, steps):
    """Queued, between chunks, decoding, preempted, finished: one last event, every block back, nobody else harmed."""
    engine = load(directory, num_blocks=16, max_batch_tokens=8)
    params = SamplingParams(max_new_tokens=10, **GREEDY)
    engine.add(prompt(20, 1), params, request_id="kept")
    engine.add(prompt(30, 2), params, request_id="gone")
    outputs: list[StepOutput] = []
    for _ in range(steps):
        outputs += engine.step()
    engine.abort("gone")
    engine.abort("gone")
    engine.abort("never there")
    while engine.has_work:
        outputs += engine.step()
    ends = [(o.request_id, o.finish_reason) for o in outputs if o.finish_reason]
    assert sorted(ends)[0][0] == "gone"
    assert len(ends) == 2
    stats = engine.stats()
    assert stats.used_blocks == 0
    alone = load(directory)
    alone.add(prompt(20, 1), params)
    assert token_ids([o for o in outputs if o.request_id == "kept"]) == token_ids(drain(alone)["r0"])
    engine.add(prompt(30, 2), params, request_id="gone")
    alone.add(prompt(30, 2), params)
    assert token_ids(drain(engine)["gone"]) == token_ids(drain(alone)["r1"])


def test_n_choices_are_independent_streams(directory):
    engine = load(directory)
    engine.add(prompt(9), SamplingParams(n=3, temperature=1.0, seed=5, max_new_tokens=12, ignore_eos=True))
    three = drain(engine)["r0"]
    answers = [token_ids(three, index) for index in range(3)]
    assert len({tuple(a) for a in answers}) == 3
    engine.add(prompt(9), SamplingParams(temperature=1.0, seed=5, max_new_tokens=12, ignore_eos=True))
    assert token_ids(drain(engine)["r1"]) == answers[0]


def test_seed_is_independent_of_batch_mates(directory):
    def sample(others: int) -> list[int]:
        engine = load(directory, seed=others)
        params = SamplingParams(temperature=1.3, top_p=0.9, seed=11, max_new_tokens=16, ignore_eos=True)
        for i in range(others):
            engine.add(prompt(5 + i, i), SamplingParams(temperature=1.0, max_new_tokens=9), request_id=f"o{i}")
        engine.add(prompt(9), params, request_id="x")
        return token_ids(drain(engine)["x"])

    assert sample(0) == sample(1) == sample(6)


def test_engine_seed_repeats_unseeded_requests(directory):
    def sample(seed: int) -> list[int]:
        engine = load(directory, seed=seed)
        engine.add(prompt(9), SamplingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True))
        return token_ids(drain(engine)["r0"])

    assert sample(3) == sample(3) != sample(4)


@pytest.mark.parametrize("chunk", [512, 4, 3])
def test_d9_prompt_logprobs(directory, reference, chunk):
    """Equal one full forward pass, across chunk borders, with a cached prefix there to be (wrongly) used."""
    engine, ids = load(directory, max_batch_tokens=chunk), prompt(9)
    engine.add(ids, SamplingParams(max_new_tokens=1, **GREEDY))
    drain(engine)
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    for name in ("a", "b"):
        engine.add(ids, SamplingParams(max_new_tokens=3, prompt_logprobs=2, n=2, **GREEDY), request_id=name)
        outputs = drain(engine)[name]
        scores = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert len(scores) == 1
        assert scores[0][0] is None
        assert len(scores[0]) == len(ids)
        for position, score in enumerate(scores[0][1:], 1):
            assert score.token_id == ids[position]
            assert score.logprob == pytest.approx(float(want[position - 1, ids[position]]), abs=1e-4)
            assert [t.token_id for t in score.top] == want[position - 1].topk(2).indices.tolist()


def test_c8_logprobs_are_the_models_own(directory, reference):
    engine, ids = load(directory), prompt(9)
    params = SamplingParams(
        max_new_tokens=4, temperature=0.5, top_p=0.1, seed=0, logit_bias={7: 50.0}, logprobs=3, ignore_eos=True
    )
    engine.add(ids, params)
    for output in drain(engine)["r0"]:
        with torch.inference_mode():
            want = reference(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert output.token_id == 7
        assert output.logprob.logprob == pytest.approx(float(want[7]), abs=1e-4)
        assert output.logprob.rank == 1 + int((want > want[7]).sum())
        ids = [*ids, output.token_id]


class RaisingPlugin:
    @fg.hookimpl
    def fastgen_logits_processors(self):
        return [fg.LogitsProcessorSpec("raises", raising), fg.LogitsProcessorSpec("nan", making_nan)]


def raising(options, *, vocab_size, prompt_token_ids):
    def process(output_ids, logits):
        if len(output_ids) == options["at"]:
            raise RuntimeError("on purpose")
        return logits

    return process


def making_nan(options, *, vocab_size, prompt_token_ids):
    return lambda output_ids, logits: logits * float("nan") if len(output_ids) == options["at"] else logits


@pytest.mark.parametrize("name", ["raises", "nan"])
def test_e8_one_bad_request_ends_alone(directory, reference, name):
    with fg.registered(RaisingPlugin(), name="raising"):
        engine = load(directory)
        engine.add(prompt(9), SamplingParams(max_new_tokens=12, **GREEDY), request_id="well")
        bad = SamplingParams(max_new_tokens=12, logits_processors={name: {"at": 2}}, **GREEDY)
        engine.add(prompt(9, 1), bad, request_id="bad")
        outputs = drain(engine)
    assert token_ids(outputs["well"]) == generate(reference, prompt(9), 12)
    last = outputs["bad"][-1]
    assert (len(outputs["bad"]), last.finish_reason, last.token_id) == (3, "error", None)
    assert ("on purpose" if name == "raises" else "NaN").lower() in last.error.lower()
    assert engine.stats().used_blocks == 0


def test_a_failing_pass_ends_its_sequences_and_not_the_engine(directory, reference, monkeypatch):
    engine = load(directory)
    engine.add(prompt(9), SamplingParams(max_new_tokens=12, **GREEDY), request_id="first")
    engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "run", lambda plan: 1 / 0)
        last = engine.step()[-1]
    assert (last.finish_reason, "ZeroDivisionError" in last.error) == ("error", True)
    engine.add(prompt(9), SamplingParams(max_new_tokens=12, **GREEDY), request_id="second")
    assert token_ids(drain(engine)["second"]) == generate(reference, prompt(9), 12)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "empty"),
        (None, {}, "list of token ids"),
        ("abc", {}, "list of token ids"),
        ([1] * 600, {}, "512"),
        ([1, -1], {}, "-1"),
        ([1, 64], {}, "64"),
        ([1, 10**12], {}, str(10**12)),
        ([1], {"stop_token_ids": [64]}, "stop_token_ids"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([1], {"max_new_tokens": 512}, "512"),
        ([1], {"logits_processors": {"nobody": {}}}, "nobody"),
    ],
    ids=str,
)
def test_c5_bad_requests_are_refused_at_the_front(directory, ids, options, message):
    engine = load(directory)
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(ids, SamplingParams(**options))
    assert not engine.has_work


def test_a_request_id_is_used_once_at_a_time(directory):
    engine = load(directory)
    engine.add([5], SamplingParams(max_new_tokens=1), request_id="x")
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add([5], SamplingParams(max_new_tokens=1), request_id="x")
    drain(engine)
    engine.add([5], SamplingParams(max_new_tokens=1), request_id="x")


def test_closed(directory):
    engine = load(directory)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.add([5])
    with pytest.raises(EngineClosedError):
        engine.step()
    with pytest.raises(EngineClosedError):
        engine.stats()
    engine.abort("r0")
    assert not engine.has_work


class RivalProcessors:
    """Forces one token id."""

    def __init__(self, token: int, **spec) -> None:
        self.token, self.spec = token, spec

    @fg.hookimpl
    def fastgen_logits_processors(self):
        return [fg.LogitsProcessorSpec("force", self.factory, **self.spec)]

    def factory(self, options, *, vocab_size, prompt_token_ids):
        def process(output_ids, logits):
            logits[self.token] = 1e4
            return logits

        return process


def forced(directory) -> list[int]:
    engine = load(directory)
    engine.add(prompt(5), SamplingParams(max_new_tokens=2, logits_processors={"force": {}}, **GREEDY))
    return token_ids(drain(engine)["r0"])


def test_f1_two_plugins_with_one_processor(directory):
    with fg.registered(RivalProcessors(5), name="aaa"):
        assert forced(directory) == [5, 5]
        with fg.registered(RivalProcessors(6), name="bbb"), pytest.raises(PluginError, match=r"(?s)aaa.*bbb"):
            forced(directory)
    with (
        fg.registered(RivalProcessors(5, overrides=("bbb",)), name="aaa"),
        fg.registered(RivalProcessors(6), name="bbb"),
    ):
        assert forced(directory) == [5, 5]


def test_an_unknown_processor_is_told_from_those_installed(directory):
    with (
        fg.registered(RivalProcessors(5), name="aaa"),
        pytest.raises(InvalidRequestError, match="Did you mean 'force'"),
    ):
        load(directory).add([5], SamplingParams(logits_processors={"forse": {}}))


def test_refused_requests_do_not_move_the_seeds_of_others(directory):
    def sample(refused: int) -> list[int]:
        engine = load(directory, seed=3)
        for _ in range(refused):
            with pytest.raises(InvalidRequestError):
                engine.add([5], SamplingParams(temperature=1.0, logits_processors={"nobody": {}}))
        engine.add(prompt(9), SamplingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True))
        return token_ids(drain(engine)["r0"])

    assert sample(0) == sample(2)


def test_stop_strings_are_not_ignored_silently(directory):
    engine = load(directory)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        engine.add([5], SamplingParams(stop=["x"]))
    engine.add([5], SamplingParams(stop=["x"], max_new_tokens=1), text=True)


class BrokenKernels:
    @fg.hookimpl
    def fastgen_kernels(self):
        def supports(need):
            raise KeyError("sizes")

        picky = fg.Implementation("linear", "picky", print, supports)
        return [fg.KernelSpec("linear", "gone", "no_such_triton_module:impl"), fg.KernelSpec("linear", "picky", picky)]


def test_broken_kernel_plugins_cost_nobody_a_model(directory, caplog):
    with fg.registered(BrokenKernels(), name="broken"):
        engine = load(directory)
        engine.add([5], SamplingParams(max_new_tokens=1, **GREEDY))
        assert len(token_ids(drain(engine)["r0"])) == 1
    rejected = dict(next(c for c in engine.blueprint.kernels.choices if c.need.operation == "linear").rejected)
    assert "no_such_triton_module" in rejected["gone"]
    assert "KeyError" in rejected["picky"]
    assert "kernel gone for linear is left out" in caplog.text


def test_the_sampler_runs_the_kernel_that_was_chosen(directory):
    engine = load(directory)
    kernels = engine.blueprint.kernels
    operations = [choice.need.operation for choice in kernels.choices]
    assert operations.count("argmax") == 1
    assert engine.runner.sampler._argmax is kernels.choose("argmax", size=engine.limits.valid_ids)
