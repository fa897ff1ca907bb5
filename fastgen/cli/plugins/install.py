"""`fastgen plugins install` and `uninstall`: pip in the running interpreter, kept from moving torch and fastgen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any

import click

from fastgen.core.plugin.loader import discover, distribution_name, normalise
from fastgen.errors import PluginError, did_you_mean

__all__ = ["install", "uninstall"]

PINNED = ("torch", "fastgen")
"""What an installation must leave as it is."""
_LISTING = "import sys; sys.argv[0] = 'fastgen'; from fastgen.cli import main; main(['plugins', 'list', '--json'])"


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|WHEEL|PATH]...")
@click.option("-e", "--editable", multiple=True, metavar="PATH", help="A source tree, used in place. May be repeated.")
@click.option("-U", "--upgrade", is_flag=True, help="Take the newest version even if one is installed.")
@click.option("--pre", is_flag=True, help="Consider pre-releases.")
@click.option("--no-deps", is_flag=True, help="Do not install what the plugins need.")
@click.option("--no-build-isolation", is_flag=True, help="Build source trees with what is installed here.")
@click.option("--no-index", is_flag=True, help="Ask no index; see --find-links.")
@click.option("--index-url", metavar="URL", help="Ask this index.")
@click.option("--find-links", multiple=True, metavar="PLACE", help="Look for distributions here too. May be repeated.")
def install(names: tuple[str, ...], editable: tuple[str, ...], **options: Any) -> None:
    """Install plugins with pip, in the Python that runs fastgen: distributions by name (fastgen-FAMILY), wheels, source
    trees. The installed torch and fastgen stay what they are: a plugin that needs others is refused.

    Installing a plugin is running its code, now and whenever fastgen starts. Install what you trust.
    """
    if not names and not editable:
        raise click.UsageError("name a distribution, a wheel or a source tree, for example fastgen-exaone4")
    for name in names:
        if name.startswith("-"):
            raise click.UsageError(f"{name!r} is not passed on to pip; see --help for what is")
        if normalise(name) in PINNED:
            raise PluginError(f"{name} is no plugin and is not moved by this command; use pip itself")
    click.echo("Installing a plugin runs its code, now and whenever fastgen starts. Install what you trust.", err=True)
    before = _plugins()
    pinned = _pinned_versions()
    arguments = [*names, *(part for path in editable for part in ("--editable", path))]
    for flag, value in options.items():
        name = f"--{flag.replace('_', '-')}"
        arguments += [name] if value is True else [part for one in _several(value) for part in (name, one)]
    with _constraints(pinned) as constraints:
        _run_pip(["install", *constraints, *arguments], pinned)
    _tell(before, _plugins(), names or editable)


def _several(value: Any) -> Sequence[str]:
    return value if isinstance(value, tuple) else [value] if isinstance(value, str) else []


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def uninstall(names: tuple[str, ...], yes: bool) -> None:
    """Remove the distributions of plugins with pip. NAME is a plugin's or its distribution's."""
    distributions = list(dict.fromkeys(_owner(name) for name in names))
    if not yes:
        click.confirm(f"Remove {', '.join(distributions)} from {sys.prefix}?", abort=True)
    before = _plugins()
    _run_pip(["uninstall", "--yes", *distributions], {})
    _tell(before, _plugins(), names)


def _owner(name: str) -> str:
    """The distribution to remove.

    Raises:
        PluginError: it is no plugin, or is fastgen's own.
    """
    points = discover()
    owners = {distribution_name(p) for p in points if normalise(name) == normalise(distribution_name(p))}
    owners = owners or {distribution_name(p) for p in points if normalise(name) == normalise(p.name)}
    if not owners:
        known = sorted({p.name for p in points} | {distribution_name(p) for p in points})
        raise PluginError(
            f"no plugin {name!r} is installed, so it is not removed.{did_you_mean(name, known)} This command removes "
            "plugins only; for other packages use pip itself"
        )
    if len(owners) > 1:
        raise PluginError(
            f"the plugin name {name!r} is used by {' and '.join(sorted(owners))}; give the distribution's"
        )
    (owner,) = owners
    if normalise(owner) == "fastgen":
        raise PluginError(
            f"{name!r} is part of fastgen itself. To do without a built-in family, set FASTGEN_DISABLE_PLUGINS={name}"
            if normalise(name) != "fastgen"
            else "this would remove fastgen itself; use pip if you mean that"
        )
    return owner


# ---- pip -----------------------------------------------------------------------------------------------------------


def _pinned_versions() -> dict[str, str]:
    found = {}
    for name in PINNED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise PluginError(
                f"{name} runs here but is not installed as a distribution, so pip would install another one over it; "
                "install the plugin with `pip install --no-deps`"
            ) from None
    return found


@contextmanager
def _constraints(pinned: dict[str, str]) -> Iterator[list[str]]:
    """Options that hold pip to the installed versions, and to whatever constraints the user has set already."""
    with tempfile.TemporaryDirectory(prefix="fastgen-pip-") as folder:
        file = Path(folder) / "constraints.txt"
        file.write_text("".join(f"{name}=={version}\n" for name, version in pinned.items()), encoding="utf-8")
        users = os.environ.get("PIP_CONSTRAINT", "").split()
        yield [part for path in [*users, str(file)] for part in ("--constraint", path)]


def _run_pip(arguments: Sequence[str], pinned: dict[str, str]) -> None:
    """Run it, its output going where ours goes.

    Raises:
        PluginError: there is no pip, or it failed; says so where it was for a pinned version.
    """
    if util.find_spec("pip") is None:
        given = " ".join(arg for arg in arguments[1:] if "constraint" not in arg)
        raise PluginError(
            f"{sys.executable} has no pip. With uv: `uv pip {arguments[0]} --python {sys.executable} {given}`"
            f"{''.join(f' (torch must stay {version})' for name, version in pinned.items() if name == 'torch')}; "
            f"else `{sys.executable} -m ensurepip` first"
        )
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    said: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            click.echo(line, nl=False, err=True)
    if process.returncode:
        text = "".join(said)
        for name, version in pinned.items():
            if re.search(rf"(\(constraint\)|requirement|distribution found for) {name}(?![-\w])", text):
                raise PluginError(
                    f"this needs another {name} than the installed {version}, which is not moved. Look for a version "
                    f"of the plugin made for {name} {version}, or change {name} yourself first. Nothing was installed"
                )
        raise PluginError(f"pip failed with exit code {process.returncode}; its own words are above")
    for name, version in pinned.items():
        if _installed_now(name) != version:  # a constraint of the user's own, or a pip that ignores ours
            raise PluginError(
                f"pip moved {name} from {version} to {_installed_now(name)} in spite of a constraint; "
                f"`pip install {name}=={version}` brings it back"
            )


def _installed_now(name: str) -> str | None:
    """Its version as a fresh process sees it."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return run.stdout.strip() or None


