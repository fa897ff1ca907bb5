"""`fastgen plugins`: what is installed and what is wrong with it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from fastgen.cli import main
from fastgen.cli.plugins import COMMANDS
from fastgen.testing.distributions import FakeSite

Run = Callable[..., subprocess.CompletedProcess[str]]

GOOD = """
    from fastgen import api as fg

    @fg.hookimpl
    def fastgen_models():
        return [fg.ModelSpec(("AForCausalLM", "BForCausalLM"), "x:C", "x:b", "x:W")]

    @fg.hookimpl
    def fastgen_checkpoint_formats():
        return [fg.CheckpointFormatSpec("gguf", (".good",), "x:convert")]
"""


@pytest.fixture
def installed(site: FakeSite) -> FakeSite:
    site.add("fastgen-good", version="2.3", entries={"good": "good_plugin"}, modules={"good_plugin": GOOD})
    site.add("fastgen-bad", entries={"bad": "bad_plugin"}, modules={"bad_plugin": "import missing_thing"})
    site.add("fastgen-old", requires=["fastgen<0.0.1"], entries={"old": "old_plugin"}, modules={"old_plugin": GOOD})
    return site


@pytest.mark.usefixtures("installed")
def test_table(fastgen: Run) -> None:
    result = fastgen("plugins", FASTGEN_DISABLE_PLUGINS="llama")
    rows = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert rows["good"].split()[1:3] == ["fastgen-good", "2.3"]
    assert rows["good"].endswith("loaded    2 models, 1 format")
    assert rows["bad"].endswith("failed    ModuleNotFoundError: No module named 'missing_thing'")
    assert "needs fastgen <0.0.1" in rows["old"]
    assert rows["llama"].endswith("disabled  disabled by FASTGEN_DISABLE_PLUGINS")
    assert len(result.stderr.splitlines()) == 2


@pytest.mark.usefixtures("installed")
def test_failed_shows_tracebacks_of_the_broken_ones_only(fastgen: Run) -> None:
    result = fastgen("plugins", "--failed")
    assert result.returncode == 1
    assert "'bad' (fastgen-bad 1.0), bad_plugin: ModuleNotFoundError" in result.stdout
    assert "    import missing_thing" in result.stdout
    assert "good" not in result.stdout.replace("good_plugin", "")


@pytest.mark.usefixtures("installed")
def test_json(fastgen: Run) -> None:
    rows = {row["plugin"]: row for row in json.loads(fastgen("plugins", "--json").stdout)}
    assert rows["good"]["provides"] == {"models": ["AForCausalLM", "BForCausalLM"], "formats": [".good"]}
    assert (rows["bad"]["status"], rows["bad"]["provides"]) == ("failed", {})
    assert rows["bad"]["traceback"].endswith("ModuleNotFoundError: No module named 'missing_thing'")
    failed = json.loads(fastgen("plugins", "--json", "--failed").stdout)
    assert [row["plugin"] for row in failed] == ["bad", "old"]


@pytest.mark.usefixtures("installed")
def test_strict_mode_is_an_error_with_the_traceback(fastgen: Run) -> None:
    result = fastgen("plugins", FASTGEN_PLUGINS_STRICT="1")
    assert result.returncode == 1
    assert result.stderr.startswith("error: plugin 'bad' (fastgen-bad 1.0) is broken: ModuleNotFoundError")
    assert "import missing_thing" in result.stderr


def test_nothing_broken(fastgen: Run) -> None:
    result = fastgen("plugins", "--failed")
    assert (result.returncode, result.stdout) == (0, "no plugin is broken\n")


@pytest.mark.usefixtures("installed")
def test_list_is_what_the_group_does_alone(fastgen: Run) -> None:
    assert fastgen("plugins", "list").stdout == fastgen("plugins").stdout
    assert fastgen("plugins", "list", "--failed", "--json").returncode == 1


def test_help_and_usage() -> None:
    lines = CliRunner().invoke(main, ["plugins", "--help"]).output.splitlines()
    for name, (_, text) in COMMANDS.items():
        assert f"  {name:<9}  {text}" in lines
    result = CliRunner().invoke(main, ["plugins", "chekc", "x"])
    assert result.exit_code == 2
    assert "no such command 'chekc'. Did you mean 'check'?" in result.stderr
    result = CliRunner().invoke(main, ["plugins", "--json", "check", "x"])
    assert result.exit_code == 2
    assert "write --json after the command: fastgen plugins check --json" in result.stderr
