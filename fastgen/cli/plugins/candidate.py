"""What `fastgen plugins check` looks at: an installed distribution, or a source tree that is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import util
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

from fastgen.core.plugin.loader import GROUP, discover, distribution_name, normalise
from fastgen.errors import PluginError, did_you_mean
from fastgen.testing.distributions import FakeSite

__all__ = ["Candidate", "Entry", "find_candidate", "installed_candidate", "source_candidate"]

TIMEOUT = 300
"""Seconds that a child process may take to load one plugin."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"v?\d[A-Za-z0-9.!+_-]*")
_ENTRY_NAME = re.compile(r"\w([\w. -]*\w)?")
_ENTRY_VALUE = re.compile(r"[^\W\d][\w.]*(\s*:\s*[^\W\d][\w.]*)?")
_NOT_THE_PLUGIN = {"tests", "test", "__pycache__", ".venv", "venv", "build", "dist", "node_modules"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a distribution's entry points in the group ``fastgen``."""

    plugin: str
    value: str

    @property
    def module(self) -> str:
        return self.value.partition(":")[0].partition("[")[0].strip()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A distribution with plugins. ``roots`` are the packages (directories) and single modules (files) it consists of;
    ``tree`` its source tree, where there is one here."""

    distribution: str
    version: str
    requires: tuple[str, ...]
    keywords: str
    entries: tuple[Entry, ...]
    roots: tuple[Path, ...]
    tree: Path | None
    installed: bool
    path: tuple[Path, ...] = ()
    """What must stand first on ``sys.path`` for child processes to see it."""

    @property
    def label(self) -> str:
        return f"{self.distribution} {self.version}"

    def modules(self) -> Iterator[tuple[Path, bool]]:
        """Every Python file, and whether it belongs to its tests."""
        for root in self.roots:
            if root.is_file():
                yield root, False
                continue
            for file in sorted(root.rglob("*.py")):
                folders = set(file.relative_to(root).parts[:-1])
                if not folders & (_NOT_THE_PLUGIN - {"tests", "test"}) and not file.is_dir():
                    name = file.name
                    is_test = bool(folders & {"tests", "test"}) or name.startswith("test_") or name == "conftest.py"
                    yield file, is_test

    def tests(self) -> list[Path]:
        """The files and folders to give to pytest."""
        if self.tree is None:
            return []
        folders = [self.tree / name for name in ("tests", "test") if (self.tree / name).is_dir()]
        return folders or sorted(self.tree.glob("test_*.py"))

    def shown(self, file: Path) -> str:
        """``file`` as a message names it."""
        for base in (self.tree, *(root.parent for root in self.roots)):
            if base is not None and file.is_relative_to(base):
                return str(file.relative_to(base))
        return str(file)

    def run(self, arguments: Sequence[str], *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """``python ARGUMENTS`` in a process that sees the plugin and no settings of ours.

        Raises:
            PluginError: it does not end.
        """
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FASTGEN_")}
        path = os.pathsep.join([*map(str, self.path), *filter(None, [inherited.get("PYTHONPATH")])])
        environment = {**inherited, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        try:
            return subprocess.run(
                [sys.executable, *arguments],
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PluginError(f"loading {self.label} took more than {TIMEOUT} s; it must return at once") from None


def find_candidate(name: str, workspace: Path) -> Candidate:
    """What ``name`` stands for: an existing path is a source tree, all else an installed plugin or distribution.

    Args:
        workspace: an empty directory that lives as long as the candidate.

    Raises:
        PluginError: there is no such plugin, or the tree is none of a plugin.
    """
    path = Path(name).expanduser()
    looks_like_a_path = os.sep in name or name in (".", "..")
    if looks_like_a_path or (path.is_dir() and (path / "pyproject.toml").is_file() and not _owners(name)):
        return source_candidate(path, workspace)
    return installed_candidate(name)


def _owners(name: str) -> list[EntryPoint]:
    wanted = normalise(name)
    return [p for p in discover() if wanted in (normalise(p.name), normalise(distribution_name(p)))]


# ---- installed -----------------------------------------------------------------------------------------------------


def installed_candidate(name: str) -> Candidate:
    """The installed distribution that is called ``name``, or that has a plugin of that name.

    Raises:
        PluginError: there is none, or several; it is fastgen itself.
    """
    points = _owners(name)
    owners = sorted({distribution_name(p) for p in points})
    if not points:
        known = sorted({p.name for p in discover()} | {distribution_name(p) for p in discover()})
        raise PluginError(
            f"no plugin {name!r} is installed.{did_you_mean(name, known)} `fastgen plugins` lists what is; a source "
            f"tree is given as a path (./{name})"
        )
    if len(owners) > 1:
        raise PluginError(f"the plugin name {name!r} is used by {' and '.join(owners)}; give the distribution's name")
    distribution = points[0].dist
    if distribution is None:
        raise PluginError(f"the plugin {name!r} belongs to no distribution, so there is nothing to check")
    whole = normalise(name) == normalise(owners[0])
    entries = [
        Entry(p.name, p.value)
        for p in distribution.entry_points.select(group=GROUP)
        if whole or normalise(p.name) == normalise(name)  # one of several, as fastgen's own families are
    ]
    return Candidate(
        distribution=owners[0],
        version=distribution.version or "?",
        requires=tuple(distribution.requires or ()),
        keywords=distribution.metadata["Keywords"] or "",
        entries=tuple(entries),
        roots=tuple(_installed_roots(entries)),
        tree=_editable_tree(distribution),
        installed=True,
    )


def _installed_roots(entries: Sequence[Entry]) -> list[Path]:
    roots: dict[Path, None] = {}
    for entry in entries:
        top = entry.module.partition(".")[0]
        if top == GROUP:  # a built-in family: its module alone
            top = entry.module
        try:
            spec = util.find_spec(top)
        except (ImportError, ValueError):  # no module's name
            continue
        if spec is None:
            continue  # loading it says so
        if spec.submodule_search_locations:
            roots.update(dict.fromkeys(map(Path, spec.submodule_search_locations)))
        elif spec.origin is not None and spec.has_location:
            roots[Path(spec.origin)] = None
    return list(roots)


def _editable_tree(distribution: Distribution) -> Path | None:
    """Where a distribution installed with ``pip install -e`` is worked on."""
    import json
    from urllib.parse import unquote, urlparse

    try:
        told = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    url = urlparse(str(told.get("url", "")))
    if url.scheme != "file" or not told.get("dir_info", {}).get("editable"):
        return None
    tree = Path(unquote(url.path))
    return tree if tree.is_dir() else None


# ---- a source tree -------------------------------------------------------------------------------------------------


def source_candidate(path: Path, workspace: Path) -> Candidate:
    """The distribution that a ``pyproject.toml`` describes, made visible to child processes as if it were installed.

    Raises:
        PluginError: there is none, or it lacks what a plugin needs; says what to write.
    """
    tree = (path.parent if path.name == "pyproject.toml" else path).resolve()
    file = tree / "pyproject.toml"
    if not tree.is_dir():
        raise PluginError(f"there is no directory {path}")
    if not file.is_file():
        raise PluginError(f"{path} has no pyproject.toml; give the top directory of a plugin's sources")
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise PluginError(f"{file} cannot be read: {error}") from None
    project = content.get("project")
    if not isinstance(project, dict) or not isinstance(project.get("name"), str):
        raise PluginError(
            f"{file} has no [project] table with a name; write one, or install the plugin and give its name"
        )
    _check_project(file, project)
    unknown = sorted({"dependencies", "entry-points", "keywords"} & set(project.get("dynamic", ())))
    if unknown:
        raise PluginError(
            f"{file} computes {' and '.join(unknown)} when it is built (dynamic), which cannot be seen here; install "
            f"the plugin (`fastgen plugins install -e {path}`) and check it by its name"
        )
    entries = _declared_entries(file, project)
    bases = _import_bases(tree, content)
    roots = [root for entry in entries for base in bases if (root := _root(base, entry)) is not None]
    site = workspace / "site"
    site.mkdir()
    name, version = str(project["name"]), str(project.get("version", "0.dev0"))
    FakeSite(site).add(
        name,
        version=version,
        requires=tuple(project.get("dependencies", ())),
        keywords=",".join(project.get("keywords", ())),
        entries={entry.plugin: entry.value for entry in entries},
    )
    return Candidate(
        distribution=name,
        version=version,
        requires=tuple(project.get("dependencies", ())),
        keywords=",".join(project.get("keywords", ())),
        entries=tuple(entries),
        roots=tuple(dict.fromkeys(roots)),
        tree=tree,
        installed=False,
        path=(site, *bases),
    )


def _check_project(file: Path, project: dict[str, Any]) -> None:
    """Refuse what no build tool would take, and what would not read the same in a distribution's metadata."""
    for key, pattern, wanted in (
        ("name", _NAME, "letters, digits, dots and dashes, as in fastgen-foo"),
        ("version", _VERSION, "a version, as in 0.1.0"),
    ):
        value = project.get(key, "0")
        if not (isinstance(value, str) and pattern.fullmatch(value)):
            raise PluginError(f"{file}: {key} is {value!r}; write {wanted}")
    for key in ("dependencies", "keywords", "dynamic"):
        value = project.get(key, [])
        if not (isinstance(value, list) and all(isinstance(one, str) and one.isprintable() for one in value)):
            raise PluginError(f"{file}: {key} is {value!r}; write a list of strings")


def _declared_entries(file: Path, project: dict[str, Any]) -> list[Entry]:
    declared = project.get("entry-points", {})
    points = declared.get(GROUP) if isinstance(declared, dict) else None
    if not isinstance(points, dict) or not points or not all(isinstance(v, str) for v in points.values()):
        near = did_you_mean(GROUP, set(declared) - {GROUP}) if isinstance(declared, dict) else ""
        raise PluginError(
            f"{file} has no entry point in the group {GROUP!r}.{near} Write\n"
            f"  [project.entry-points.{GROUP}]\n  {project['name'].removeprefix('fastgen-')} = "
            f'"{project["name"].replace("-", "_")}"'
        )
    for plugin, value in points.items():
        if not _ENTRY_NAME.fullmatch(plugin) or not _ENTRY_VALUE.fullmatch(value):
            raise PluginError(
                f"{file}: {plugin!r} = {value!r} is no entry point; write a name of letters, digits and dashes, and "
                "'module' or 'module:attribute' (a module's name has no dashes)"
            )
    return [Entry(plugin, value) for plugin, value in points.items()]


def _import_bases(tree: Path, content: dict[str, Any]) -> list[Path]:
    """Directories from which the tree's packages are imported: those that the build configuration names, the tree
    itself and ``src``."""
    hatch = _within(content, "tool", "hatch", "build", "targets", "wheel", "packages")
    where = _within(content, "tool", "setuptools", "packages", "find", "where")
    bases = [(tree / package).parent for package in _strings(hatch)] + [tree / part for part in _strings(where)]
    bases += [tree / "src", tree]
    return [base for base in dict.fromkeys(bases) if base.is_dir()]


def _within(content: Any, *keys: str) -> Any:
    """What lies under these keys of nested tables; ``None`` where one of them is missing or no table."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _strings(value: Any) -> list[str]:
    """A build tool says itself what is wrong with anything else."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _root(base: Path, entry: Entry) -> Path | None:
    top = base / entry.module.partition(".")[0]
    if top.is_dir():
        return top
    single = top.with_suffix(".py")
    return single if single.is_file() else None
