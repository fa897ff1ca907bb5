"""Workload files: the built-in ones are what they say, and a bad file is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastgen.bench import workloads
from fastgen.errors import ConfigError


@pytest.mark.parametrize(("name", "requests", "prompt", "output"), [("w1", 1, 128, 128), ("W2", 64, 19532, 3740)])
def test_built_in(name: str, requests: int, prompt: int, output: int) -> None:
    work = workloads.load(name)
    assert (len(work.requests), work.prompt_tokens, work.output_tokens) == (requests, prompt, output)
    assert work.name == name.lower()


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "Mine", "requests": [{"prompt": [5, 6, 7], "out": 2}]}))
    work = workloads.load(str(file))
    assert (work.name, work.title) == ("mine", "Mine")
    assert work.requests == [workloads.Request([5, 6, 7], 2)]


def test_short_is_a_warm_up() -> None:
    short = workloads.load("w2").short()
    assert len(short.requests) == 2
    assert short.output_tokens == 8
    assert all(len(request.prompt) <= 64 for request in short.requests)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is not JSON"),
        ("[]", "has no list 'requests'"),
        ('{"requests": []}', "has no list 'requests'"),
        ('{"streams": [], "long": []}', "has no list 'requests'"),
        ('{"requests": [{"prompt": [], "out": 1}]}', "request 0 .* 'prompt' must be a list of token ids"),
        ('{"requests": [{"prompt": [1], "out": 1}, {"prompt": [-1], "out": 1}]}', "request 1 .* token ids"),
        ('{"requests": [{"prompt": [true], "out": 1}]}', "token ids"),
        ('{"requests": [{"prompt": [1], "out": 0}]}', "'out' must be a positive number, got 0"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        workloads.load(str(file))


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match="no workload 'w9': give w1 or w2, or a JSON file"):
        workloads.load("w9")


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the workload no/such.json: No such file"):
        workloads.load("no/such.json")
