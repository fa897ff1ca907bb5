"""`scripts/setup.sh`: everything once, nothing twice, and one clear line when it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Stands for Python: is of the version in the file `version` beside it, makes environments that hold a copy of itself,
# and writes down what pip is asked for.
FAKE_PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
    *version_info*) [ "$(cat "$here/version")" != 3.9 ] ;;
    --version) echo "Python $(cat "$here/version")"; echo "and more" ;;
    "-c import sys; print(sys.version)") cat "$here/version" ;;
    "-m venv --clear .venv") rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$here/version" .venv/bin ;;
    "-m pip install"*) echo "$*" >>pip.log; [ ! -e pip-fails ] ;;
    *) echo "not expected: $*" >&2; exit 9 ;;
esac
"""


class Tree:
    """A source tree with the real script, a plugin, and a Python that is only an actor."""

    def __init__(self, root: Path, repository: Path) -> None:
        self.root = root
        for folder in ("scripts", "plugins/fastgen-one", "path"):
            (root / folder).mkdir(parents=True)
        shutil.copy(repository / "scripts" / "setup.sh", root / "scripts")
        for name in ("pyproject.toml", "constraints.txt", "plugins/fastgen-one/pyproject.toml"):
            (root / name).write_text(name)
        self.python = self.add_python("python3", "3.11")

    def add_python(self, name: str, version: str) -> Path:
        folder = self.root / "path" / version
        folder.mkdir(exist_ok=True)
        (folder / "version").write_text(version)
        (folder / name).write_text(FAKE_PYTHON)
        (folder / name).chmod(0o755)
        return folder / name

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHON": "", "PATH": f"{self.python.parent}:{os.environ['PATH']}", **environment}
        command = ["sh", str(self.root / "scripts" / "setup.sh")]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    @property
    def pip_calls(self) -> list[str]:
        log = self.root / "pip.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def tree(tmp_path: Path, repository: Path) -> Tree:
    return Tree(tmp_path, repository)


def test_installs_package_and_plugins_under_constraints_once(tree: Tree) -> None:
    assert tree.setup().returncode == 0
    (call,) = tree.pip_calls
    assert "--constraint constraints.txt -e .[dev] -e plugins/fastgen-one" in call
    again = tree.setup()
    assert (again.returncode, again.stdout, len(tree.pip_calls)) == (0, "", 1)


def test_new_files_with_the_same_contents_change_nothing(tree: Tree) -> None:
    tree.setup()
    (tree.root / "pyproject.toml").touch()
    tree.setup()
    assert len(tree.pip_calls) == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "plugins/fastgen-one/pyproject.toml"])
def test_a_changed_file_installs_again(tree: Tree, name: str) -> None:
    tree.setup()
    (tree.root / name).write_text("changed")
    tree.setup()
    assert len(tree.pip_calls) == 2


def test_a_new_plugin_installs_again(tree: Tree) -> None:
    tree.setup()
    (tree.root / "plugins" / "fastgen-two").mkdir()
    (tree.root / "plugins" / "fastgen-two" / "pyproject.toml").write_text("two")
    tree.setup()
    assert tree.pip_calls[-1].endswith("-e plugins/fastgen-one -e plugins/fastgen-two")


def test_a_failed_install_is_tried_again(tree: Tree) -> None:
    (tree.root / "pip-fails").touch()
    assert tree.setup().returncode != 0
    (tree.root / "pip-fails").unlink()
    assert tree.setup().returncode == 0
    assert len(tree.pip_calls) == 2


def test_a_broken_environment_is_made_again(tree: Tree) -> None:
    tree.setup()
    (tree.root / ".venv" / "bin" / "python").unlink()
    assert tree.setup().returncode == 0
    assert len(tree.pip_calls) == 2


def test_another_interpreter_rebuilds_and_stays(tree: Tree) -> None:
    tree.setup()
    other = tree.add_python("python3", "3.12")
    assert tree.setup(PYTHON=str(other)).returncode == 0
    assert (tree.root / ".venv" / "bin" / "version").read_text() == "3.12"
    tree.setup(PYTHON=str(other))
    tree.setup()
    assert len(tree.pip_calls) == 2


def test_old_python_gets_one_line(tree: Tree) -> None:
    old = tree.add_python("python3.9", "3.9")
    result = tree.setup(PYTHON=str(old), goal="demo")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: fastgen needs Python 3.11 or newer;")
    assert "is Python 3.9." in line
    assert "make demo PYTHON=" in line
    assert not tree.pip_calls


def test_unknown_python_gets_one_line(tree: Tree) -> None:
    result = tree.setup(PYTHON="no-such-python")
    assert (result.returncode, result.stderr) == (1, "error: PYTHON=no-such-python: no such program\n")


def test_an_old_default_is_passed_over(tree: Tree) -> None:
    for name in ("python", "python3", "python3.13"):
        old = tree.add_python(name, "3.9")
    new = tree.add_python("python3.12", "3.12")
    tree.setup(PATH=f"{old.parent}:{new.parent}:/usr/bin:/bin")
    assert (tree.root / ".venv" / "bin" / "version").read_text() == "3.12"
