"""Where prompts come from, and how a bad line is named."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from fastgen.cli.prompts import from_arguments, from_file, from_stdin
from fastgen.errors import InvalidRequestError
from fastgen.types import SamplingParams

PARAMS = SamplingParams(max_new_tokens=7, temperature=0.5)


def lines(path: Path, *rows: object, name: str = "prompts.jsonl") -> Path:
    file = path / name
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return file


class Stdin:
    def __init__(self, data: bytes, terminal: bool = False) -> None:
        self.buffer = io.BytesIO(data)
        self.isatty = lambda: terminal


def test_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = lines(tmp_path, "one", "", "  two ", '{"prompt": 3}', "a\x85b\u2028c", name="p.txt")
    jobs = from_file(file, PARAMS, chat=False)
    assert [job.prompt for job in jobs] == ["one", "  two ", '{"prompt": 3}', "a\x85b\u2028c"]
    assert [job.where for job in jobs][-1] == "p.txt, line 5"
    assert all(job.params is PARAMS for job in jobs)


def test_windows_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert [job.prompt for job in from_file(file, PARAMS, chat=False)] == ["one", "two"]


def test_json_lines_take_three_forms_and_sampling_fields(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    file = lines(
        tmp_path,
        {"prompt": "one", "temperature": 0.0, "stop": ["x"]},
        {"prompt_token_ids": [1, 2]},
        {"messages": messages, "max_new_tokens": 3, "seed": 5},
    )
    one, two, three = from_file(file, PARAMS, chat=False)
    assert [one.given, two.given, three.given] == [
        {"prompt": "one"},
        {"prompt_token_ids": [1, 2]},
        {"messages": messages},
    ]
    assert (one.params.temperature, one.params.max_new_tokens, one.params.stop) == (0.0, 7, ("x",))
    assert two.params == PARAMS
    assert (three.params.max_new_tokens, three.params.seed) == (3, 5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a line must be an object"),
        ("3", "a line must be an object"),
        ("[" * 100_000, "nested too deeply"),
        ({}, "give one of prompt, prompt_token_ids and messages; found none"),
        ({"prompt": "a", "messages": []}, "found prompt and messages"),
        ({"prompt": 3}, "prompt must be a string, got 3"),
        ({"prompt_token_ids": [1, "a"]}, "must be a list of integers"),
        ({"prompt_token_ids": [True]}, "must be a list of integers"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": ["hi"]}, "messages must be a list"),
        ({"prompt": "a", "temprature": 1}, "unknown option 'temprature'. Did you mean 'temperature'"),
        ({"prompt": "a", "temperature": -1}, "temperature: "),
        ('{"prompt": "a", "temperature": NaN}', "temperature: "),
    ],
)
def test_bad_line_is_named_by_number(tmp_path: Path, row: Any, message: str) -> None:
    file = lines(tmp_path, {"prompt": "fine"}, "", row)
    with pytest.raises(InvalidRequestError) as caught:
        from_file(file, PARAMS, chat=False)
    assert "cannot be used: line 3: " in str(caught.value)
    assert message in str(caught.value)


def test_many_bad_lines_are_listed_and_cut_short(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        from_file(lines(tmp_path, *["{"] * 8), PARAMS, chat=False)
    shown = str(caught.value).splitlines()
    assert shown[0].endswith("8 problems:")
    assert shown[1].startswith("  line 1: ")
    assert (len(shown), shown[-1]) == (7, "  and 3 more")


def test_empty_file_and_wrong_encoding(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="holds no prompts"):
        from_file(lines(tmp_path, "", " "), PARAMS, chat=False)
    file = tmp_path / "latin.txt"
    file.write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(InvalidRequestError, match=r"latin.txt is not UTF-8 text \(line 2\)"):
        from_file(file, PARAMS, chat=False)


def test_chat_wraps_prompts_and_refuses_token_ids(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    wrapped, given = from_file(lines(tmp_path, {"prompt": "hi"}, {"messages": messages}), PARAMS, chat=True)
    assert wrapped.messages == given.messages == messages
    with pytest.raises(InvalidRequestError, match=r"line 1: .*cannot be put into a chat"):
        from_file(lines(tmp_path, {"prompt_token_ids": [1]}), PARAMS, chat=True)


def test_stdin_is_one_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", Stdin("two\nlines é\n".encode()))
    jobs = from_arguments(["first", "-"], PARAMS, chat=False)
    assert [job.prompt for job in jobs] == ["first", "two\nlines é"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stdin", Stdin(b"typed", terminal=True))
    assert from_stdin(PARAMS, chat=False).prompt == "typed"
    assert "Ctrl-D" in capsys.readouterr().err


@pytest.mark.parametrize(("data", "message"), [(b"", "holds no prompt"), (b"\n", "no prompt"), (b"\xff", "not UTF-8")])
def test_stdin_that_is_no_prompt(monkeypatch: pytest.MonkeyPatch, data: bytes, message: str) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(data))
    with pytest.raises(InvalidRequestError, match=message):
        from_stdin(PARAMS, chat=False)


def test_stdin_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.cli.prompts.MAX_STDIN_BYTES", 8)
    monkeypatch.setattr("sys.stdin", Stdin(b"12345678"))
    assert from_stdin(PARAMS, chat=False).prompt == "12345678"
    monkeypatch.setattr("sys.stdin", Stdin(b"123456789"))
    with pytest.raises(InvalidRequestError, match="use --file"):
        from_stdin(PARAMS, chat=False)
