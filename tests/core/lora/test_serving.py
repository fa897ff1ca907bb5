"""A20: adapters side by side in one engine, compared with transformers on merged weights."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path

import pytest
import torch

from fastgen.core.engine import Engine
from fastgen.core.lora.linear import LoraLinear
from fastgen.errors import InvalidRequestError
from fastgen.testing.adapters import lora_factors, random_lora
from fastgen.types import SamplingParams, StepOutput

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


def some(sizes: dict, *ends: str) -> dict:
    return {name: size for name, size in sizes.items() if name.endswith(ends)}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, sizes) -> dict[str, Path]:
    """A plain one of rank 2, an rsLoRA one of rank 8, one with patterns, and one for a single slot and the head."""
    top = tmp_path_factory.mktemp("adapters")
    first, second = (f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1))
    return {
        "two": random_lora(top / "two", some(sizes, *ATTENTION), rank=2, alpha=4, seed=1),
        "eight": random_lora(top / "eight", some(sizes, *ATTENTION, *MLP), rank=8, alpha=4, use_rslora=True, seed=2),
        "patterns": random_lora(
            top / "patterns",
            some(sizes, "q_proj", "v_proj", "down_proj"),
            rank=4,
            alpha=8,
            ranks={first: 6, second: 3},
            rank_pattern={"0.self_attn.q_proj": 6, r"layers\.\d+\.self_attn\.q_proj": 3},
            alpha_pattern={"v_proj": 2, "q": 100, "layers.1.mlp.down_proj": 1.5},
            seed=3,
        ),
        "head": random_lora(top / "head", some(sizes, "v_proj", "lm_head"), rank=3, alpha=3, seed=4),
    }


def scale(name: str, module: str) -> float:
    """What the settings above come to, by hand."""
    if name == "two":
        return 4 / 2
    if name == "eight":
        return 4 / math.sqrt(8)
    if name == "head":
        return 1.0
    if module.endswith("q_proj"):
        return 8 / 6 if "layers.0" in module else 8 / 3
    if module.endswith("v_proj"):
        return 2 / 4
    return 1.5 / 4 if "layers.1" in module else 8 / 4


@pytest.fixture(scope="module")
def merged(reference, adapters) -> dict[str | None, torch.nn.Module]:
    """A whole model for each adapter."""
    models = {None: reference}
    for name, directory in adapters.items():
        models[name] = copy.deepcopy(reference)
        modules = dict(models[name].named_modules())
        for module, (a, b) in lora_factors(directory).items():
            modules[module].weight.data += scale(name, module) * (b @ a)
    return models


def load(model: Path, adapters: dict[str, Path], **options) -> Engine:
    return Engine.load(model, lora=adapters, **{"device": "cpu", "block_size": 4, "num_blocks": 256, **options})


def drain(engine: Engine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(2000):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine does not come to an end")


def ids(outputs: list[StepOutput], index: int = 0) -> list[int]:
    assert all(o.error is None for o in outputs)
    return [o.token_id for o in outputs if o.index == index and o.token_id is not None]


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(length)]


@torch.inference_mode()
def logprobs(reference, tokens: list[int]) -> list[float]:
    """Of each token but the first, under transformers."""
    rows = reference(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(tokens[1:])]


@torch.inference_mode()
def generate(reference, tokens: list[int], count: int) -> list[int]:
    out = reference.generate(
        torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(tokens) :].tolist()


NAMES = [None, "two", "eight", "patterns", "head"]


def test_a20_one_batch_equals_transformers_on_merged_weights(model, adapters, merged):
    """Every token of a prompt and of an answer, for the base and four adapters of other ranks in the same passes."""
    engine = load(model, adapters)
    prompts = {name: prompt(9 + 4 * i, i) for i, name in enumerate(NAMES)}
    for name in NAMES:
        params = SamplingParams(max_new_tokens=10, lora=name, logprobs=0, prompt_logprobs=0, **GREEDY)
        engine.add(prompts[name], params, request_id=str(name))
    outputs = drain(engine)
    assert engine.stats().passes == 10  # all of them together
    for name in NAMES:
        answer = ids(outputs[str(name)])
        assert answer == generate(merged[name], prompts[name], 10)
        scores = [one.logprob for one in outputs[str(name)][0].prompt_logprobs[1:]]
        scores += [o.logprob.logprob for o in outputs[str(name)]]
        torch.testing.assert_close(scores, logprobs(merged[name], prompts[name] + answer), atol=2e-4, rtol=1e-4)


def test_adapters_say_different_things(merged):
    """The control of the test above: no adapter is so weak that another model would pass for it."""
    scores = {name: torch.tensor(logprobs(merged[name], prompt(20, 1))) for name in NAMES}
    for one in NAMES:
        for other in NAMES:
            assert one == other or (scores[one] - scores[other]).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 3},
        {"max_batch_tokens": 7, "max_sequences": 3},
        {"num_blocks": 24},  # preempts
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_a20_alone_batched_chunked_preempted(model, adapters, merged, options):
    engine = load(model, adapters, **options)
    wanted = {}
    for i in range(10):
        name, tokens = NAMES[i % 5], prompt(3 + 2 * i, i)
        engine.add(tokens, SamplingParams(max_new_tokens=20, lora=name, **GREEDY), request_id=str(i))
        wanted[str(i)] = generate(merged[name], tokens, 20)
    outputs = drain(engine)
    assert {request: ids(outputs[request]) for request in outputs} == wanted
    assert (engine.stats().preemptions > 0) == (options.get("num_blocks") == 24)


def test_a20_prefix_cache_keeps_adapters_apart(model, adapters, merged):
    """The same prompt under each: nothing of another's keys is found, one's own are, and answers stay the same."""
    engine = load(model, adapters)
    for again in (False, True):
        for name in NAMES:
            engine.add(PROMPT, SamplingParams(max_new_tokens=6, lora=name, **GREEDY), request_id="x")
            outputs = drain(engine)["x"]
            assert outputs[0].cached_tokens == (8 if again else 0)
            assert ids(outputs) == generate(merged[name], PROMPT, 6)


def test_choices_of_one_request(model, adapters, merged):
    engine = load(model, adapters)
    for name in ("two", None, "eight"):
        engine.add(PROMPT, SamplingParams(n=3, max_new_tokens=5, lora=name, **GREEDY), request_id=str(name))
    outputs = drain(engine)
    for name in ("two", None, "eight"):
        assert [ids(outputs[str(name)], index) for index in range(3)] == [generate(merged[name], PROMPT, 5)] * 3


def test_bfloat16(model, adapters, merged):
    """Its numbers are coarse: near the merged weights' log-probabilities, and far from the base's."""
    engine = load(model, adapters, dtype="bfloat16")
    engine.add(PROMPT, SamplingParams(max_new_tokens=1, lora="eight", prompt_logprobs=0, **GREEDY))
    scores = torch.tensor([one.logprob for one in drain(engine)["r0"][0].prompt_logprobs[1:]])
    right, wrong = (torch.tensor(logprobs(merged[name], PROMPT)) for name in ("eight", None))
    assert (scores - right).abs().mean() < 0.3 < (right - wrong).abs().mean()


@pytest.mark.parametrize(
    ("loaded", "asked", "message"),
    [
        (["two", "eight"], "tow", "loaded are 'two', 'eight'. Did you mean 'two'?"),
        (["two"], "", "lora names the adapter ''; loaded are 'two'."),
        ([], "two", "the model was loaded without adapters; load it with lora={'two': directory}"),
    ],
)
def test_an_unknown_adapter_is_refused_at_the_front(model, adapters, loaded, asked, message):
    engine = load(model, {name: adapters[name] for name in loaded})
    with pytest.raises(InvalidRequestError, match="lora") as caught:
        engine.add(PROMPT, SamplingParams(lora=asked))
    assert message in str(caught.value)
    assert (caught.value.field, engine.has_work) == ("lora", False)


def test_who_loads_no_adapter_pays_nothing(model, adapters):
    def wrapped(engine: Engine) -> int:
        return sum(isinstance(module, LoraLinear) for module in engine._model.modules())

    assert wrapped(load(model, {})) == 0
    assert wrapped(load(model, {"head": adapters["head"]})) == 3  # two of qkv, and the head
    assert wrapped(load(model, adapters)) == 9


def test_memory_counts_the_adapters(model, adapters):
    plain, loaded = load(model, {}).blueprint, load(model, {"two": adapters["two"]}).blueprint
    numbers = sum(a.numel() + b.numel() for a, b in lora_factors(adapters["two"]).values())
    assert loaded.weight_bytes == plain.weight_bytes + 4 * numbers


def test_a_model_called_outside_a_pass_is_the_base(model, adapters):
    """What is left of a pass must not act on the next caller."""
    engine = load(model, adapters)
    engine.add(PROMPT, SamplingParams(max_new_tokens=1, lora="two", **GREEDY))
    drain(engine)
    linear = engine.runner.model.blocks[0].attn.qkv
    assert isinstance(linear, LoraLinear)
    x = torch.randn(5, 32)
    with torch.inference_mode():
        assert torch.equal(linear(x), linear.base(x))
