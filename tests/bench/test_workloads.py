"""Workload files: the built-in ones are what they say, and a bad file is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastgen.bench import workloads
from fastgen.bench.drive import Request
from fastgen.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"), [("w1", 1, 128, 128), ("W2", 64, 19532, 3740), ("w3", 12, 8512, 1028)]
)
def test_built_in(name: str, requests: int, prompt: int, output: int) -> None:
    work = workloads.load(name)
    assert (len(work.requests), work.prompt_tokens, work.output_tokens) == (requests, prompt, output)
    assert work.name == name.lower()


def test_a_file_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "Mine", "requests": [{"prompt": [5, 6, 7], "out": 2}]}))
    work = workloads.load(str(file))
    assert (work.name, work.title) == ("mine", "Mine")
    assert work.requests == [Request([5, 6, 7], 2)]
    assert work.at_once


def test_arrivals_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    second = {"prompt": [1], "out": 1, "at": 2, "after": [[0, 3]], "group": "long"}
    file.write_text(json.dumps({"requests": [{"prompt": [5], "out": 3}, second]}))
    work = workloads.load(str(file))
    assert work.requests[1] == Request([1], 1, 2.0, ((0, 3),), "long")
    assert not work.at_once


def test_w3_is_eight_streams_and_four_long_prompts() -> None:
    work = workloads.load("w3")
    assert [(request.group, len(request.prompt), request.out) for request in work.requests] == [
        *[("streams", 64, 128)] * 8,
        *[("long", 2000, 1)] * 4,
    ]
    assert work.requests[8].after == tuple((row, 8) for row in range(8))
    assert [request.after for request in work.requests[9:]] == [((8, 1),), ((9, 1),), ((10, 1),)]


def test_what_as_json_writes_can_be_read(tmp_path: Path) -> None:
    work, file = workloads.load("w3"), tmp_path / "w3.json"
    file.write_text(json.dumps(work.as_json()))
    again = workloads.load(str(file))
    assert (again.title, again.requests) == (work.title, work.requests)


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
        ('{"requests": [[1]]}', "must be an object"),
        ('{"requests": [{"prompt": [1], "out": 1, "group": 1}]}', "'group' must be text"),
        ('{"requests": [{"prompt": [1], "out": 1, "at": -1}]}', "'at' must be seconds, at least 0, got -1"),
        ('{"requests": [{"prompt": [1], "out": 1, "at": NaN}]}', "'at' must be seconds"),
        ('{"requests": [{"prompt": [1], "out": 1, "afer": []}]}', "unknown field 'afer'. Did you mean 'after'"),
        ('{"requests": [{"prompt": [1], "out": 1, "after": [1]}]}', r"list of \[request, tokens\], got 1"),
        (
            '{"requests": [{"prompt": [1], "out": 1, "after": [[0, 1]]}]}',
            "names request 0, which is not an",
        ),
        (
            '{"requests": [{"prompt": [1], "out": 2}, {"prompt": [1], "out": 1, "after": [[0, 3]]}]}',
            "request 1 .* waits for 3 tokens of request 0, which gives 2",
        ),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        workloads.load(str(file))


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match="no workload 'w9': give w1, w2, w3, fastgen-1200-60, or a JSON file"):
        workloads.load("w9")


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the workload no/such.json: No such file"):
        workloads.load("no/such.json")
