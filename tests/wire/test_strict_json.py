"""JSON from strangers: what Python's reader takes and the standard does not is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastgen.wire.strict_json import MOST_DEPTH, RefusedJsonError, read_json


@pytest.mark.parametrize("value", [None, 3, 1.5, "é", [], {}, {"a": [1, {"b": None}]}])
def test_what_the_standard_has_is_read(value: Any) -> None:
    assert read_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[NaN]", "NaN"),
        ("-Infinity", "-Infinity"),
        ("1e999", "too large"),
        ("9" * 5000, "too long"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' comes twice"),
        ('"\\ud800"', "surrogate"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested too deeply"),
    ],
)
def test_the_rest_is_refused(text: str, words: str) -> None:
    with pytest.raises(RefusedJsonError, match=words):
        read_json(text)


def test_as_deep_as_is_allowed() -> None:
    assert read_json("[" * MOST_DEPTH + "]" * MOST_DEPTH)


def test_what_is_no_json_says_where() -> None:
    with pytest.raises(json.JSONDecodeError, match="char 1"):
        read_json("{")
