"""The model's own defaults, against transformers' reading of the same file."""

from __future__ import annotations

import pytest

from fastgen.core.generation_config import (
    TRANSFORMERS_TOP_K,
    ModelDefaults,
    check_generation_config,
    end_token_ids,
)
from fastgen.errors import ConfigError


def test_top_k_default_is_that_of_the_installed_transformers() -> None:
    from transformers import GenerationConfig

    assert GenerationConfig._get_default_generation_params()["top_k"] == TRANSFORMERS_TOP_K


def test_a_plain_generation_config_causes_no_warning() -> None:
    from transformers import GenerationConfig

    everything = GenerationConfig(**GenerationConfig._get_default_generation_params(), eos_token_id=[1, 2]).to_dict()
    assert check_generation_config(everything) == []


@pytest.mark.parametrize(("key", "value"), [("no_repeat_ngram_size", 3), ("suppress_tokens", [5]), ("num_beams", 4)])
def test_keys_that_would_change_the_answer_are_reported(key: str, value: object) -> None:
    (warning,) = check_generation_config({key: value, "do_sample": True})
    assert key in warning
    assert repr(value) in warning


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.5),
        ("temperature", "warm"),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_k", 10**400),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_k", -2),
        ("top_p", 1.5),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_unusable_values_are_refused_at_load(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json has {key} = "):
        check_generation_config({key: value})


@pytest.mark.parametrize("value", [None, 0, -1, 7, 7.0])
def test_usable_top_k(value: object) -> None:
    assert check_generation_config({"top_k": value}) == []
    assert ModelDefaults({"top_k": value}).peek("top_k") == value


def test_a19_end_ids_of_every_shape() -> None:
    assert end_token_ids(None, 5, [6, 7], frozenset({8}), (9,), [], -1, True, "10", [None]) == {5, 6, 7, 8, 9}
