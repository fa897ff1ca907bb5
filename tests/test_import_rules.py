"""The import rules hold, `make lint` would notice if they did not, and light names stay light."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


# (file, the line planted in it, the contract that must break)
VIOLATIONS = [
    ("core/hf_config.py", "import fastgen.models", "Rooms"),
    ("types.py", "import fastgen.core", "Rooms"),
    ("kernels/ops.py", "def late():\n    import fastgen.core.layers", "Rooms"),
    ("models/planted.py", "import fastgen.core.layers", "A model family"),
    ("core/layers/planted.py", "import fastgen.core.runtime", "Inside the core"),
    ("core/policy/planted.py", "import torch", "Policy"),
    ("text/planted.py", "import torch", "Letters"),
    ("planted_room.py", "", "Rooms"),
]
LIGHT_MODULES = (
    "fastgen.text, fastgen.types, fastgen.config, fastgen.errors, fastgen.core.plugin, fastgen.core.policy, "
    "fastgen.core.source, fastgen.cli, fastgen.bench.cli, fastgen.testing.demo_model"
)


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """import-linter with this project's contracts, on the package under ``tree``."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"}
    return subprocess.run(
        [*command, "--no-cache"], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    shutil.copytree(repository / "fastgen", tmp_path / "fastgen", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "pyproject.toml", tmp_path)
    return tmp_path


def test_import_rules_hold(copy: Path) -> None:
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(("file", "line", "contract"), VIOLATIONS, ids=[v[0] for v in VIOLATIONS])
def test_import_rules_catch_a_planted_violation(copy: Path, file: str, line: str, contract: str) -> None:
    with (copy / "fastgen" / file).open("a", encoding="utf-8") as stream:
        stream.write(f"\n{line}\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout
    broken = [row for row in result.stdout.splitlines() if "BROKEN" in row]
    assert len(broken) == 1
    assert broken[0].startswith(contract)


def test_light_modules_load_neither_torch_nor_transformers() -> None:
    code = f"import {LIGHT_MODULES}, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def imported_modules(source: str) -> set[str]:
    """Every module a file imports, at any depth of its code; relative imports stay inside and are left out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def beyond_the_api(source: str) -> set[str]:
    ours = {name for name in imported_modules(source) if name.split(".")[0] == "fastgen"}
    return {name for name in ours if name != "fastgen.api" and not name.startswith("fastgen.api.")}


def test_plugins_import_the_api_only(repository: Path) -> None:
    files = [
        path
        for path in (repository / "plugins").rglob("*.py")
        if "tests" not in path.relative_to(repository).parts and ".venv" not in path.parts
    ]
    assert files
    wrong = {str(path.relative_to(repository)): beyond_the_api(path.read_text(encoding="utf-8")) for path in files}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from fastgen import api as fg", set()),
        ("from fastgen.api import ModelSpec", set()),
        ("import fastgen.core.layers", {"fastgen.core.layers"}),
        ("def f():\n    from fastgen.core import source", {"fastgen.core.source"}),
        ("from fastgen import api, types", {"fastgen.types"}),
    ],
)
def test_the_plugin_rule_sees_every_form(source: str, wrong: set[str]) -> None:
    assert beyond_the_api(source) == wrong
