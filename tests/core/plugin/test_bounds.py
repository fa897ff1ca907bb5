"""Version bounds, read without the packaging library where they are plain: packaging itself is the measure."""

from __future__ import annotations

import itertools

import pytest
from packaging.specifiers import SpecifierSet

from fastgen.core.plugin.bounds import admits, bounds, current_bounds

VERSIONS = (
    "0",
    "0.1",
    "0.1.0",
    "0.1.1",
    "0.2",
    "0.10",
    "1",
    "1.0.0",
    "1.0.1",
    "2.0",
    "10",
    "0.1rc1",
    "0.2.dev3",
    "1.0.post1",
)
OPERATORS = (">=", "<=", "<", ">", "==", "!=", "~=")


def test_admits_as_packaging_does() -> None:
    for operator, bound, version in itertools.product(OPERATORS, VERSIONS, VERSIONS):
        if operator == "~=" and bound.count(".") == 0:
            continue  # not a specifier
        text = f"{operator}{bound}"
        assert admits(text, version) == SpecifierSet(text).contains(version, prereleases=True), (text, version)
    for low, high, version in itertools.product(VERSIONS, repeat=3):
        text = f">={low}, <{high}"
        assert admits(text, version) == SpecifierSet(text).contains(version, prereleases=True), (text, version)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], None),
        (["torch", "fastgen-foo>=1", "fastgen_foo", "fastgenx"], None),
        (["fastgen"], ""),
        (["FastGen>=0.1,<0.2"], ">=0.1,<0.2"),
        (["fastgen (>=0.1,<0.2)"], ">=0.1,<0.2"),
        (["fastgen>=0.1", "fastgen<0.2"], ">=0.1,<0.2"),
        (["fastgen ~= 0.1"], "~=0.1"),
        (["fastgen[testing]>=0.1; extra == 'testing'"], None),
        (['fastgen[testing]; extra == "dev"', "fastgen>=0.1"], ">=0.1"),
        (["fastgen[server]>=0.1"], ">=0.1"),
        (["fastgen>=9; python_version < '3'"], None),
        (["fastgen>=0.1; python_version >= '3'"], ">=0.1"),
    ],
)
def test_bounds(lines: list[str], found: str | None) -> None:
    assert bounds(lines) == found


def test_unreadable_bounds() -> None:
    with pytest.raises(ValueError, match="fastgen"):
        bounds(["fastgen>=0.1 or so"])
    with pytest.raises(ValueError, match=r"0\.1\.x"):
        admits(">=0.1.x", "0.1")


@pytest.mark.parametrize(
    ("version", "text"),
    [("0.1.0", ">=0.1,<0.2"), ("0.9.3", ">=0.9,<0.10"), ("1.4.2", ">=1.4,<2"), ("0.2rc1", ">=0.2,<0.3")],
)
def test_current_bounds(version: str, text: str) -> None:
    assert current_bounds(version) == text
    assert admits(text, version) == (version != "0.2rc1")
