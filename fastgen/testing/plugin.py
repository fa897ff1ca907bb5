"""The pytest plugin that turns the conformance kit's results into ``conformance.json``.

``pytest_plugins = ["fastgen.testing.plugin"]`` in a test module is enough for a run's results to be collected; the
options below exist when pytest loads it early, by ``-p fastgen.testing.plugin``. Works under pytest-xdist.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen.core.plugin import PluginRecord, registry
from fastgen.core.plugin.conformance import Case, Conformance, conformance_path, write_report
from fastgen.errors import PluginError

__all__ = ["PROPERTY", "Collected"]

PROPERTY = "conformance"
"""The user property by which a test tells what it checked::

    {"entry", "class", "case", "architecture", "test": its own check, "checks": {other check: outcome},
     "expected": [the tests a complete run of the case has]}
"""
_COLLECTED = "fastgen-conformance-collected"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastgen", "conformance of fastgen plugins")
    group.addoption("--conformance-json", metavar="PATH", help="write what the conformance kit found to this file")
    group.addoption(
        "--conformance-beside",
        action="store_true",
        help="write it as conformance.json beside each plugin's entry module, to be shipped with it",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: more than a moment")
    config.pluginmanager.register(Collected(), _COLLECTED)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    collected = config.pluginmanager.get_plugin(_COLLECTED)
    # A worker of pytest-xdist sends its results to the one that started it.
    if hasattr(config, "workerinput") or collected is None or not collected.entries:
        return
    found = list(collected.reports())
    try:
        if path := config.getoption("--conformance-json", default=None):
            write_report(path, found)
        if config.getoption("--conformance-beside", default=False):
            for beside, reports in _by_path(found).items():
                write_report(beside, reports, keep=True)
    except (PluginError, OSError) as error:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"the conformance report was not written: {error}", red=True)


def _by_path(found: list[Conformance]) -> dict[Path, list[Conformance]]:
    paths: dict[Path, list[Conformance]] = {}
    for one in found:
        path = conformance_path(one.entry)
        if path is None:
            raise PluginError(f"the entry {one.entry!r} is in no file that it could lie beside")
        paths.setdefault(path, []).append(one)
    return paths


class Collected:
    """What the tests of the kit have told so far, by entry and case."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Case]] = {}
        self._owner: dict[tuple[str, str], str] = {}
        self._missing: dict[tuple[str, str], set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, told in report.user_properties:
            if name == PROPERTY and isinstance(told, dict) and (report.when == "call" or report.failed):
                self.add(told, failed=report.failed)

    def add(self, told: dict[str, Any], *, failed: bool) -> None:
        """One test's account. What failed once stays so, whatever comes later."""
        entry, case, test = told["entry"], told["case"], told["test"]
        if case and self._owner.setdefault((entry, case), told["class"]) != told["class"]:
            case = f"{told['class']}: {case}"  # two classes of tests for one plugin use the name
        cases = self.entries.setdefault(entry, {})
        known = cases.get(case, Case(None, {}))
        checks = dict(known.checks)
        own = {test: "fail" if failed else told["checks"].get(test, "pass")}
        for check, outcome in {**told["checks"], **own}.items():
            if checks.get(check) != "fail":
                checks[check] = outcome
        cases[case] = Case(told["architecture"] or known.architecture, checks)
        self._missing.setdefault((entry, case), set(told["expected"])).discard(test)

    def reports(self) -> Iterator[Conformance]:
        """One for each entry."""
        for entry, cases in self.entries.items():
            record = _record(entry)
            yield Conformance(
                entry,
                plugin=None if record is None else record.name,
                distribution=None if record is None else record.distribution,
                version=None if record is None else record.version,
                fastgen=fastgen.__version__,
                transformers=_version("transformers"),
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                complete=not any(self._missing[entry, case] for case in cases),
                cases=cases,
            )


def _record(entry: str) -> PluginRecord | None:
    """The installed plugin of this entry."""
    return next((r for r in registry().plugins if r.entry == entry and r.status == "loaded" and not r.in_process), None)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
