"""`fastgen plugins install` and `uninstall`, with a real pip in an environment of its own, without an index."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner

from fastgen.cli import main
from fastgen.cli.plugins import install as module

Run = Callable[..., subprocess.CompletedProcess[str]]

MAIN = "import sys; sys.argv[0] = 'fastgen'; from fastgen.cli import main; main()"
ENTRY = """
    from fastgen import api as fg

    @fg.hookimpl
    def fastgen_models():
        return [fg.ModelSpec(("FooForCausalLM",), "x:C", "x:b", "x:W")]
"""
PROJECT = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"

    [project]
    name = "fastgen-foo"
    version = "1.2"
    dependencies = [{dependencies}]

    [project.entry-points.fastgen]
    foo = "fastgen_foo"
"""


def tree(path: Path, dependencies: str = '"fastgen>=0.1,<0.2"', entry: str = ENTRY) -> Path:
    """The sources of a plugin."""
    (path / "fastgen_foo").mkdir(parents=True)
    (path / "pyproject.toml").write_text(dedent(PROJECT).format(dependencies=dependencies), encoding="utf-8")
    (path / "fastgen_foo" / "__init__.py").write_text(dedent(entry), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``fastgen ARGUMENTS`` in a virtual environment that sees all that is installed here, and adds to itself only."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    here = sysconfig.get_paths()["purelib"]
    python = folder / "bin" / "python"
    (there,) = folder.glob("lib/python*/site-packages")
    (there / "beside.pth").write_text(f"import site; site.addsitedir({here!r})\n", encoding="utf-8")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(python), "-c", MAIN, *arguments], capture_output=True, text=True, check=False)

    return run


OFFLINE = ("--no-index", "--no-build-isolation")


@pytest.mark.slow
def test_wheel_is_installed_used_and_removed(environment: Run, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(tree(tmp_path / "source"))], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    result = environment("plugins", "install", *OFFLINE, str(wheel))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "registered foo (fastgen-foo 1.2): models: FooForCausalLM\n"
    assert "Installing a plugin runs its code" in result.stderr
    assert "FooForCausalLM" in environment("models").stdout

    again = environment("plugins", "install", *OFFLINE, str(wheel))
    assert "no plugin changed" in again.stdout

    kept = environment("plugins", "uninstall", "foo")  # nobody answers
    assert kept.returncode == 130
    assert "FooForCausalLM" in environment("models").stdout

    gone = environment("plugins", "uninstall", "--yes", "foo")
    assert (gone.returncode, gone.stdout) == (0, "removed foo (fastgen-foo 1.2)\n"), gone.stderr
    assert "FooForCausalLM" not in environment("models").stdout


@pytest.mark.slow
def test_source_tree_in_place_and_a_broken_one_is_told_of(environment: Run, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", entry="import missing_thing\n")
    result = environment("plugins", "install", *OFFLINE, "-e", str(source))
    assert result.returncode == 1
    assert (
        "error: foo (fastgen-foo 1.2) is broken: ModuleNotFoundError: No module named 'missing_thing'" in result.stderr
    )
    assert "`fastgen plugins --failed` shows where" in result.stderr
    assert environment("plugins", "uninstall", "--yes", "fastgen-foo").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("needed", ["torch<2", "fastgen>=7"])
def test_plugin_that_needs_another_torch_is_refused(environment: Run, tmp_path: Path, needed: str) -> None:
    name = needed.partition("<")[0].partition(">")[0]
    source = tree(tmp_path / "source", f'"{needed}"')
    result = environment("plugins", "install", *OFFLINE, str(source))
    assert result.returncode == 1
    assert f"error: this needs another {name} than the installed" in result.stderr
    assert "Nothing was installed" in result.stderr
    assert "foo" not in environment("plugins").stdout


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["plugins", *arguments])
    assert result.exit_code == 1
    return result.stderr


def test_what_is_no_plugin_is_not_removed() -> None:
    assert "no plugin 'torch' is installed, so it is not removed. This command removes plugins only" in refused(
        "uninstall", "--yes", "torch"
    )
    assert "would remove fastgen itself" in refused("uninstall", "--yes", "fastgen")
    text = refused("uninstall", "--yes", "llama")
    assert "'llama' is part of fastgen itself" in text
    assert "FASTGEN_DISABLE_PLUGINS=llama" in text
    assert "Did you mean 'llama'" in refused("uninstall", "--yes", "lama")


def test_what_must_not_move_is_not_installed() -> None:
    assert "torch is no plugin and is not moved" in refused("install", "torch")
    result = CliRunner().invoke(main, ["plugins", "install"])
    assert (result.exit_code, "name a distribution" in result.stderr) == (2, True)
    assert CliRunner().invoke(main, ["plugins", "install", "x", "--force-reinstall"]).exit_code == 2
    assert CliRunner().invoke(main, ["plugins", "install", "--", "--force-reinstall"]).exit_code == 2


def test_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "_plugins", dict)
    text = refused("install", "fastgen-foo")
    assert f"{sys.executable} has no pip. With uv: `uv pip install --python {sys.executable} fastgen-foo`" in text
    assert "torch must stay" in text


def test_a_torch_that_moved_all_the_same_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_plugins", dict)
    monkeypatch.setattr(module, "_pinned_versions", lambda: {"torch": "0.0.1"})
    monkeypatch.setattr(module.sys, "executable", "/bin/true")
    assert "pip moved torch from 0.0.1 to None in spite of a constraint" in refused("install", "fastgen-foo")
