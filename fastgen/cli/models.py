"""`fastgen models`: which architectures can be served, and by whom."""

from __future__ import annotations

import click

from fastgen.cli.output import print_json, print_table
from fastgen.core.plugin import ModelRow, registry

__all__ = ["models"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(as_json: bool) -> None:
    """List the model architectures that can be served, each with the plugin that serves it.

    The architecture of a model stands in its config.json, under "architectures".
    """
    plugins = registry()
    rows = plugins.model_rows()
    if as_json:
        print_json([_fields(row) for row in rows])
        return
    if not rows:
        click.echo("no plugin serves any model; see `fastgen plugins`", err=True)
        return
    cells = [
        (
            row.architecture,
            row.plugin.name,
            row.plugin.distribution or "(in process)",
            row.plugin.version,
            "; ".join(text for text in (row.note, row.spec.description) if text),
        )
        for row in rows
    ]
    print_table(("architecture", "plugin", "distribution", "version", "description"), cells)


def _fields(row: ModelRow) -> dict[str, str | bool | None]:
    return {
        "architecture": row.architecture,
        "plugin": row.plugin.name,
        "distribution": row.plugin.distribution or None,
        "version": row.plugin.version or None,
        "description": row.spec.description,
        "fallback": row.spec.fallback,
        "note": row.note or None,
    }
