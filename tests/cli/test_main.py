"""The group: help whatever plugins do, exit codes, plugins' commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner

from fastgen import __version__
from fastgen.cli import COMMANDS, main
from fastgen.cli.group import LazyGroup
from fastgen.errors import ConfigError
from fastgen.testing.distributions import FakeSite

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]

COMMAND = """
    import click
    from fastgen import api as fg

    @click.command()
    @click.argument("word")
    def {function}(word):
        click.echo(f"{name} says {{word}}")

    @fg.hookimpl
    def fastgen_commands():
        return [fg.CommandSpec("{name}", {function}, help="Says a word.")]
"""


def add_command(site: FakeSite, plugin: str, name: str) -> None:
    source = COMMAND.format(name=name, function=f"{plugin}_command")
    site.add(f"fastgen-{plugin}", entries={plugin: f"{plugin}_plugin"}, modules={f"{plugin}_plugin": source})


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"fastgen {__version__}\n")


def test_every_built_in_command_is_in_help_with_its_line() -> None:
    lines = CliRunner().invoke(main, ["--help"]).output.splitlines()
    width = max(map(len, COMMANDS))
    for name, (_, text) in COMMANDS.items():
        assert f"  {name:<{width}}  {text}" in lines


def test_plugin_command_runs_and_is_listed_apart(fastgen: Run, site: FakeSite) -> None:
    add_command(site, "echo", "parrot")
    shown = fastgen("--help").stdout
    assert "Commands of plugins:\n  parrot  Says a word. (echo)" in shown
    assert fastgen("parrot", "hello").stdout == "parrot says hello\n"


def test_plugin_command_cannot_shadow_a_built_in(fastgen: Run, site: FakeSite) -> None:
    add_command(site, "echo", "models")
    assert "LlamaForCausalLM" in fastgen("models").stdout
    shown = fastgen("--help")
    assert "Commands of plugins" not in shown.stdout
    assert "the plugin 'echo' cannot replace the command 'models'" in shown.stderr


def test_two_plugins_with_one_command_clash_when_it_is_called(fastgen: Run, site: FakeSite) -> None:
    add_command(site, "echo", "parrot")
    add_command(site, "ditto", "parrot")
    assert fastgen("--help").returncode == 0
    result = fastgen("parrot", "hello")
    assert result.returncode == 1
    assert result.stderr.startswith("error: the command 'parrot' is claimed by the plugins 'ditto'")


@pytest.mark.parametrize("strict", ["0", "1"])
def test_f1_help_survives_a_broken_plugin(fastgen: Run, site: FakeSite, strict: str) -> None:
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": "raise SystemExit('no')"})
    result = fastgen("--help", FASTGEN_PLUGINS_STRICT=strict)
    assert result.returncode == 0
    assert "generate  " in result.stdout
    assert len(result.stderr.splitlines()) == 1
    assert "'foo' (fastgen-foo 1.0) is broken" in result.stderr


def test_usage_errors_are_2_and_suggest() -> None:
    result = CliRunner().invoke(main, ["modles"])
    assert result.exit_code == 2
    assert "no such command 'modles'. Did you mean 'models'?" in result.stderr
    assert CliRunner().invoke(main, ["--nonsense"]).exit_code == 2
    assert CliRunner().invoke(main, ["models", "--nonsense"]).exit_code == 2


def raising(error: BaseException) -> LazyGroup:
    @click.group(cls=LazyGroup, lazy={})
    def group() -> None:
        raise error

    @group.command()
    def go() -> None: ...

    group.lazy["go"] = ("builtins:print", "")
    group.get_command = lambda ctx, name: go  # type: ignore[method-assign]
    return group


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (ConfigError("that value"), 1, "error: that value\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
        (OSError(28, "No space left on device"), 1, "error: cannot write the output: No space left on device\n"),
        (click.ClickException("plain"), 1, "Error: plain\n"),
    ],
)
def test_exit_codes(error: BaseException, code: int, stderr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTGEN_DEBUG", raising=False)
    result = CliRunner().invoke(raising(error), ["go"])
    assert (result.exit_code, result.stderr) == (code, stderr)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_DEBUG", "1")
    result = CliRunner().invoke(raising(ConfigError("that value")), ["go"])
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("error: that value\n")


def test_programming_errors_are_not_hidden() -> None:
    assert isinstance(CliRunner().invoke(raising(KeyError("bug")), ["go"]).exception, KeyError)


PRINTS = """
import click
from fastgen.cli.group import LazyGroup

group = LazyGroup(lazy={"go": ("builtins:print", "")})
group.get_command = lambda ctx, name: click.Command("go", callback=lambda: print("buffered until the end"))
group(["go"])
"""


@pytest.mark.parametrize(
    "code", [*(f"from fastgen.cli import main; main(['{a}'])" for a in ("models", "--help")), PRINTS]
)
def test_reader_that_goes_away_costs_no_traceback(code: str) -> None:
    """A pipe whose reading end is closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_strangers_words_that_cannot_be_encoded_are_shown_escaped(fastgen: Run, site: FakeSite) -> None:
    source = """
        from fastgen import api as fg

        @fg.hookimpl
        def fastgen_models():
            text = "half\\ud800 of\\na letter"
            return [fg.ModelSpec(("FooForCausalLM",), "x:Config", "x:build", "x:WEIGHTS", description=text)]
    """
    site.add("fastgen-foo", entries={"foo": "foo_plugin"}, modules={"foo_plugin": source})
    (line,) = (line for line in fastgen("models").stdout.splitlines() if line.startswith("FooForCausalLM"))
    assert line.endswith("half\\ud800 of a letter")
    rows = json.loads(fastgen("models", "--json").stdout)
    assert "half\ud800 of\na letter" in [row["description"] for row in rows]
