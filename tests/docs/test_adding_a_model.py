"""docs/AddingAModel.md works as printed: its wrong versions fail as it says, its right one passes the kit."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fastgen.core.plugin import ModelSpec, PluginRecord, registry
from fastgen.errors import UnsupportedModelError
from fastgen.testing.distributions import FakeSite

PAGE = "AddingAModel.md"


class Workshop:
    """The directory in which the tutorial is followed, with an environment of its own."""

    def __init__(self, folder: Path, site: FakeSite) -> None:
        self.folder, self.site = folder, site

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """A command of the page. Nothing is fetched, and nothing installed but into the fake site."""
        program, *arguments = shlex.split(line)
        if line.startswith("pip install -e "):
            self._install()
            return subprocess.CompletedProcess(line, 0, "", "")
        quiet = {
            "pip": ["-m", "pip", "--disable-pip-version-check"],
            "pytest": ["-m", "pytest", "-p", "no:cacheprovider"],
            "fastgen": ["-m", "fastgen"],
            "python": [],
        }
        offline = ["--no-build-isolation", "--no-index"] if line.startswith("pip wheel") else []
        path = [str(self.folder), str(self.site.directory), os.environ.get("PYTHONPATH", "")]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FASTGEN_", "PYTEST_"))}
        return subprocess.run(
            [sys.executable, *quiet[program], *arguments, *offline],
            cwd=self.folder,
            env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, path)), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )

    def _install(self) -> None:
        """As an editable installation does: the sources stay where they are."""
        project = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        self.site.add(
            project["name"],
            version=project["version"],
            requires=project["dependencies"],
            keywords=",".join(project["keywords"]),
            entries=project["entry-points"]["fastgen"],
        )


@pytest.mark.thorough
@pytest.mark.timeout(1800)  # seven processes that import transformers, one after another
def test_the_tutorial_works_as_printed(page: Callable[[str], Any], site: FakeSite, tmp_path: Path) -> None:
    folder = tmp_path / "fastgen-hyperclovax"
    folder.mkdir()
    workshop = Workshop(folder, site)
    failing = 0
    done: dict[str, str] = {}
    for step in page(PAGE).steps:
        if hasattr(step, "line"):
            ran = workshop.run(step.line)
            step.assert_printed(ran.stdout + ran.stderr)
            wrong = "FAILED" in step.output
            assert bool(ran.returncode) == wrong, f"$ {step.line}\n{ran.stdout}\n{ran.stderr}"
            failing += wrong
            done[step.line] = ran.stdout
            continue
        file = folder / step.name
        file.parent.mkdir(parents=True, exist_ok=True)
        source = step.source if hasattr(step, "source") else step.apply(file.read_text())
        file.write_text(source)
    assert failing == 3
    assert (folder / "fastgen_hyperclovax" / "conformance.json").is_file()
    assert re.search(r"HyperCLOVAXForCausalLM +hyperclovax +fastgen-hyperclovax +0\.1\.0", done["fastgen models"])
    (wheel,) = (folder / "dist").glob("fastgen_hyperclovax-0.1.0-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fastgen_hyperclovax/__init__.py", "fastgen_hyperclovax/block.py"} < set(names)
    assert "fastgen_hyperclovax/conformance.json" in names
    assert lines_of([folder / "fastgen_hyperclovax" / "__init__.py"]) < 70


def test_fields_left_out_are_refused_as_printed(page: Callable[[str], Any]) -> None:
    from fastgen import api as fg

    class HyperCLOVAXConfig(fg.HFConfig):
        intermediate_size: int

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(UnsupportedModelError) as caught:
        HyperCLOVAXConfig.from_raw({**sizes, "intermediate_size": 64, "embedding_multiplier": 3.0})
    assert str(caught.value) in page(PAGE).text


# ---- how long adapters are -------------------------------------------------------------------------------------------

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "exaone4", "phi", "stablelm", "olmo2")
TWO_GENERATIONS = ("gemma2",)
"""Llama-like too, and the exceptions: gemma2 holds what Gemma 3 shares with it."""
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe")


@dataclass(frozen=True)
class Adapter:
    record: PluginRecord
    entry: Path
    parts: tuple[Path, ...]
    """The modules beside it that it imports."""

    @property
    def lines(self) -> int:
        return lines_of([self.entry])


def lines_of(files: list[Path] | tuple[Path, ...]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def adapters(repository: Path) -> Iterator[Adapter]:
    """Every family in this repository, but for fallbacks."""
    for record in registry().plugins:
        specs = [spec for spec in record.specs if isinstance(spec, ModelSpec) and not spec.fallback]
        if record.status != "loaded" or not specs:
            continue
        own = record.entry.rpartition(".")[0] == "fastgen.models"
        root = repository if own else repository / "plugins" / record.distribution
        entry = root / Path(*record.entry.split("."))
        entry = entry / "__init__.py" if entry.is_dir() else entry.with_suffix(".py")
        if entry.is_file():
            yield Adapter(record, entry, tuple(sorted(imported(entry, root, {entry}) - {entry})))


def imported(file: Path, root: Path, seen: set[Path]) -> set[Path]:
    """The modules beside ``file`` that it imports, directly or by way of others, or names in a reference."""
    source = file.read_text(encoding="utf-8")
    package = ".".join(file.parent.relative_to(root).parts)
    named: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            named.add(node.value.partition(":")[0])
    for name in named:
        other = root / Path(*name.split(".")).with_suffix(".py")
        if name.startswith(f"{package}.") and other.is_file() and other not in seen:
            seen.add(other)
            imported(other, root, seen)
    return seen


def table(found: list[Adapter]) -> str:
    rows = ["| plugin | architectures | adapter | what it imports |", "|---|---|---|---|"]
    for one in sorted(found, key=lambda a: (a.record.distribution != "fastgen", a.record.name)):
        name = one.record.name if one.record.distribution == "fastgen" else f"{one.record.distribution}"
        architectures = ", ".join(a.removesuffix("ForCausalLM") for a in one.record.architectures)
        rows.append(f"| {name} | {architectures} | {one.lines} | {lines_of(one.parts) or ''} |")
    return "\n".join(rows)


def test_the_table_of_adapters_is_up_to_date(repository: Path, up_to_date: Callable[[str, str, str], None]) -> None:
    up_to_date(PAGE, "adapters", table(list(adapters(repository))))


def test_adapters_are_short(repository: Path) -> None:
    lines = {adapter.record.name: adapter.lines for adapter in adapters(repository)}
    assert {name: lines[name] for name in LLAMA_LIKE if lines[name] >= 60} == {}
    assert {name: lines[name] for name in TWO_GENERATIONS if lines[name] >= 80} == {}
    assert {name: lines[name] for name in MIXTURES if lines[name] >= 90} == {}
    assert len(lines) >= len(LLAMA_LIKE) + len(TWO_GENERATIONS) + len(MIXTURES)


def test_the_readme_names_every_architecture(repository: Path) -> None:
    named = set(re.findall(r"`(\w+)`", (repository / "README.md").read_text(encoding="utf-8")))
    served = {name for adapter in adapters(repository) for name in adapter.record.architectures}
    assert served - named == set()
    assert {name for name in named if re.search(r"For(CausalLM|Conditional)|LMHeadModel$", name)} - served == set()
