"""The versions of fastgen that a distribution says it works with."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["admits", "bounds", "current_bounds"]

_OURS = re.compile(r"\s*fastgen\b(?![-_.]\w)", re.IGNORECASE)
_EXTRA_ONLY = re.compile(r"""[^;]*;\s*extra\s*==\s*(['"])[^'"]*\1\s*""")
_PLAIN_LINE = re.compile(r"\s*fastgen\s*\(?([\d.,<>=\s]*)\)?\s*", re.IGNORECASE)
_CLAUSE = re.compile(r"\s*(>=|<=|<|>)\s*(\d+(?:\.\d+)*)\s*")
_RELEASE = re.compile(r"\d+(?:\.\d+)*")


def bounds(requires: Iterable[str]) -> str | None:
    """The version specifiers on fastgen among a distribution's ``Requires-Dist`` lines, joined by commas: ``""`` where
    it is named without any, ``None`` where it is not named. Lines for an extra, or another platform, do not count.

    Raises:
        ValueError: a line on fastgen that is no requirement.
    """
    found: list[str] | None = None
    for line in requires:
        if not _OURS.match(line) or _EXTRA_ONLY.fullmatch(line):
            continue  # also spares parsing what other packages' requirements look like
        if (plain := _PLAIN_LINE.fullmatch(line)) is not None:
            specifier = plain[1].strip()
        else:
            from packaging.requirements import Requirement

            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            specifier = str(requirement.specifier)
        found = [*(found or ()), *([specifier] if specifier else [])]
    return None if found is None else ",".join(found)


def admits(specifier: str, version: str) -> bool:
    """Whether ``version`` is within the ``specifier``, pre-releases counted.

    Raises:
        ValueError: it is no specifier.
    """
    clauses = [_CLAUSE.fullmatch(part) for part in specifier.split(",")] if specifier else []
    if None in clauses or not _RELEASE.fullmatch(version):
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(specifier).contains(version, prereleases=True)
    # What nearly every plugin writes; importing packaging would be a fifth of the time that `fastgen models` takes.
    return all(_holds(clause[1], _release(version), _release(clause[2])) for clause in clauses if clause is not None)


def _release(version: str) -> tuple[int, ...]:
    """Trailing zeros do not count: 1.0 is 1."""
    return tuple(int(part) for part in re.sub(r"(\.0+)+$", "", version).split("."))


def _holds(operator: str, version: tuple[int, ...], bound: tuple[int, ...]) -> bool:
    if operator == ">=":
        return version >= bound
    if operator == "<=":
        return version <= bound
    return version > bound if operator == ">" else version < bound


def current_bounds(version: str) -> str:
    """What a plugin written for ``version`` should require: that minor series, or from 1.0 on that major one."""
    major, minor = (int(part) for part in re.findall(r"\d+", version)[:2])
    return f">={major}.{minor},<{f'0.{minor + 1}' if major == 0 else major + 1}"
