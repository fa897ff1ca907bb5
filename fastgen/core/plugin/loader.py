"""Finds the installed plugins and loads each by itself: one that breaks leaves a record and hurts no other."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import util
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import Literal

import fastgen
from fastgen.core.plugin.bounds import admits, bounds
from fastgen.core.plugin.describe import describe_error, format_error
from fastgen.core.plugin.hooks import PROJECT, collect
from fastgen.core.plugin.specs import Spec
from fastgen.errors import ConfigError, PluginError, did_you_mean

__all__ = [
    "PluginRecord",
    "discover",
    "distribution_name",
    "likely_architectures",
    "load",
    "load_all",
    "normalise",
    "selection",
]

GROUP = "fastgen"
"""The entry-point group. The entry is a light module: importing it loads no torch."""

Status = Literal["loaded", "failed", "disabled"]


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin. ``specs`` is empty unless it is loaded."""

    name: str
    distribution: str
    """Empty for a plugin registered in this process only."""
    version: str
    status: Status
    entry: str
    """The entry point's value: ``module`` or ``module:attribute``."""
    error: str | None = None
    """Why it failed, or what disabled it; one line."""
    traceback: str | None = None
    specs: tuple[Spec, ...] = ()
    architectures: tuple[str, ...] = ()
    """Those it serves; those of a plugin that is not loaded as far as they are known without it: what it returned
    before it failed, the keywords of its distribution, and the names in its source."""

    @property
    def in_process(self) -> bool:
        return not self.distribution

    @property
    def label(self) -> str:
        """``'name' (distribution version)``"""
        return f"{self.name!r} ({f'{self.distribution} {self.version}' if self.distribution else 'in this process'})"


