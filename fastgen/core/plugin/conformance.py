"""What the conformance kit found about a plugin: ``conformance.json``, beside the plugin's entry module.

``fastgen.testing`` writes it, ``fastgen models`` and ``fastgen plugins check`` read it. One file may speak of several
entries, as that of the built-in families does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from fastgen.core.json_file import read_json_object
from fastgen.errors import PluginError, some

__all__ = ["SCHEMA", "Case", "Conformance", "conformance_path", "read_conformance", "read_report", "write_report"]

SCHEMA = 1
OUTCOMES = ("pass", "fail", "n.a.")
FAULT = "fault: "
"""How the names of planted faults begin among the checks."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of a family: its architecture, and ``{check: "pass", "fail" or "n.a."}``."""

    architecture: str | None
    checks: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Conformance:
    """All cases of one entry. ``plugin``, ``distribution`` and ``version`` are ``None`` if it was not installed."""

    entry: str
    plugin: str | None = None
    distribution: str | None = None
    version: str | None = None
    fastgen: str = ""
    transformers: str = ""
    date: str = ""
    complete: bool = False
    """Whether every check of the kit ran for every case."""
    cases: Mapping[str, Case] = field(default_factory=dict)
    """By name; the name ``""`` holds the checks of the plugin as a whole."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(case.architecture for case in self.cases.values() if case.architecture))

    @property
    def passed(self) -> bool:
        """Whether something was checked, and nothing failed."""
        counts = self.counts
        return counts["pass"] > 0 and counts["fail"] == 0

    @property
    def counts(self) -> dict[str, int]:
        """``{"pass": n, "fail": n, "n.a.": n}``, planted faults included."""
        return _counts(self.cases.values())

    @property
    def faults(self) -> tuple[int, int]:
        """Planted faults: ``(noticed, planted)``."""
        return _faults(self.cases.values())

    def summary(self, architecture: str | None = None) -> str:
        """One line for a person; of one architecture's cases alone, if it is given (empty where there are none)."""
        cases = {
            name: case
            for name, case in self.cases.items()
            if architecture is None or not name or case.architecture == architecture
        }
        number = sum(1 for name in cases if name)
        if not number:
            return ""
        failed = [
            f"{check}[{name}]" if name else check
            for name, case in cases.items()
            for check, outcome in case.checks.items()
            if outcome == "fail"
        ]
        if failed:
            return f"failed: {some(failed, most=3)}"
        noticed, planted = _faults(cases.values())
        return (
            f"{'passed' if self.complete else 'partial'} ({number} case{'s' if number != 1 else ''}, "
            f"{noticed}/{planted} faults)"
        )

    def as_json(self) -> dict[str, Any]:
        """The entry as it stands in the file."""
        noticed, planted = self.faults
        return {
            "plugin": self.plugin,
            "distribution": self.distribution,
            "version": self.version,
            "fastgen": self.fastgen,
            "transformers": self.transformers,
            "date": self.date,
            "architectures": list(self.architectures),
            "complete": self.complete,
            "passed": self.passed,
            "counts": self.counts,
            "faults": {"planted": planted, "caught": noticed},
            "cases": {
                name: {"architecture": case.architecture, "checks": dict(case.checks)}
                for name, case in self.cases.items()
            },
        }


def _counts(cases: Iterable[Case]) -> dict[str, int]:
    counts = dict.fromkeys(OUTCOMES, 0)
    for case in cases:
        for outcome in case.checks.values():
            counts[outcome] += 1
    return counts


def _faults(cases: Iterable[Case]) -> tuple[int, int]:
    planted = [o for case in cases for check, o in case.checks.items() if check.startswith(FAULT) and o != "n.a."]
    return planted.count("pass"), len(planted)


def conformance_path(entry: str) -> Path | None:
    """Where the report of an entry (``module`` or ``module:attribute``) lies: in its package, beside the module; of a
    module that is in no package, ``MODULE.conformance.json``. ``None``: there is no such module in a file."""
    module = entry.partition(":")[0]
    try:
        spec = util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    origin = Path(spec.origin)
    alone = "." not in module and spec.submodule_search_locations is None
    return origin.with_name(f"{module}.conformance.json" if alone else "conformance.json")


def read_conformance(entry: str) -> Conformance | None:
    """The report that lies beside an entry's module; ``None`` where there is none, or it does not speak of it.

    Raises:
        PluginError: the file is damaged.
    """
    path = conformance_path(entry)
    return read_report(path).get(entry) if path is not None and path.is_file() else None


def read_report(path: str | Path) -> dict[str, Conformance]:
    """All entries of a report.

    Raises:
        PluginError: it cannot be read, or is no report of a known schema.
    """
    path = Path(path)
    content = read_json_object(path, error=PluginError)
    if content.get("schema") != SCHEMA:
        raise PluginError(
            f"{path} is a conformance report of schema {content.get('schema')!r}, this fastgen reads {SCHEMA}; "
            "run the conformance kit again"
        )
    try:
        return {str(entry): _entry(str(entry), fields) for entry, fields in content["plugins"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PluginError(
            f"{path} is a damaged conformance report ({type(error).__name__}: {error}); run the kit again"
        ) from None


def _entry(entry: str, fields: Mapping[str, Any]) -> Conformance:
    cases = {}
    for name, case in fields["cases"].items():
        checks = {str(check): str(outcome) for check, outcome in case["checks"].items()}
        if unknown := set(checks.values()) - set(OUTCOMES):
            raise ValueError(f"the outcome {min(unknown)!r}")
        cases[str(name)] = Case(_text(case["architecture"]), checks)
    return Conformance(
        entry,
        _text(fields["plugin"]),
        _text(fields["distribution"]),
        _text(fields["version"]),
        str(fields["fastgen"]),
        str(fields["transformers"]),
        str(fields["date"]),
        fields["complete"] is True,
        cases,
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def write_report(path: str | Path, found: Iterable[Conformance], *, keep: bool = False) -> None:
    """Write a report, or, with ``keep``, replace these entries in the one that is there.

    Raises:
        PluginError: the one that is there is damaged.
        OSError: it cannot be written.
    """
    path = Path(path)
    entries = read_report(path) if keep and path.is_file() else {}
    entries |= {one.entry: one for one in found}
    content = {"schema": SCHEMA, "plugins": {entry: entries[entry].as_json() for entry in sorted(entries)}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
