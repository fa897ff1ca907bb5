"""`fastgen models`: every claim with its plugin, on a terminal, piped and as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import fastgen
from fastgen import api as fg
from fastgen.cli import main
from fastgen.cli.models import models
from fastgen.cli.output import print_json, print_table


def plugin(description: str = "", *architectures: str) -> SimpleNamespace:
    @fg.hookimpl
    def fastgen_models() -> list[fg.ModelSpec]:
        return [fg.ModelSpec(architectures, "x:C", "x:b", "x:W", description=description)]

    return SimpleNamespace(fastgen_models=fastgen_models)


def test_plain_table_is_one_aligned_row_a_line() -> None:
    with fg.registered(plugin("A family [of its own]", "FooForCausalLM"), name="foo"):
        lines = CliRunner().invoke(main, ["models"]).output.splitlines()
    assert lines[0].split() == ["ARCHITECTURE", "PLUGIN", "DISTRIBUTION", "VERSION", "CONFORMANCE", "DESCRIPTION"]
    foo = next(line for line in lines if line.startswith("FooForCausalLM"))
    llama = next(line for line in lines if line.startswith("LlamaForCausalLM"))
    assert foo.endswith("A family [of its own]")
    assert llama.index("llama") == foo.index("foo") == lines[0].index("PLUGIN")
    assert fastgen.__version__ in llama


def test_json() -> None:
    rows = json.loads(CliRunner().invoke(main, ["models", "--json"]).output)
    (llama,) = (row for row in rows if row["architecture"] == "LlamaForCausalLM")
    assert llama == {
        "architecture": "LlamaForCausalLM",
        "plugin": "llama",
        "distribution": "fastgen",
        "version": fastgen.__version__,
        "conformance": llama["conformance"],
        "description": llama["description"],
        "fallback": False,
        "note": None,
    }


def test_clash_is_noted() -> None:
    with fg.registered(plugin("", "LlamaForCausalLM"), name="mine"):
        rows = json.loads(CliRunner().invoke(main, ["models", "--json"]).output)
    notes = {row["plugin"]: row["note"] for row in rows if row["architecture"] == "LlamaForCausalLM"}
    assert notes == {"llama": "clashes with mine", "mine": "clashes with llama"}


def test_terminal_table_does_not_read_brackets_as_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    with fg.registered(plugin("[bold]A family", "FooForCausalLM"), name="foo"):
        models([], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "─" in shown
    assert "[bold]A family" in shown


def drawn(
    rows: list[tuple[str, ...]], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(("name", "text"), rows)
    return capsys.readouterr().out.splitlines()


def test_narrow_terminal_folds_the_prose_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = drawn([("FooForCausalLM", "a family that has a long description")], 40, monkeypatch, capsys)
    assert lines[1] == "─" * 40
    assert lines[2:] == ["FooForCausalLM  a family that has a long", "                description"]
    lines = drawn([("FooForCausalLM", "x" * 50)], 20, monkeypatch, capsys)
    assert max(map(len, lines[1:])) == 20
    assert "".join(line[11:] for line in lines[2:]) == "x" * 50


def test_terminal_is_given_no_orders_and_wide_letters_take_two_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = drawn([("日本", "one\ntwo \x1b[2J"), ("abcd", "x")], 80, monkeypatch, capsys)
    assert lines[2:] == ["日本  one two \N{REPLACEMENT CHARACTER}[2J", "abcd  x"]


def test_numbers_are_aligned_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "tokens"), [("a", "7"), ("bb", "1,234")], right=("tokens",))
    assert capsys.readouterr().out == "NAME  TOKENS\na          7\nbb     1,234\n"


def test_json_never_holds_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json({"x": float("nan")})