def normalise(name: str) -> str:
    """A distribution's name in the form in which two spellings of it are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def discover() -> list[EntryPoint]:
    """All entry points of the group, of the first distribution of each name on ``sys.path``, sorted by name."""
    found: dict[str, list[EntryPoint]] = {}
    for distribution in distributions():
        try:
            points = list(distribution.entry_points.select(group=GROUP))
            name = normalise(distribution.name) if points else ""
        except Exception:  # unreadable metadata, of whatever package: it cannot be a plugin of ours
            continue
        if points:
            found.setdefault(name, points)
    return sorted(
        (p for points in found.values() for p in points), key=lambda p: (p.name, distribution_name(p), p.value)
    )


def selection(text: str) -> list[str]:
    """The names in a comma-separated list."""
    return [name for part in text.split(",") if (name := part.strip())]


def load_all(
    points: Sequence[EntryPoint], *, allow: Iterable[str] | None, block: Iterable[str], strict: bool
) -> tuple[list[PluginRecord], list[str]]:
    """A record for every entry point, and warnings about names in ``allow`` and ``block`` that mean nothing.

    A name in the lists is a plugin's or a distribution's. ``allow`` ``None`` allows all.

    Raises:
        PluginError: ``strict``, and a plugin is broken.
    """
    warnings = _check_lists(points, allow, block)
    allowed = None if allow is None else {normalise(name) for name in allow}
    blocked = {normalise(name) for name in block}
    wanted: list[EntryPoint] = []
    records: list[PluginRecord] = []
    for point in points:
        names = {normalise(point.name), normalise(distribution_name(point))}
        if names & blocked:
            records.append(_record(point, "disabled", error="disabled by FASTGEN_DISABLE_PLUGINS"))
        elif allowed is not None and not names & allowed:
            records.append(_record(point, "disabled", error="not in the list FASTGEN_PLUGINS"))
        else:
            wanted.append(point)
    seen: set[tuple[str, str]] = set()
    for point in wanted:
        if (point.name, point.value) in seen:  # the same thing named twice by one distribution
            continue
        seen.add((point.name, point.value))
        record = load(point, _same_name(point, wanted))
        if strict and record.status == "failed":
            raise PluginError(f"plugin {record.label} is broken: {record.error}\n{record.traceback or ''}".rstrip())
        records.append(record)
    return records, warnings


def load(point: EntryPoint, rivals: Sequence[EntryPoint] = ()) -> PluginRecord:
    """Load one plugin: check the version of fastgen it asks for, import it, call its hooks, check its specs.

    ``rivals``: other distributions' entry points of the same name. A plugin's name is how people allow, block, pin
    and override it, so it must be unique: fastgen's own plugins keep theirs, and of two strangers neither is loaded.
    """
    specs: list[Spec] = []
    try:
        _check_rivals(point, rivals)
        _check_version(point)
        if not EntryPoint.pattern.match(point.value):
            raise PluginError(f"its entry point says {point.value!r}; it must say 'module' or 'module:attribute'")
        collect(point.load(), point.name, specs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, and whatever a native extension throws
        trace = None if isinstance(error, PluginError) and error.__cause__ is None else format_error(error)
        return _record(point, "failed", error=describe_error(error), traceback=trace, architectures=_claimed(specs))
    return _record(point, "loaded", specs=tuple(specs), architectures=_claimed(specs))


def _record(
    point: EntryPoint,
    status: Status,
    *,
    error: str | None = None,
    traceback: str | None = None,
    specs: tuple[Spec, ...] = (),
    architectures: tuple[str, ...] = (),
) -> PluginRecord:
    version = _version(point.dist) if point.dist is not None else "?"
    return PluginRecord(
        point.name, distribution_name(point), version, status, point.value, error, traceback, specs, architectures
    )


def _claimed(specs: Iterable[Spec]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for spec in specs for name in getattr(spec, "architectures", ())))


def distribution_name(point: EntryPoint) -> str:
    """``"?"`` where it is not known."""
    return _name(point.dist) if point.dist is not None else "?"


# Kept, since each reading of a distribution's field parses its whole metadata.


@cache
def _name(distribution: Distribution) -> str:
    return distribution.name or "?"


@cache
def _bounds(distribution: Distribution) -> str | None:
    return bounds(distribution.requires or ())


@cache
def _version(distribution: Distribution) -> str:
    try:
        return distribution.version or "?"
    except Exception:  # a METADATA file without a version
        return "?"


def _is_own(point: EntryPoint) -> bool:
    return normalise(distribution_name(point)) == PROJECT


def _same_name(point: EntryPoint, points: Sequence[EntryPoint]) -> list[EntryPoint]:
    return [p for p in points if p.name == point.name and (p.value, p.dist) != (point.value, point.dist)]


def _check_rivals(point: EntryPoint, rivals: Sequence[EntryPoint]) -> None:
    strangers = [p for p in rivals if distribution_name(p) != distribution_name(point) or p.value != point.value]
    if not strangers or (_is_own(point) and not any(_is_own(p) for p in strangers)):
        return
    others = " and ".join(sorted({distribution_name(p) for p in strangers}))
    raise PluginError(
        f"the plugin name {point.name!r} is also used by {others}; keep one of them, or switch one off with "
        f"FASTGEN_DISABLE_PLUGINS={distribution_name(point)}"
    )


def _check_version(point: EntryPoint) -> None:
    """Raises PluginError if the distribution was written for another version of fastgen than the running one."""
    if point.dist is None or _is_own(point):
        return
    specifier = _bounds(point.dist)
    if specifier and not admits(specifier, fastgen.__version__):
        raise PluginError(
            f"it needs fastgen {specifier}, this is fastgen {fastgen.__version__}; "
            f"run `pip install --upgrade {distribution_name(point)}`"
        )


def _check_lists(points: Sequence[EntryPoint], allow: Iterable[str] | None, block: Iterable[str]) -> list[str]:
    known = sorted({p.name for p in points} | {distribution_name(p) for p in points})
    normal = {normalise(name) for name in known}
    warnings = []
    for variable, names in (("FASTGEN_PLUGINS", allow or ()), ("FASTGEN_DISABLE_PLUGINS", block)):
        for name in names:
            if normalise(name) not in normal:
                warnings.append(f"{variable} names {name!r}, which is not installed.{did_you_mean(name, known)}")
    return warnings


def environment_flag(name: str) -> bool:
    """Whether the environment variable is switched on.

    Raises:
        ConfigError: it holds something else than a yes or a no.
    """
    value = os.environ.get(name, "").strip().lower()
    if value in {"1", "true", "yes", "on"}:
        return True
    if value in {"", "0", "false", "no", "off"}:
        return False
    raise ConfigError(f"{name} is {value!r}; set it to 1 or 0")


# ---- what a plugin that does not load would have served ------------------------------------------------------------


def likely_architectures(point: EntryPoint) -> tuple[str, ...]:
    """Architectures that a plugin seems to serve, found without running it: the keywords of its distribution, and
    the strings that stand for architectures in the ``ModelSpec(...)`` calls of its entry module's source."""
    names: dict[str, None] = {}
    try:
        keywords = point.dist.metadata["Keywords"] if point.dist is not None else None
    except Exception:
        keywords = None
    names.update(dict.fromkeys(re.findall(r"[A-Za-z]\w+", keywords or "")))
    try:
        source = _source(point.module)
        tree = ast.parse(source.read_bytes()) if source is not None else None
    except Exception:  # no source, or not Python: the other evidence has to do
        tree = None
    if tree is not None:
        names.update(dict.fromkeys(_named_in(tree)))
    return tuple(names)


def _source(module: str) -> Path | None:
    """The file of ``module``, found without importing it or the packages around it."""
    head, *rest = module.split(".")
    found: ModuleSpec | None = util.find_spec(head)
    name = head
    for part in rest:
        if found is None or found.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        found = PathFinder.find_spec(name, list(found.submodule_search_locations))
    return Path(found.origin) if found is not None and found.origin is not None and found.has_location else None


def _named_in(tree: ast.Module) -> Iterator[str]:
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called != "ModelSpec":
            continue
        given = [k.value for k in node.keywords if k.arg == "architectures"] or node.args[:1]
        for value in given:
            expression = constants.get(value.id, value) if isinstance(value, ast.Name) else value
            for leaf in ast.walk(expression):
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                    yield leaf.value
