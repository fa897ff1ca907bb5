"""What a user gets from `pip install`: the wheel's contents, its metadata, one version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import entry_points, metadata, version
from pathlib import Path
from textwrap import dedent

import pytest
from packaging.requirements import Requirement

import fastgen
from fastgen.kernels.cpu import isa
from fastgen.kernels.cpu.build import BINDING, LIBRARY


def build_wheel(repository: Path, source: Path, out: Path, **environment: str) -> Path:
    """From a copy of what git would hold, without fetching anything."""
    for name in ("fastgen", "tests", "docs", "plugins"):
        if (repository / name).is_dir():
            shutil.copytree(repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        shutil.copy(repository / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command += ["--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **environment})
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    return zipfile.ZipFile(build_wheel(repository, source, out, FASTGEN_PREBUILD="0"))


@pytest.fixture(scope="module")
def wheel_metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile, repository: Path) -> None:
    names = set(wheel.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fastgen"}
    ours = {str(path.relative_to(repository)) for path in (repository / "fastgen").rglob("*.py")}
    assert ours <= names
    assert {"fastgen/py.typed", *(f"fastgen/bench/workloads/w{number}.json" for number in (1, 2, 3))} <= names
    assert "fastgen/models/conformance.json" in names
    templates = {
        str(path.relative_to(repository)) for path in (repository / "fastgen/cli/plugins/templates").rglob("*.txt")
    }
    assert len(templates) > 5
    assert templates <= names
    assert not [name for name in names if "/tests/" in name or name.rpartition("/")[2].startswith("test_")]


@pytest.mark.thorough
def test_wheel_with_compiled_kernels(repository: Path, tmp_path: Path) -> None:
    """It serves without a compiler, from the kernels it brought."""
    built = build_wheel(repository, tmp_path / "source", tmp_path / "wheel", FASTGEN_PREBUILD=isa.best_level().name)
    assert built.name.startswith("fastgen-")
    assert not built.name.endswith("-any.whl")
    zipfile.ZipFile(built).extractall(tmp_path / "site")
    brought = {file.name for file in (tmp_path / "site/fastgen/kernels/cpu/prebuilt").iterdir()}
    assert brought == {BINDING, LIBRARY.format(isa.best_level().name)}
    script = """
        import torch
        from fastgen.kernels.cpu.library import library, unavailable
        from fastgen.kernels.cpu.linear import linear
        assert unavailable() is None and library().binding is not None
        x, weight = torch.randn(3, 40), torch.randn(7, 40)
        torch.testing.assert_close(linear(x, weight, None), x @ weight.T)
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "site"),
        "CXX": "no-compiler",
        "CC": "no-compiler",
        "FASTGEN_CACHE": str(tmp_path / "cache"),
    }
    subprocess.run([sys.executable, "-c", dedent(script)], check=True, env=environment, cwd=tmp_path)
    assert not (tmp_path / "cache").exists()


def test_wheel_declares_command_and_plugins(wheel: zipfile.ZipFile, repository: Path) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    text = wheel.read(name).decode()
    assert "fastgen = fastgen.cli:main" in text
    families = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["entry-points"]["fastgen"]
    assert all(f"{family} = {module}" in text for family, module in families.items())


def test_wheel_has_the_licence(wheel: zipfile.ZipFile, wheel_metadata: Message) -> None:
    assert wheel_metadata["License-Expression"] == "Apache-2.0"
    (name,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    assert "Apache License" in wheel.read(name).decode()


def test_extras_exist_and_triton_is_one(wheel_metadata: Message) -> None:
    assert set(wheel_metadata.get_all("Provides-Extra")) == {
        "gpu",
        "server",
        "otel",
        "bench",
        "clients",
        "testing",
        "dev",
        "all",
    }
    needed = [Requirement(line) for line in wheel_metadata.get_all("Requires-Dist")]
    always = {requirement.name for requirement in needed if requirement.marker is None}
    assert {"torch", "transformers", "safetensors", "pluggy", "pydantic"} <= always
    assert not always & {"triton", "pytest", "fastapi", "matplotlib"}
    assert wheel_metadata["Requires-Python"] == ">=3.11"


def test_one_version(wheel_metadata: Message, repository: Path) -> None:
    assert fastgen.__version__ == wheel_metadata["Version"] == version("fastgen")
    written = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert "version" in written["dynamic"]


@pytest.mark.parametrize("extra", ["gpu", "server", "bench", "testing", "dev", "all"])
def test_installed_metadata_knows_the_extra(extra: str) -> None:
    assert extra in (metadata("fastgen").get_all("Provides-Extra") or [])


def test_every_plugin_distribution_is_installed_and_answers(repository: Path) -> None:
    """Set-up installs what lies under plugins/; each must come in by the one entry-point group and need fastgen."""
    installed = {entry.dist.name for entry in entry_points(group="fastgen") if entry.dist}
    for file in (repository / "plugins").glob("*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        assert project["name"] in installed
        assert "fastgen" in {Requirement(line).name for line in project["dependencies"]}
        assert project["entry-points"]["fastgen"]