# ---- what changed --------------------------------------------------------------------------------------------------


def _plugins() -> dict[tuple[str, str], dict[str, Any]]:
    """The plugins that a fresh process finds, by name and distribution."""
    environment = {k: v for k, v in os.environ.items() if k != "FASTGEN_PLUGINS_STRICT"}
    run = subprocess.run([sys.executable, "-c", _LISTING], env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise PluginError(f"`fastgen plugins` fails in a fresh process: {run.stderr.strip()}")
    return {(row["plugin"], row["distribution"]): row for row in json.loads(run.stdout)}


def _tell(before: dict[Any, dict[str, Any]], after: dict[Any, dict[str, Any]], names: Sequence[str]) -> None:
    """Say what became of the plugins.

    Raises:
        PluginError: a new one is broken.
    """
    changed = {key: row for key, row in after.items() if row != before.get(key)}
    gone = [row for key, row in before.items() if key not in after]
    for row in gone:
        click.echo(f"removed {row['plugin']} ({row['distribution']} {row['version']})")
    broken = []
    for row in changed.values():
        label = f"{row['plugin']} ({row['distribution']} {row['version']})"
        if row["status"] == "failed":
            broken.append(f"{label} is broken: {row['error']}")
            continue
        provided = [f"{kind}: {', '.join(claims)}" for kind, claims in row["provides"].items()]
        click.echo(f"registered {label}: {'; '.join(provided) or row['error'] or 'nothing'}")
    if broken:
        raise PluginError(f"{'; '.join(broken)}. `fastgen plugins --failed` shows where")
    if not changed and not gone:
        click.echo(
            f"no plugin changed: {', '.join(names)} may be here already, or be no plugin (see `fastgen plugins`)"
        )
