"""Sampling parameters and engine options: checked wherever they are made, in words for people."""

from __future__ import annotations

import pickle

import pytest

import fastgen
from fastgen.errors import FastgenError

REFUSED = [
    ({"temprature": 1}, r"unknown option 'temprature'\. Did you mean 'temperature'"),
    ({"temperature": float("nan")}, "temperature: .*nan"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": True}, "max_new_tokens"),
    ({"max_new_tokens": "5"}, "max_new_tokens"),
    ({"max_new_tokens": 1, "max_length": 5}, "not both"),
    ({"max_new_tokens": 1, "min_new_tokens": 2}, "min_new_tokens 2 is above"),
    ({"stop": ""}, "empty stop string"),
    ({"stop": [""]}, "empty stop string"),
    ({"stop": ["x"] * 1000}, "1000 stop strings"),
    ({"stop": 5}, "stop"),
    ({"n": 0}, "n: "),
    ({"n": 10**9}, "n: "),
    ({"top_p": 1.1}, "top_p"),
    ({"logit_bias": {"abc": 1.0}}, "logit_bias"),
    ({"logit_bias": {"1.5": 1.0}}, "logit_bias"),
    ({"logit_bias": {5: 101.0}}, "token 5 is 101"),
    ({"logit_bias": {5: float("nan")}}, "token 5 is nan"),
    ({"logprobs": -1}, "logprobs"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"seed": -1}, "seed"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
def test_refused_sampling(fields, message):
    for make in (fastgen.SamplingParams, lambda **f: fastgen.SamplingParams.of(None, **f)):
        with pytest.raises(fastgen.InvalidRequestError, match=message):
            make(**fields)


def test_b4_stop_takes_a_string_a_list_or_nothing():
    made = fastgen.SamplingParams
    assert made(stop="a").stop == made(stop=["a"]).stop == ("a",)
    assert made(stop=[]).stop == made(stop=None).stop == made().stop == ()


def test_keys_of_logit_bias_may_be_text_as_in_json():
    assert fastgen.SamplingParams(logit_bias={"50256": -100, 5: 1.0}).logit_bias == {50256: -100.0, 5: 1.0}


def test_fields_are_laid_over_params():
    params = fastgen.SamplingParams.of(fastgen.SamplingParams(temperature=0.5, top_k=3), top_k=4)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 4, None)
    with pytest.raises(fastgen.InvalidRequestError) as refused:
        fastgen.SamplingParams.of(params, top_p=2.0)
    assert refused.value.field == "top_p"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 4}, r"unknown engine option 'block_sise'\. Did you mean 'block_size'"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"max_batch_tokens": True}, "max_batch_tokens"),
        ({"max_batch_tokens": "8"}, "max_batch_tokens"),
        ({"max_batch_tokens": 10**9}, "max_batch_tokens"),
        ({"max_batch_tokens": "auto"}, "max_batch_tokens"),
        ({"target_latency": 0}, "target_latency"),
        ({"target_latency": -1.5}, "target_latency"),
        ({"target_latency": float("nan")}, "target_latency"),
        ({"target_latency": float("inf")}, "target_latency"),
        ({"target_latency": "50"}, "target_latency"),
        ({"target_latency": True}, "target_latency"),
        ({"max_sequences": 10**9}, "max_sequences"),
        ({"dtype": "int3"}, "dtype"),
        ({"policy": "lifo"}, "policy"),
        ({"cache_memory": 0}, "fraction above 0"),
        ({"cache_memory": 1.5}, "fraction above 0"),
        ({"cache_memory": "much"}, "'much' is not a size"),
        ({"cache_memory": "1B"}, "'1B' is no room"),
        ({"num_blocks": 1, "cache_memory": 0.5}, "not both"),
    ],
    ids=str,
)
def test_refused_engine_options(options, message):
    with pytest.raises(fastgen.ConfigError, match=message):
        fastgen.EngineConfig(**options)


@pytest.mark.parametrize(
    ("given", "kept"), [(0.5, 0.5), ("0.5", 0.5), (1, 1.0), ("2GiB", "2GiB"), (2**31, str(2**31)), ("500 MB", "500 MB")]
)
def test_cache_memory_is_a_fraction_or_a_size(given, kept):
    assert fastgen.EngineConfig(cache_memory=given).cache_memory == kept


def test_a_token_is_never_repeated():
    secret = "hf_SECRET"
    assert secret not in repr(fastgen.EngineConfig(token=secret))
    for options in ({"num_blocks": 1, "cache_memory": 0.5}, {"block_size": 0}, {"blok": 1}):
        with pytest.raises(fastgen.ConfigError) as refused:
            fastgen.EngineConfig(token=secret, **options)
        assert secret not in str(refused.value)
    with pytest.raises(fastgen.ConfigError) as refused:
        fastgen.EngineConfig(token=[secret])
    assert secret not in str(refused.value)


def test_the_errors_are_public():
    for name in ("CheckpointError", "ConfigError", "InvalidRequestError", "ModelNotFoundError", "PluginError"):
        assert issubclass(getattr(fastgen, name), FastgenError)


@pytest.mark.parametrize(
    "one",
    [
        fastgen.Chunk("r", 0, "text", [1, 2], finish_reason="stop", usage=fastgen.Usage(3, 2)),
        fastgen.StepOutput("r", 1, 5, fastgen.TokenLogprob(5, -0.5, 1), "length", cached_tokens=4),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_comes_by_token_compares_prints_and_travels(one):
    again = pickle.loads(pickle.dumps(one))
    assert again == one == eval(repr(one), vars(fastgen))
    assert again is not one
    again.index += 1
    assert again != one
    with pytest.raises(AttributeError):
        one.txet = "no other fields"
