"""`fastgen plugins list`: what is installed, what each provides, and why some do not load."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from fastgen.cli.output import print_json, print_table
from fastgen.core.plugin import (
    CheckpointFormatSpec,
    CommandSpec,
    KernelSpec,
    LogitsProcessorSpec,
    ModelSourceSpec,
    ModelSpec,
    PluginRecord,
    Spec,
    registry,
)

__all__ = ["list_plugins", "provides"]

KINDS: dict[type[Spec], str] = {
    ModelSpec: "models",
    CheckpointFormatSpec: "formats",
    ModelSourceSpec: "sources",
    KernelSpec: "kernels",
    LogitsProcessorSpec: "logits processors",
    CommandSpec: "commands",
}


@click.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--failed", is_flag=True, help="Only the broken ones, with their tracebacks; exit code 1 if there are any."
)
def list_plugins(as_json: bool, failed: bool) -> None:
    """List the installed plugins, what each provides, and what is wrong with it."""
    records = [r for r in registry().plugins if not failed or r.status == "failed"]
    if as_json:
        print_json([_fields(record) for record in records])
    elif failed:
        _print_failures(records)
    else:
        rows = [
            (r.name, r.distribution or "(in process)", r.version, r.status, r.error or provides(r)) for r in records
        ]
        print_table(("plugin", "distribution", "version", "status", "provides"), rows)
    if failed and records:
        click.get_current_context().exit(1)


def _print_failures(records: list[PluginRecord]) -> None:
    if not records:
        click.echo("no plugin is broken")
    for record in records:
        click.echo(f"{record.label}, {record.entry}: {record.error}")
        if record.traceback:
            click.echo("\n".join(f"  {line}" for line in record.traceback.splitlines()))


def claims(record: PluginRecord) -> dict[str, list[str]]:
    """``{"models": ["LlamaForCausalLM"], ...}``"""
    found: dict[str, list[str]] = {}
    for spec in record.specs:
        kind = next(name for cls, name in KINDS.items() if isinstance(spec, cls))
        found.setdefault(kind, []).extend(spec.claims())
    return found


def provides(record: PluginRecord) -> str:
    """``"2 models, 1 format"``"""
    counts = Counter({kind: len(claims) for kind, claims in claims(record).items()})
    return ", ".join(f"{n} {kind if n > 1 else kind.removesuffix('s')}" for kind, n in counts.items()) or "nothing"


def _fields(record: PluginRecord) -> dict[str, Any]:
    return {
        "plugin": record.name,
        "distribution": record.distribution or None,
        "version": record.version or None,
        "status": record.status,
        "entry": record.entry,
        "in_process": record.in_process,
        "provides": claims(record),
        "error": record.error,
        "traceback": record.traceback,
    }
