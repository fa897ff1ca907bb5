"""The pytest plugin that turns the conformance kit's results into ``conformance.json``.

``pytest_plugins = ["fastgen.testing.plugin"]`` in a test module is enough for the report of a run to be collected; the
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

__all__ = ["PROPERTY", "Collected"]

PROPERTY = "conformance"
"""The user property by which a test tells what it checked: ``{"entry", "case", "architecture", "checks", "expected"}``;
``checks`` holds ``{check: outcome}`` (the test's own among them, as ``""``), ``expected`` the tests that a complete run
has."""


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
    config.pluginmanager.register(Collected(), "fastgen-conformance-collected")


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist: its results go to the one that started it
        return
    collected = config.pluginmanager.get_plugin("fastgen-conformance-collected")
    if collected is None or not collected.entries:
        return
    found = list(collected.reports())
    if path := config.getoption("--conformance-json", default=None):
        write_report(path, found)
    if config.getoption("--conformance-beside", default=False):
        for path, reports in _by_path(found).items():
            write_report(path, reports, keep=True)


def _by_path(found: list[Conformance]) -> dict[Path, list[Conformance]]:
    paths: dict[Path, list[Conformance]] = {}
    for one in found:
        path = conformance_path(one.entry)
        if path is None:
            raise pytest.UsageError(f"--conformance-beside: the entry {one.entry!r} is in no file to lie beside")
        paths.setdefault(path, []).append(one)
    return paths


class Collected:
    """What the tests of the kit have told so far, by entry, case and check."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Case]] = {}
        self._expected: dict[tuple[str, str], set[str]] = {}
        self._ran: dict[tuple[str, str], set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, told in report.user_properties:
            if name == PROPERTY and (report.when == "call" or report.failed):
                self.add(told, report.outcome)

    def add(self, told: dict[str, Any], outcome: str) -> None:
        """One test's account; its own outcome is pytest's, whatever it had told before it failed."""
        entry, case = told["entry"], told["case"]
        cases = self.entries.setdefault(entry, {})
        known = cases.get(case)
        checks = dict(known.checks) if known is not None else {}
        for check, state in told["checks"].items():
            checks[check] = state
        own = told["test"]
        if outcome == "failed" and not any(told["checks"].get(check) == "fail" for check in told["checks"]):
            checks[own] = "fail"
        elif checks.get(own) != "fail":
            checks.setdefault(own, "pass")
        architecture = told["architecture"] or (known.architecture if known is not None else None)
        cases[case] = Case(architecture, checks)
        self._expected.setdefault((entry, case), set()).update(told["expected"])
        self._ran.setdefault((entry, case), set()).add(own)

    def reports(self) -> Iterator[Conformance]:
        """One for each entry."""
        for entry, cases in self.entries.items():
            record = _record(entry)
            yield Conformance(
                entry,
                record.name if record is not None else None,
                record.distribution or None if record is not None else None,
                record.version or None if record is not None else None,
                fastgen.__version__,
                _version("transformers"),
                datetime.now(UTC).isoformat(timespec="seconds"),
                all(self._expected[entry, case] <= self._ran[entry, case] for case in cases),
                cases,
            )


def _record(entry: str) -> PluginRecord | None:
    return next((r for r in registry().plugins if r.entry == entry and r.status == "loaded"), None)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


