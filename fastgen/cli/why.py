"""`fastgen models --why MODEL`: how a model finds the plugin that serves it, or what keeps it from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from fastgen.cli.output import print_json, print_table
from fastgen.core.plugin import ModelRow, ModelSpec, PluginRecord, Registry, registry
from fastgen.errors import FastgenError

if TYPE_CHECKING:
    from fastgen.core.source import ModelFiles

__all__ = ["explain_choice", "print_why"]


def print_why(
    model: str, pins: Sequence[str], *, as_json: bool, revision: str | None, token: str | None, offline: bool
) -> None:
    """Print it.

    Raises:
        FastgenError: there is no such model; or, after everything else was printed, the reason why it cannot be served.
    """
    from fastgen.core.source import resolve

    adapter = dict(_pair(text) for text in pins)
    plugins = registry()
    files = resolve(model, revision=revision, token=token, offline=offline)
    facts, error = explain_choice(files, plugins, adapter)
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    if error is not None:
        raise error


def _pair(text: str) -> tuple[str, str]:
    name, found, plugin = text.partition("=")
    if not (found and name and plugin):
        raise click.UsageError(f"--adapter {text!r}: write ARCHITECTURE=PLUGIN, as in LlamaForCausalLM=llama")
    return name, plugin


def explain_choice(
    files: ModelFiles, plugins: Registry, adapter: Mapping[str, str]
) -> tuple[dict[str, Any], FastgenError | None]:
    """What there is to say about a model's plugin, as plain values, and why it has none or cannot be read by it."""
    from fastgen.core.family import architectures_of, find_family
    from fastgen.core.hf_config import read_raw_config

    raw = read_raw_config(files.directory)
    names = architectures_of(raw)
    facts: dict[str, Any] = {
        "model": {
            "name": files.name,
            "config": str(files.directory / "config.json"),
            "from": files.origin,
            "revision": files.revision,
            "architectures": names,
            "model_type": raw.get("model_type"),
        },
        "claims": [_claim(row) for name in names for row in plugins.claims_on(name)],
        "pins": dict(adapter),
        "absent": [_absent(record, plugins.absent(names)) for record in _not_loaded(plugins, names)],
        "choice": None,
        "config": None,
        "error": None,
    }
    try:
        spec = plugins.find_model(names, adapter=adapter)
        facts["choice"] = _choice(spec, names, plugins, adapter)
        config = spec.load().config
        facts["config"] = {"class": config.__name__, "accepted": False}
        find_family(files, plugins, adapter)
        facts["config"]["accepted"] = True
    except FastgenError as error:
        facts["error"] = str(error)
        return facts, error
    return facts, None


def _claim(row: ModelRow) -> dict[str, Any]:
    return {
        "architecture": row.architecture,
        "plugin": row.plugin.name,
        "distribution": row.plugin.distribution or None,
        "version": row.plugin.version or None,
        "standing": row.note or "stands",
        "overrides": list(row.spec.overrides),
        "description": row.spec.description,
    }


def _not_loaded(plugins: Registry, names: Sequence[str]) -> list[PluginRecord]:
    """Broken plugins, any of which may be the one, and those that were switched off and seem to be."""
    return list(dict.fromkeys([*plugins.failures(), *plugins.absent(names)]))


def _absent(record: PluginRecord, likely: Sequence[PluginRecord]) -> dict[str, Any]:
    return {
        "plugin": record.name,
        "distribution": record.distribution or None,
        "version": record.version or None,
        "status": record.status,
        "names_it": record in likely,
        "error": record.error,
    }


def _choice(spec: ModelSpec, names: Sequence[str], plugins: Registry, adapter: Mapping[str, str]) -> dict[str, Any]:
    record = plugins.record(spec.plugin)
    rows = [row for name in names for row in plugins.claims_on(name)]
    mine = next(row for row in rows if row.spec is spec)
    rivals = [row.plugin.name for row in rows if row.spec is not spec and not row.spec.fallback]
    if mine.architecture in adapter or any(row.plugin.name in adapter for row in rows):
        why = "pinned by --adapter"
    elif spec.fallback:
        why = "a fallback: no other plugin claims the architecture"
    elif rivals:
        why = f"it overrides {', '.join(rivals)}"
    else:
        why = "the only claim"
    return {
        "plugin": record.name,
        "distribution": record.distribution or None,
        "version": record.version or None,
        "architecture": mine.architecture,
        "why": why,
    }


# ---- for people ----------------------------------------------------------------------------------------------------


def _print(facts: dict[str, Any]) -> None:
    model, choice, config = facts["model"], facts["choice"], facts["config"]
    _section("model")
    _lines(
        {
            "name": model["name"],
            "config": model["config"],
            "from": model["from"],
            "revision": model["revision"],
            "architectures": ", ".join(model["architectures"]) or "none are named",
        }
    )
    _section("claims")
    if facts["claims"]:
        columns = ("architecture", "plugin", "distribution", "version", "standing")
        print_table(columns, [[row[name] or "-" for name in columns] for row in facts["claims"]])
    else:
        click.echo("  no plugin that is loaded claims it")
    if facts["pins"]:
        _section("pins")
        _lines(facts["pins"])
    if facts["absent"]:
        _section("not loaded")
        rows = [
            (row["plugin"], row["status"], "yes" if row["names_it"] else "not by its own account", row["error"] or "")
            for row in facts["absent"]
        ]
        print_table(("plugin", "status", "serves it", "reason"), rows)
    _section("answer")
    if choice is None:
        click.echo("  none; the reason follows")
        return
    owner = f"{choice['distribution']} {choice['version']}" if choice["distribution"] else "in this process"
    read = config and f"{config['class']} {'reads it' if config['accepted'] else 'refuses it; the reason follows'}"
    _lines({"plugin": f"{choice['plugin']} ({owner})", "why": choice["why"], "config": read})


def _section(title: str) -> None:
    click.echo(click.style(title, bold=True))


def _lines(values: Mapping[str, str | None]) -> None:
    shown = {name: value for name, value in values.items() if value}
    width = max(map(len, shown))
    for name, value in shown.items():
        click.echo(f"  {name:<{width}}  {value}")
