"""The conformance of a plugin: its own tests, run with pytest, and what the kit reports of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path

import click

from fastgen.cli.plugins.candidate import Candidate
from fastgen.cli.plugins.findings import Finding, failed, passed, skipped, warned
from fastgen.core.plugin.conformance import Conformance, read_conformance, read_report
from fastgen.core.plugin.loader import normalise
from fastgen.errors import PluginError

__all__ = ["check_conformance", "judge"]

TAIL = 30
"""Lines of pytest's summary, or else of its output, that are shown when it fails."""
WRITE_ONE = """\
write tests/test_conformance.py:
  from fastgen.testing import ModelConformance
  pytest_plugins = ["fastgen.testing.plugin"]
  class TestMine(ModelConformance):
      entry = "MODULE"
      hf_config = {"model_type": ...}   # small, as transformers' config class takes it"""


def check_conformance(
    candidate: Candidate, architectures: Sequence[str], workspace: Path
) -> tuple[list[Finding], dict[str, Conformance]]:
    """Run the tests of a source tree, or read the report that an installed plugin came with.

    Returns:
        What was found, and the kit's reports by entry.
    """
    tests = candidate.tests()
    own = normalise(candidate.distribution) == "fastgen"  # the tests of the whole project are not those of one family
    if candidate.tree is None or own:
        return _shipped(candidate, architectures)
    if not tests:
        return [failed("tests", "there is no tests folder, and no test_*.py", WRITE_ONE)], {}
    if util.find_spec("pytest") is None:
        return [failed("tests", "pytest is not installed", "pip install pytest, or --skip-conformance")], {}
    report = workspace / "conformance.json"
    click.echo(f"running the tests of {candidate.distribution} ...", err=True)
    run = _pytest(candidate, tests, report)
    try:
        found = read_report(report) if report.is_file() else {}
    except PluginError as error:
        return [_tests(run), failed("conformance", str(error), "let the kit alone write its report")], {}
    return [_tests(run), *judge(found, architectures, fresh=True)], found


def _pytest(candidate: Candidate, tests: Sequence[Path], report: Path) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FASTGEN_", "PYTEST_"))}
    path = os.pathsep.join([*map(str, candidate.path), *filter(None, [inherited.get("PYTHONPATH")])])
    options = ["-q", "-p", "no:cacheprovider", "-p", "fastgen.testing.plugin", f"--conformance-json={report}"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, tests)],
        cwd=candidate.tree,
        env={**inherited, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def _tests(run: subprocess.CompletedProcess[str]) -> Finding:
    lines = run.stdout.strip().splitlines()
    if run.returncode == 0:
        return passed("tests", lines[-1].strip("= ") if lines else "no output")
    if run.returncode == 5:
        return failed("tests", "pytest found no test", WRITE_ONE)
    said = [*lines, *run.stderr.strip().splitlines()]
    summary = [line for line in said if line.startswith(("FAILED ", "ERROR "))]
    shown = "\n".join([*summary[:TAIL], lines[-1]] if summary else said[-TAIL:])
    return failed(
        "tests", f"pytest ended with exit code {run.returncode}\n{shown}", "run `pytest` in the plugin's directory"
    )


def judge(found: dict[str, Conformance], architectures: Sequence[str], *, fresh: bool = True) -> list[Finding]:
    """Whether the kit's reports speak for the plugin. ``fresh``: they are of tests that ran now, and all of them."""
    if not architectures:
        return [skipped("conformance", "it claims no architecture by name")]
    if not found:
        return [failed("conformance", "no test of the conformance kit ran", WRITE_ONE)]
    findings = []
    for entry, one in found.items():
        noticed, planted = one.faults
        text = f"{entry}: {one.summary() or 'no cases'}"
        if not one.passed:
            findings.append(failed("conformance", text, "the tests' output says what differs, and where"))
        elif not one.complete:
            remedy = "run the whole file: some of the kit's tests were left out (-m, -k or skipped)"
            findings.append(failed("conformance", text, remedy) if fresh else warned("conformance", text, remedy))
        elif noticed < planted or not planted:
            remedy = "a fault nobody notices means that the case does not reach that part: make it larger, or say why"
            findings.append(failed("conformance", text, remedy))
        else:
            findings.append(passed("conformance", text))
    tested = {name for one in found.values() for name in one.architectures}
    untested = [name for name in architectures if name not in tested]
    if untested:
        findings.append(
            failed("conformance", f"no case for {', '.join(untested)}", "add one to hf_config for every architecture")
        )
    return findings


def _shipped(candidate: Candidate, architectures: Sequence[str]) -> tuple[list[Finding], dict[str, Conformance]]:
    found: dict[str, Conformance] = {}
    for entry in candidate.entries:
        try:
            report = read_conformance(entry.value)
        except PluginError as error:
            return [failed("conformance", str(error), "run the kit again, with --conformance-beside")], {}
        if report is not None:
            found[entry.value] = report
    if not architectures:
        return [skipped("conformance", "it claims no architecture by name")], found
    if not found:
        text = "its tests are not installed with it, and it came without a conformance.json"
        remedy = (
            "check its source tree; authors: `pytest -p fastgen.testing.plugin --conformance-beside` before building"
        )
        return [warned("conformance", text, remedy)], {}
    findings = judge(found, architectures, fresh=False)
    for module, report in found.items():
        if report.version != candidate.version:
            text = f"{module}: the report it came with is of version {report.version}, and this is {candidate.version}"
            findings.append(warned("conformance", text, "authors: run the kit again before building"))
    return findings, found
