"""`fastgen plugins check`: each rule catches a plugin that breaks it, and a good one passes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from click.testing import CliRunner

from fastgen.cli import main
from fastgen.cli.plugins.candidate import Candidate, installed_candidate, source_candidate
from fastgen.cli.plugins.conformance import check_conformance, judge
from fastgen.cli.plugins.hygiene import (
    keywords,
    light,
    loads,
    probe,
    references,
    sources,
    spawn,
    twice,
    version_bounds,
)
from fastgen.cli.plugins.source_rules import offences
from fastgen.core.plugin.conformance import Case, Conformance
from fastgen.testing.distributions import FakeSite

Run = Callable[..., subprocess.CompletedProcess[str]]

GOOD = """
    from __future__ import annotations

    from fastgen import api as fg


    class FooConfig(fg.HFConfig):
        pass


    def build(c: FooConfig) -> fg.Decoder:
        from fastgen_foo.parts import norm

        raise NotImplementedError(norm)


    @fg.hookimpl
    def fastgen_models() -> list[fg.ModelSpec]:
        return [fg.ModelSpec(("FooForCausalLM",), FooConfig, build, fg.DECODER_WEIGHTS)]
"""
PARTS = """
    import torch

    from fastgen import api as fg

    def norm():
        return fg.RMSNorm(torch.Size([8])[0], 1e-6)
