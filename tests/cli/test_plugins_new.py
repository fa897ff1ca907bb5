"""`fastgen plugins new`: each template passes everything that `fastgen plugins check` asks, as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastgen.cli import main
from fastgen.core.plugin import registry

TEMPLATES = ("llama", "moe", "custom-block")


def new(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plugins", "new", *arguments])


@pytest.mark.thorough
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


def bare_pytest(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As its author types it, in a fresh directory that is not installed."""
    program = "import sys, pytest; sys.path = [p for p in sys.path if p]; sys.exit(pytest.main(sys.argv[1:]))"
    return subprocess.run(
        # Not those either that are installed for our own tests and warn of what this one provokes.
        [sys.executable, "-c", program, "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", *arguments],
        cwd=target,
        env={k: v for k, v in os.environ.items() if not k.startswith(("FASTGEN_", "PYTEST_"))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", ["moe", *(pytest.param(t, marks=pytest.mark.thorough) for t in TEMPLATES if t != "moe")]
)
def test_pytest_needs_no_installation_and_compares_defaults(template: str, tmp_path: Path) -> None:
    new("my-family", "--from", template, "--dir", str(tmp_path))
    target = tmp_path / "fastgen-my-family"
    done = bare_pytest(target, "-k", "left_out or (weights_fill and published)")
    assert (done.returncode, done.stdout.count("2 passed")) == (0, 1), done.stdout
    module = target / "fastgen_my_family" / "__init__.py"
    module.write_text(re.sub(r"( +eos_token_ids: .*)\n", "\n", module.read_text()))
    done = bare_pytest(target, "tests/test_defaults.py")
    assert "no eos_token_id: eos_token_ids is frozenset()" in done.stdout


@pytest.mark.slow
def test_where_the_entry_is_not_on_the_path_it_is_said_once(tmp_path: Path) -> None:
    new("my-family", "--dir", str(tmp_path))
    target = tmp_path / "fastgen-my-family"
    project = target / "pyproject.toml"
    project.write_text(project.read_text().replace('pythonpath = ["."]\n', ""))
    done = bare_pytest(target, "tests/test_conformance.py")
    assert done.stdout.count("`pip install -e .`") == done.stdout.count("`fastgen plugins check .`") == 1
    assert "Traceback" not in done.stdout
    assert "1 error" in done.stdout
    assert len(done.stdout.splitlines()) < 10


@pytest.mark.slow
def test_an_architecture_of_ones_own(tmp_path: Path) -> None:
    result = new("my-family", "--architecture", "ArceeForCausalLM", "--dir", str(tmp_path))
    target = tmp_path / "fastgen-my-family"
    assert result.output.startswith(f"{target} is to serve ArceeForCausalLM. Next:")
    assert result.stderr == ""
    project = tomllib.loads((target / "pyproject.toml").read_text())["project"]
    assert project["keywords"] == ["ArceeForCausalLM"]
    module = (target / "fastgen_my_family" / "__init__.py").read_text()
    assert 'fg.ModelSpec(("ArceeForCausalLM",), ArceeConfig, build' in module
    assert "SeedOss" not in "".join(path.read_text() for path in target.rglob("*.*") if path.is_file())
    tests = (target / "tests" / "test_conformance.py").read_text()
    assert "class TestArcee(ModelConformance)" in tests
    assert '"published": {"model_type": "arcee"},' in tests
    assert "lists ArceeForCausalLM" in (target / "README.md").read_text()
    done = bare_pytest(target, "tests", "-k", "left_out or fill")
    assert "no hidden_act: hidden_act is 'silu', not 'relu2'" in done.stdout
    assert "parts of the model that no tensor fills: blocks.0.mlp.up[gate].weight" in done.stdout


@pytest.mark.parametrize(
    ("architecture", "note"),
    [
        ("LlamaForCausalLM", "is served already, by the plugin 'llama' (fastgen"),
        ("LamaForCausalLM", "transformers has no LamaForCausalLM. Did you mean 'LlamaForCausalLM'"),
    ],
)
def test_what_to_know_of_an_architecture(architecture: str, note: str, tmp_path: Path) -> None:
    result = new("foo", "--architecture", architecture, "--dir", str(tmp_path))
    assert result.exit_code == 0
    assert f"note: {architecture} {note}" in result.stderr or f"note: {note}" in result.stderr
    known = architecture.startswith("Ll")
    assert (tmp_path / "fastgen-foo" / "tests" / "test_defaults.py").exists() == known
    kind = "llama" if known else "lama"
    assert f'"model_type": "{kind}"' in (tmp_path / "fastgen-foo" / "tests" / "test_conformance.py").read_text()


def test_an_architecture_that_cannot_be(tmp_path: Path) -> None:
    result = new("foo", "--architecture", "foo-For", "--dir", str(tmp_path))
    assert result.exit_code == 1
    assert "cannot be the name of a class" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_written(template: str, tmp_path: Path) -> None:
    result = new("Fastgen_My.Family", "--from", template, "--dir", str(tmp_path))
    target = tmp_path / "fastgen-my-family"
    assert result.output.startswith(f"{target} serves ")
    assert f"  cd {target}\n" in result.output
    written = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    parts = {"fastgen_my_family/parts.py"} if template == "custom-block" else set()
    tests = {"tests/test_conformance.py", "tests/test_defaults.py"}
    always = tests | {"pyproject.toml", "README.md", ".gitignore", "fastgen_my_family/__init__.py"}
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
