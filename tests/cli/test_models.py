"""`fastgen models`: every claim with its plugin, on a terminal, piped and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import fastgen
from fastgen import api as fg
from fastgen.cli import main
from fastgen.cli.models import models
from fastgen.cli.output import print_json, print_table
from fastgen.core.plugin.conformance import Case, Conformance, write_report
from fastgen.testing.distributions import FakeSite

Run = Callable[..., subprocess.CompletedProcess[str]]


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


# ---- conformance ---------------------------------------------------------------------------------------------------

SILENT = """
    from fastgen import api as fg

    @fg.hookimpl
    def fastgen_models():
        return [fg.ModelSpec(("FooForCausalLM", "BarForCausalLM"), "x:C", "x:b", "x:W")]
"""


def report(version: str, checks: dict[str, str], *, complete: bool = True) -> Conformance:
    cases = {"plain": Case("FooForCausalLM", checks)}
    return Conformance("foo_plugin", "foo", "fastgen-foo", version, complete=complete, cases=cases)


@pytest.mark.parametrize(
    ("version", "checks", "shown"),
    [
        ("1.0", {"prefill": "pass", "fault: scale": "pass"}, "passed (1 case, 1/1 faults)"),
        ("1.0", {"prefill": "fail", "fault: scale": "pass"}, "failed: prefill[plain]"),
        ("0.9", {"prefill": "pass", "fault: scale": "pass"}, "passed (1 case, 1/1 faults), of version 0.9"),
    ],
)
def test_conformance_by_architecture(
    fastgen: Run, site: FakeSite, version: str, checks: dict[str, str], shown: str
) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": SILENT})
    write_report(site.directory / "foo_plugin.conformance.json", [report(version, checks)])
    lines = {line.split()[0]: line for line in fastgen("models").stdout.splitlines()}
    assert shown in lines["FooForCausalLM"]
    assert "not tested" in lines["BarForCausalLM"]
    rows = {row["architecture"]: row["conformance"] for row in json.loads(fastgen("models", "--json").stdout)}
    assert rows["FooForCausalLM"]["version"] == version
    assert rows["FooForCausalLM"]["passed"] == (checks["prefill"] == "pass")
    assert rows["BarForCausalLM"]["summary"] is None


def test_damaged_report_costs_its_own_line(fastgen: Run, site: FakeSite) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": SILENT})
    (site.directory / "foo_plugin.conformance.json").write_text('{"schema": 7}')
    result = fastgen("models")
    assert result.returncode == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "unreadable: " in lines["FooForCausalLM"]
    assert "unreadable" not in lines["LlamaForCausalLM"]
    rows = {row["architecture"]: row["conformance"] for row in json.loads(fastgen("models", "--json").stdout)}
    assert "foo_plugin.conformance.json" in rows["FooForCausalLM"]["error"]


# ---- quick ---------------------------------------------------------------------------------------------------------

HEAVY = ("torch", "transformers", "numpy", "pydantic", "rich", "packaging.requirements", "huggingface_hub", "asyncio")


@pytest.mark.parametrize("arguments", [["models"], ["plugins"], ["--help"], ["plugins", "--help"]], ids=" ".join)
def test_listing_imports_nothing_that_takes_time(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom fastgen.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_listing_takes_little_more_than_the_libraries_it_needs() -> None:
    """The limit is 0.3 s over ``python -c pass`` on an idle machine, of which these libraries take more than half.
    Processor time against theirs holds on a busy one too."""
    needed = "import click, importlib.metadata, inspect, pluggy"
    taken: dict[str, list[float]] = {needed: [], "from fastgen.cli import main; main(['models'])": []}
    for _ in range(7):
        for code, times in taken.items():
            before = os.times()
            subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
            after = os.times()
            times.append(sum(after[2:4]) - sum(before[2:4]))
    least, most = (min(times) for times in taken.values())
    assert most < 2.5 * least, taken
