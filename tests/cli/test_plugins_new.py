"""`fastgen plugins new`: each template passes everything that `fastgen plugins check` asks, as it is."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastgen.cli import main
from fastgen.core.plugin import registry

TEMPLATES = ("llama", "moe", "custom-block")


def new(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plugins", "new", *arguments])


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_green_at_once(template: str, tmp_path: Path) -> None:
    assert new("my-family", "--from", template, "--dir", str(tmp_path)).exit_code == 0
    result = CliRunner().invoke(main, ["plugins", "check", str(tmp_path / "fastgen-my-family"), "--json"])
    facts = json.loads(result.stdout)
    assert {found["check"]: found["detail"] for found in facts["checks"] if found["status"] != "pass"} == {}
    assert facts["passed"]
    (report,) = facts["conformance"].values()
    assert report["complete"]
    assert report["faults"]["planted"] == report["faults"]["caught"] > 10
    assert len(report["cases"]) == 4  # three, and what holds for the plugin as a whole


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_written(template: str, tmp_path: Path) -> None:
    result = new("Fastgen_My.Family", "--from", template, "--dir", str(tmp_path))
    target = tmp_path / "fastgen-my-family"
    assert result.output.startswith(f"{target} serves ")
    assert f"  cd {target}\n" in result.output
    written = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    parts = {"fastgen_my_family/parts.py"} if template == "custom-block" else set()
    always = {"pyproject.toml", "README.md", ".gitignore", "tests/test_conformance.py", "fastgen_my_family/__init__.py"}
    assert written == always | parts
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    project = tomllib.loads((target / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["dependencies"]) == ("fastgen-my-family", ["fastgen>=0.1,<0.2"])
    assert project["entry-points"]["fastgen"] == {"my-family": "fastgen_my_family"}
    (architecture,) = project["keywords"]
    module = (target / "fastgen_my_family" / "__init__.py").read_text()
    assert f'fg.ModelSpec(("{architecture}",), MyFamilyConfig, build' in module
    assert not [line for path in target.rglob("*.*") for line in path.read_text().splitlines() if "$" in line]
    assert len(module.splitlines()) < (90 if template == "moe" else 70)


@pytest.mark.parametrize("template", TEMPLATES)
def test_its_architecture_is_nobody_elses(template: str, tmp_path: Path) -> None:
    new("my-family", "--from", template, "--dir", str(tmp_path))
    project = tomllib.loads((tmp_path / "fastgen-my-family" / "pyproject.toml").read_text())["project"]
    claims = registry().claims_on(project["keywords"][0])
    assert [row.plugin.name for row in claims if not row.spec.fallback] == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    assert new("foo", "--dir", str(tmp_path)).exit_code == 0
    module = tmp_path / "fastgen-foo" / "fastgen_foo" / "__init__.py"
    module.write_text("mine")
    result = new("foo", "--dir", str(tmp_path))
    assert result.exit_code == 1
    assert "exists already and is left as it is" in result.stderr
    assert module.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("7up", "cannot be a plugin's name; write letters, digits and dashes"),
        ("a b", "cannot be a plugin's name"),
        ("../foo", "cannot be a plugin's name"),
        ("fastgen-", "cannot be a plugin's name"),
        ("lambda", "cannot be a plugin's name"),
        ("Llama", "the plugin name 'llama' belongs to fastgen"),
        ("fastgen-llama", "the plugin name 'llama' belongs to fastgen"),
    ],
)
def test_names_that_cannot_be(name: str, message: str, tmp_path: Path) -> None:
    result = new(name, "--dir", str(tmp_path))
    assert result.exit_code == 1
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage(tmp_path: Path) -> None:
    assert new("foo", "--from", "lama", "--dir", str(tmp_path)).exit_code == 2
    assert new("foo", "--dir", str(tmp_path / "nowhere")).exit_code == 2