"""
PROJECT = """
    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"

    [project]
    name = "fastgen-foo"
    version = "1.2"
    dependencies = ["fastgen>=0.1,<0.2"]
    keywords = ["FooForCausalLM"]

    [project.entry-points.fastgen]
    foo = "fastgen_foo"
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text), encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sources of a plugin without a fault (and without tests)."""
    top = tmp_path / "foo"
    write(top / "pyproject.toml", PROJECT)
    write(top / "fastgen_foo" / "__init__.py", GOOD)
    write(top / "fastgen_foo" / "parts.py", PARTS)
    return top


def check(target: Path | str, *options: str) -> dict[str, Any]:
    """What was found, as ``{"passed": ..., "api only": {"status", "detail", "remedy"}, ...}``."""
    result = CliRunner().invoke(main, ["plugins", "check", str(target), "--json", *options])
    facts = json.loads(result.stdout)
    assert result.exit_code == (0 if facts["passed"] else 1)
    for found in facts["checks"]:
        assert (found["remedy"] is not None) == (found["status"] in ("fail", "warn")), found
    return {**facts, **{found["check"]: found for found in facts["checks"] if found["status"] != "skip"}}


def failing(facts: dict[str, Any]) -> set[str]:
    return {found["check"] for found in facts["checks"] if found["status"] == "fail"}


def edit(tree: Path, old: str, new: str, file: str = "fastgen_foo/__init__.py") -> None:
    text = (tree / file).read_text(encoding="utf-8")
    assert old in text
    (tree / file).write_text(text.replace(old, new), encoding="utf-8")


# ---- whole checks --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_good_plugin_passes_from_its_sources(tree: Path) -> None:
    (tree / "src").mkdir()
    (tree / "fastgen_foo").rename(tree / "src" / "fastgen_foo")
    facts = check(tree, "--skip-conformance")
    assert facts["passed"]
    assert (facts["distribution"], facts["version"], facts["installed"]) == ("fastgen-foo", "1.2", False)
    assert (facts["plugins"], facts["architectures"]) == (["foo"], ["FooForCausalLM"])
    statuses = {found["check"]: found["status"] for found in facts["checks"]}
    checks = ("versions", "loads", "light", "api only", "twice", "spawn", "references", "keywords")
    assert statuses == {**dict.fromkeys(checks, "pass"), "conformance": "skip"}


@pytest.mark.slow
def test_installed_plugin_is_found_by_its_name(fastgen: Run, site: FakeSite) -> None:
    site.add(
        "fastgen-foo",
        version="1.2",
        requires=["fastgen<0.2,>=0.1"],
        keywords="FooForCausalLM",
        entries={"foo": "fastgen_foo"},
        modules={"fastgen_foo/parts": PARTS},
    )
    write(site.directory / "fastgen_foo" / "__init__.py", GOOD)
    result = fastgen("plugins", "check", "foo")
    assert result.returncode == 0, result.stdout
    assert "fastgen-foo 1.2 (installed)" in result.stdout
    assert "api only     ok       2 modules read" in result.stdout
    assert "came without a conformance.json" in result.stdout  # a warning alone
    assert result.stdout.endswith("nothing failed\n")


def test_installed_names(monkeypatch: pytest.MonkeyPatch, site: FakeSite) -> None:
    site.add("fastgen-two", entries={"one": "two_plugin:one", "other": "two_plugin:other"}, modules={"two_plugin": ""})
    monkeypatch.syspath_prepend(str(site.directory))
    assert [entry.plugin for entry in installed_candidate("Fastgen_Two").entries] == ["one", "other"]
    assert [entry.value for entry in installed_candidate("other").entries] == ["two_plugin:other"]
    assert installed_candidate("one").roots == (site.directory / "two_plugin.py",)
    family = installed_candidate("llama")
    assert (family.distribution, [root.name for root in family.roots]) == ("fastgen", ["llama.py"])


@pytest.mark.slow
def test_f1_plugin_that_does_not_load(tree: Path) -> None:
    edit(tree, "@fg.hookimpl", "import no_such_module\n\n\n@fg.hookimpl")
    facts = check(tree)
    assert failing(facts) == {"loads", "light"}
    assert "ModuleNotFoundError: No module named 'no_such_module'\nTraceback" in facts["loads"]["detail"]
    skipped = {found["check"] for found in facts["checks"] if found["status"] == "skip"}
    assert skipped == {"twice", "spawn", "references", "keywords", "conformance"}


@pytest.mark.slow
def test_tests_run_and_the_kit_is_missed(tree: Path) -> None:
    write(tree / "tests" / "test_foo.py", "import fastgen_foo\n\ndef test_foo():\n    assert fastgen_foo.FooConfig\n")
    facts = check(tree)
    assert failing(facts) == {"conformance"}
    assert "1 passed" in facts["tests"]["detail"]
    assert facts["conformance"]["detail"] == "no test of the conformance kit ran"
    assert "class TestMine(ModelConformance)" in facts["conformance"]["remedy"]


# ---- every rule catches its breach ---------------------------------------------------------------------------------


@pytest.fixture
def candidate(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Candidate]:
    """The tree as it stands when called."""
    return lambda: source_candidate(tree, tmp_path_factory.mktemp("work"))


@pytest.fixture
def seen(
    candidate: Callable[[], Candidate], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """What a probe sees of the tree."""
    return lambda name: probe(candidate(), name, tmp_path_factory.mktemp("probe"))


def test_f1_entry_that_loads_torch(tree: Path, candidate: Any, seen: Any) -> None:
    edit(tree, "\n\nclass FooConfig", "\nfrom fastgen_foo import parts\n\nclass FooConfig")
    write(tree / "torch.py", "Size = int")  # in the place of the real one, which takes a while
    found = light(candidate(), seen("light"))
    assert found.status == "fail"
    assert found.detail == "importing the entry module loads torch (fastgen_foo/parts.py:2)"
    assert "imported inside build" in found.remedy


def test_hook_that_loads_transformers(tree: Path, candidate: Any, seen: Any) -> None:
    edit(tree, "    return [fg.ModelSpec", "    import transformers\n    return [fg.ModelSpec")
    write(tree / "transformers.py", "")
    found = light(candidate(), seen("light"))
    assert (found.status, "loads transformers (fastgen_foo/__init__.py:" in found.detail) == ("fail", True)


def test_entry_that_opens_a_device(candidate: Any) -> None:
    found = light(candidate(), {"heavy": {}, "errors": {}, "devices": ["/dev/nvidiactl"]})
    assert (found.status, "opens /dev/nvidiactl" in found.detail) == ("fail", True)


def test_light_plugin_is_light(candidate: Any, seen: Any) -> None:
    assert light(candidate(), seen("light")).status == "pass"


def test_core_is_imported_by_a_module_deep_inside(tree: Path, candidate: Any) -> None:
    assert [found.status for found in sources(candidate())] == ["pass"]
    write(tree / "fastgen_foo" / "deep" / "er.py", "def f():\n    from fastgen.core import engine\n")
    write(
        tree / "fastgen_foo" / "tests" / "test_a.py", "from fastgen.testing import TINY\nimport fastgen.core.engine\n"
    )
    write(tree / "fastgen_foo" / "torn.py", "def f(:\n")
    (found,) = sources(candidate())
    assert found.status == "fail"
    assert found.detail == (
        "fastgen_foo/deep/er.py:2 imports fastgen.core; fastgen_foo/tests/test_a.py:2 imports fastgen.core.engine; "
        "fastgen_foo/torn.py:1 is not Python: invalid syntax"
    )


@pytest.mark.slow
def test_plugin_that_counts_its_calls(tree: Path, seen: Any) -> None:
    assert twice(seen("registry")["plugins"]).status == "pass"
    edit(tree, "@fg.hookimpl", "COUNT = []\n\n\n@fg.hookimpl")
    edit(
        tree, "    return [fg.ModelSpec((", '    COUNT.append("X" * len(COUNT))\n    return [fg.ModelSpec((COUNT[-1] + '
    )
    found = twice(seen("registry")["plugins"])
    assert (found.status, "XFooForCausalLM" in found.detail) == ("fail", True)


@pytest.mark.slow
def test_plugin_that_is_another_one_in_a_spawned_process(tree: Path, seen: Any) -> None:
    assert spawn(seen("registry")).status == "pass"
    child = "import multiprocessing\nif multiprocessing.parent_process():\n    raise OSError('child')\n@fg.hookimpl"
    edit(tree, "@fg.hookimpl", child)
    found = spawn(seen("registry"))
    assert (found.status, "only in the parent: foo fastgen-foo==1.2" in found.detail) == ("fail", True)


@pytest.mark.slow
def test_reference_to_nothing(tree: Path, seen: Any) -> None:
    edit(tree, "FooConfig, build, fg.DECODER_WEIGHTS", 'FooConfig, "fastgen_foo.parts:biuld", fg.DECODER_WEIGHTS')
    found = references(seen("references"))
    assert (found.status, "biuld" in found.detail) == ("fail", True)


def test_keywords_that_name_no_architecture(tree: Path, candidate: Any) -> None:
    assert keywords(candidate(), ["FooForCausalLM"]).status == "pass"
    assert keywords(candidate(), []).status == "skip"
    edit(tree, 'keywords = ["FooForCausalLM"]', 'keywords = ["foo"]', "pyproject.toml")
    found = keywords(candidate(), ["FooForCausalLM"])
    assert (found.status, found.remedy) == ("fail", 'write keywords = ["FooForCausalLM"] in pyproject.toml')


@pytest.mark.parametrize(
    ("dependencies", "detail"),
    [
        ('"torch"', "does not require fastgen"),
        ('"fastgen"', "of any version"),
        ('"fastgen>=0.1"', "with no upper bound"),
        ('"fastgen>=0.1,!=0.1.5"', "with no upper bound"),
        ('"fastgen>=7,<8"', "requires fastgen >=7,<8, and this is"),
        ('"fastgen=1"', "cannot be read"),
    ],
)
def test_version_bounds(tree: Path, candidate: Any, dependencies: str, detail: str) -> None:
    assert version_bounds(candidate()).status == "pass"
    edit(tree, '"fastgen>=0.1,<0.2"', dependencies, "pyproject.toml")
    found = version_bounds(candidate())
    assert (found.status, detail in found.detail) == ("fail", True)
    assert found.remedy == 'write dependencies = ["fastgen>=0.1,<0.2"] in pyproject.toml'


def test_f1_plugin_that_ends_the_process(tree: Path, seen: Any) -> None:
    edit(tree, "@fg.hookimpl", "import os\nos._exit(3)\n\n\n@fg.hookimpl")
    (found,) = loads(seen("registry"))
    assert (found.status, "ended with exit code 3" in found.detail) == ("fail", True)


@pytest.mark.slow
def test_clash_with_a_built_in_is_seen(tree: Path, seen: Any) -> None:
    edit(tree, '"FooForCausalLM"', '"LlamaForCausalLM"')
    assert seen("registry")["plugins"]["foo"]["clashes"] == [["LlamaForCausalLM", "clashes with llama"]]


# ---- its tests -----------------------------------------------------------------------------------------------------


def test_plugin_without_tests_is_told_what_to_write(candidate: Any, tmp_path: Path) -> None:
    findings, _ = check_conformance(candidate(), ["FooForCausalLM"], tmp_path)
    assert [(found.check, found.status) for found in findings] == [("tests", "fail")]
    assert "class TestMine(ModelConformance)" in findings[0].remedy


@pytest.mark.slow
def test_failing_tests_show_how(tree: Path, candidate: Any, tmp_path: Path) -> None:
    write(tree / "tests" / "test_foo.py", "def test_foo():\n    assert 'this' == 'that'\n")
    findings, _ = check_conformance(candidate(), [], tmp_path)
    assert [(found.check, found.status) for found in findings] == [("tests", "fail"), ("conformance", "skip")]
    assert "assert 'this' == 'that'" in findings[0].detail


CHECKS = {"prefill": "pass", "fault: gate and up swapped": "pass"}


@pytest.mark.parametrize(
    ("checks", "complete", "status", "detail"),
    [
        (CHECKS, True, "pass", "1/1 faults"),
        (CHECKS, False, "fail", "partial"),
        ({**CHECKS, "decode": "fail"}, True, "fail", "failed: decode[plain]"),
        ({"prefill": "pass"}, True, "fail", "0/0 faults"),
    ],
)
def test_reports(checks: dict[str, str], complete: bool, status: str, detail: str) -> None:
    report = Conformance("fastgen_foo", complete=complete, cases={"plain": Case("FooForCausalLM", checks)})
    (found,) = judge({"fastgen_foo": report}, ["FooForCausalLM"])
    assert (found.status, detail in found.detail) == (status, True)
    (*_, untested) = judge({"fastgen_foo": report}, ["FooForCausalLM", "BarForCausalLM"])
    assert (untested.status, untested.detail) == ("fail", "no case for BarForCausalLM")


# ---- reading sources -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from fastgen import api as fg\nfg.Decoder", []),
        ("import fastgen.api as fg", []),
        ("import fastgen.api\nfastgen.api.Decoder", []),
        ("from fastgen.api import ModelSpec", []),
        ("from fastgen.api import *", []),
        ("from . import core\nfrom .fastgen import core", []),
        ('"""Speaks of fastgen.core.engine."""', []),
        ('logging.getLogger("fastgen.foo")\nprint("fastgen.")', []),
        ('fg.ModelSpec(("A",), "fastgen_foo.config:C", "fastgen_foo:build", fg.WEIGHTS)', []),
        ("import fastgen", ["imports fastgen"]),
        ("import fastgen.core.layers as l", ["imports fastgen.core.layers"]),
        ("from fastgen import core", ["imports fastgen.core"]),
        ("from fastgen import api, types", ["imports fastgen.types"]),
        ("from fastgen import pipeline", ["uses fastgen.pipeline"]),
        ("from fastgen.core import engine", ["imports fastgen.core"]),
        ("import fastgen.api\nfastgen.core.engine", ["imports fastgen.core"]),
        ('import_module("fastgen.core.engine")', ["imports fastgen.core.engine"]),
        ('__import__("fastgen.kernels")', ["imports fastgen.kernels"]),
        ('importlib.import_module(name="fastgen.types")', ["imports fastgen.types"]),
        ('fg.ModelSpec(("A",), "fastgen.models.llama:LlamaConfig", b, w)', ["imports fastgen.models.llama"]),
        ('sys.modules["fastgen.core"]', ["imports fastgen.core"]),
        ("if TYPE_CHECKING:\n    from fastgen.core.engine import Engine", ["imports fastgen.core.engine"]),
        ("from fastgen.testing import TINY", ["imports fastgen.testing"]),
        ("from fastgen import api as fg\nfg.Decodr", ["uses fastgen.api.Decodr, which is not there. Did you mean"]),
        ("from fastgen.api import Decodr", ["uses fastgen.api.Decodr, which is not there. Did you mean"]),
    ],
)
def test_source_rules(source: str, found: list[str]) -> None:
    seen = [what for _, what in offences(source.encode())]
    assert len(seen) == len(found)
    for one, other in zip(seen, found, strict=True):
        assert one == other or ("Did you mean" in other and one.startswith(other))


def test_tests_may_use_the_kit_and_what_users_use() -> None:
    source = b"import fastgen\nfrom fastgen.testing import TINY\nfastgen.pipeline\nimport fastgen.core"
    assert offences(source, is_test=True) == [(4, "imports fastgen.core")]


# ---- what is no plugin ---------------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["plugins", "check", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    return result.stderr


def test_what_is_not_installed_is_refused_with_the_nearest_name() -> None:
    assert "no plugin 'lama' is installed. Did you mean 'llama'" in refused("lama")


def test_trees_that_are_no_plugin(tmp_path: Path) -> None:
    assert "there is no directory" in refused(f"{tmp_path}/nothing")
    assert "has no pyproject.toml" in refused(str(tmp_path))
    write(tmp_path / "pyproject.toml", "[project")
    assert "cannot be read" in refused(str(tmp_path))
    write(tmp_path / "pyproject.toml", "[tool.x]")
    assert "no [project] table with a name" in refused(str(tmp_path))
    write(tmp_path / "pyproject.toml", '[project]\nname = "fastgen-foo"\n[project.entry-points.fastgne]\nfoo = "x"')
    text = refused(str(tmp_path))
    assert "no entry point in the group 'fastgen'. Did you mean 'fastgne'?" in text
    assert '[project.entry-points.fastgen]\n  foo = "fastgen_foo"' in text
    write(tmp_path / "pyproject.toml", '[project]\nname = "fastgen-foo"\ndynamic = ["dependencies"]')
    assert "computes dependencies when it is built" in refused(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('name = "../../fastgen-foo"', "name is '../../fastgen-foo'; write letters"),
        ('name = ""', "name is ''; write letters"),
        ("version = 1.2", "version is 1.2; write a version"),
        ('version = "../1"', "version is '../1'; write a version"),
        ('dependencies = "fastgen>=0.1"', "dependencies is 'fastgen>=0.1'; write a list of strings"),
        ("dependencies = [5]", "dependencies is [5]; write a list of strings"),
        ('keywords = "FooForCausalLM"', "keywords is 'FooForCausalLM'; write a list of strings"),
        ('keywords = ["Foo\\nName: llama"]', "write a list of strings"),
        ("dynamic = 5", "dynamic is 5; write a list of strings"),
        ('foo = "fastgen-foo"', "'foo' = 'fastgen-foo' is no entry point"),
        ('foo = ""', "'foo' = '' is no entry point"),
        ('"foo = x" = "fastgen_foo"', "'foo = x' = 'fastgen_foo' is no entry point"),
        ("foo = 5", "no entry point in the group 'fastgen'. Write"),
    ],
)
def test_project_tables_that_say_something_else(tree: Path, line: str, text: str) -> None:
    key = "foo" if "foo = x" in line else line.partition(" ")[0]
    lines = dedent(PROJECT).splitlines()
    kept = [old for old in lines if not old.startswith(f"{key} = ")]
    table = "[project.entry-points.fastgen]" if key == "foo" else "[project]"
    kept.insert(kept.index(table) + 1, line)
    write(tree / "pyproject.toml", "\n".join(kept))
    assert text in refused(str(tree))


@pytest.mark.parametrize("tables", ["build = 5", "targets = []", "targets.wheel.packages = 5", "targets.wheel = 'x'"])
def test_build_tables_are_the_build_tools_to_judge(tree: Path, candidate: Any, tables: str) -> None:
    head = "[tool.hatch]" if tables.startswith("build") else "[tool.hatch.build]"
    edit(tree, "[project]", f"{head}\n{tables}\n\n[project]", "pyproject.toml")
    assert [root.name for root in candidate().roots] == ["fastgen_foo"]


def test_files_that_are_none(tree: Path, candidate: Any) -> None:
    (tree / "fastgen_foo" / "folder.py").mkdir()
    (found,) = sources(candidate())
    assert found.status == "pass"
    (tree / "fastgen_foo" / "lost.py").symlink_to("nowhere.py")
    (found,) = sources(candidate())
    assert (found.status, found.detail) == ("fail", "fastgen_foo/lost.py:1 cannot be read: No such file or directory")


def test_plugin_that_never_ends(tree: Path, candidate: Any, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen.cli.plugins.candidate.TIMEOUT", 2)
    edit(tree, "@fg.hookimpl", "import time\ntime.sleep(60)\n\n\n@fg.hookimpl")
    (found,) = loads(seen("registry"))
    assert (found.status, "took more than 2 s" in found.detail) == ("fail", True)


@pytest.mark.slow
def test_plugin_that_ends_the_process_the_second_time(tree: Path, seen: Any) -> None:
    edit(tree, "@fg.hookimpl", "COUNT = []\n\n\n@fg.hookimpl")
    edit(tree, "    return [", "    COUNT.append(1)\n    if len(COUNT) > 1:\n        raise SystemExit(4)\n    return [")
    found = twice(seen("registry")["plugins"])
    assert (found.status, found.detail) == ("fail", "foo: it called sys.exit(4)")
