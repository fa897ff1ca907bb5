"""The conformance report: read, written, kept beside its module, and told in a line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fastgen.core.plugin.conformance import (
    Case,
    Conformance,
    conformance_path,
    read_conformance,
    read_report,
    write_report,
)
from fastgen.errors import PluginError

FOO = Conformance(
    "fastgen_foo",
    plugin="foo",
    distribution="fastgen-foo",
    version="0.1.0",
    fastgen="0.1.0",
    transformers="5.24.0",
    date="2026-01-02T03:04:05+00:00",
    complete=True,
    cases={
        "plain": Case("FooForCausalLM", {"prefill": "pass", "window": "n.a.", "fault: no rope": "pass"}),
        "moe": Case("FooMoeForCausalLM", {"prefill": "pass", "fault: no rope": "n.a."}),
        "": Case(None, {"entry is light": "pass"}),
    },
)


def failing(**checks: str) -> Conformance:
    return Conformance("fastgen_foo", complete=True, cases={"plain": Case("FooForCausalLM", checks)})


def test_a_report_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "deep" / "conformance.json"
    write_report(path, [FOO])
    assert read_report(path) == {"fastgen_foo": FOO}
    content = json.loads(path.read_text())["plugins"]["fastgen_foo"]
    assert content["architectures"] == ["FooForCausalLM", "FooMoeForCausalLM"]
    assert content["passed"] is True
    assert content["counts"] == {"pass": 4, "fail": 0, "n.a.": 2}
    assert content["faults"] == {"planted": 1, "caught": 1}


def test_other_entries_are_kept_where_asked(tmp_path):
    path = tmp_path / "conformance.json"
    other = Conformance("fastgen_bar", cases={"x": Case(None, {"prefill": "pass"})})
    write_report(path, [FOO, other])
    write_report(path, [failing(prefill="fail")], keep=True)
    assert read_report(path) == {"fastgen_foo": failing(prefill="fail"), "fastgen_bar": other}
    write_report(path, [FOO])
    assert read_report(path) == {"fastgen_foo": FOO}


def test_summaries():
    assert FOO.summary() == "passed (2 cases, 1/1 faults)"
    assert FOO.summary("FooMoeForCausalLM") == "passed (1 case, 0/0 faults)"
    assert FOO.summary("Other") == ""
    assert failing(prefill="pass", **{"fault: no rope": "fail"}).summary() == "failed: fault: no rope[plain]"
    four = failing(a="fail", b="fail", c="pass", d="fail", e="fail")
    assert four.summary() == "failed: a[plain], b[plain], d[plain] and 1 more"
    assert Conformance("x", cases=FOO.cases).summary() == "partial (2 cases, 1/1 faults)"
    plugin = Conformance("x", complete=True, cases={**FOO.cases, "": Case(None, {"entry is light": "fail"})})
    assert plugin.summary("FooForCausalLM") == "failed: entry is light"


def test_nothing_checked_is_no_pass():
    assert FOO.passed
    assert not Conformance("x").passed
    assert not failing(prefill="n.a.").passed
    assert not failing(prefill="pass", chunks="fail").passed


def test_where_a_report_lies(tmp_path, monkeypatch):
    package = tmp_path / "conformed"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inside.py").touch()
    (tmp_path / "conformed_alone.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    beside = package / "conformance.json"
    assert conformance_path("conformed") == conformance_path("conformed.inside:thing") == beside
    assert conformance_path("conformed_alone") == tmp_path / "conformed_alone.conformance.json"
    assert conformance_path("conformed_nowhere") is None
    assert conformance_path("conformed.nowhere.deep") is None
    assert conformance_path("sys") is None

    assert read_conformance("conformed") is None
    write_report(beside, [Conformance("conformed", cases=FOO.cases)])
    found = read_conformance("conformed")
    assert found is not None
    assert found.cases == FOO.cases
    assert read_conformance("conformed.inside") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"schema": 2, "plugins": {}}', "of schema 2, this fastgen reads 1; run the conformance kit again"),
        ('{"plugins": {}}', "of schema None"),
        ('{"schema": 1}', "damaged conformance report .KeyError: 'plugins'"),
        ('{"schema": 1, "plugins": []}', "damaged conformance report"),
        ('{"schema": 1, "plugins": {"x": {"cases": {}}}}', "damaged conformance report"),
        (
            '{"schema": 1, "plugins": {"x": {"cases": {"a": {"architecture": null, "checks": {"b": "so so"}}}}}}',
            "so so",
        ),
    ],
)
def test_damaged_reports_are_refused(tmp_path, content, message):
    path = tmp_path / "conformance.json"
    path.write_text(content)
    with pytest.raises(PluginError, match=message):
        read_report(path)
    with pytest.raises(PluginError):
        write_report(path, [FOO], keep=True)
    assert path.read_text() == content


def test_reading_is_light():
    code = (
        "import sys; import fastgen.core.plugin.conformance; "
        "print(*(n for n in ('torch', 'transformers', 'pytest', 'pydantic') if n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
