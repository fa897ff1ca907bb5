"""`fastgen models`: which architectures can be served, by whom, and how well that was tested."""

from __future__ import annotations

from pathlib import Path

import click

from fastgen.cli.output import print_json, print_table
from fastgen.core.plugin import ModelRow, registry
from fastgen.core.plugin.conformance import Conformance, conformance_path, read_report
from fastgen.errors import PluginError

__all__ = ["models"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--why", metavar="MODEL", help="Show how MODEL (a name, a directory or a file) finds its plugin.")
@click.option(
    "--adapter",
    "pins",
    metavar="ARCHITECTURE=PLUGIN",
    multiple=True,
    help="With --why: who serves what several would, as the other commands take it.",
)
@click.option("--revision", metavar="REVISION", help="With --why: branch, tag or commit of a name on the hub.")
@click.option("--token", metavar="TOKEN", help="With --why: for the hub, or the source a prefix stands for.")
@click.option("--offline", is_flag=True, help="With --why: make no network call.")
def models(
    as_json: bool, why: str | None, pins: tuple[str, ...], revision: str | None, token: str | None, offline: bool
) -> None:
    """List the model architectures that can be served, each with the plugin that serves it and what the conformance
    kit found about it.

    The architecture of a model stands in its config.json, under "architectures". --why MODEL reads that and says who
    claims it, who stands, and what keeps the others from it. No weights are fetched.
    """
    if why is not None:
        from fastgen.cli.why import print_why

        print_why(why, pins, as_json=as_json, revision=revision, token=token, offline=offline)
        return
    if pins or revision or token or offline:
        raise click.UsageError("--adapter, --revision, --token and --offline go with --why MODEL")
    rows = registry().model_rows()
    reports = _Reports()
    if as_json:
        print_json([_fields(row, reports) for row in rows])
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
            reports.summary(row) or "not tested",
            "; ".join(text for text in (row.note, row.spec.description) if text),
        )
        for row in rows
    ]
    print_table(("architecture", "plugin", "distribution", "version", "conformance", "description"), cells)


class _Reports:
    """The conformance reports of the plugins; a file that speaks of several is read once."""

    def __init__(self) -> None:
        self._files: dict[Path, dict[str, Conformance]] = {}

    def of(self, row: ModelRow) -> Conformance | None:
        """Raises PluginError for a damaged one."""
        path = None if row.plugin.in_process else conformance_path(row.plugin.entry)
        if path is None or not path.is_file():
            return None
        if path not in self._files:
            self._files[path] = read_report(path)
        return self._files[path].get(row.plugin.entry)

    def summary(self, row: ModelRow) -> str:
        """For people; empty where there is nothing to say of this architecture."""
        try:
            report = self.of(row)
        except PluginError as error:
            return f"unreadable: {error}"
        text = report.summary(None if row.spec.fallback else row.architecture) if report is not None else ""
        if report is None or not text or report.version == row.plugin.version:
            return text
        return f"{text}, of version {report.version}"

    def fields(self, row: ModelRow) -> dict[str, object] | None:
        """For programs; ``None`` where there is no report."""
        try:
            report = self.of(row)
        except PluginError as error:
            return {"error": str(error)}
        if report is None:
            return None
        return {
            "summary": report.summary(None if row.spec.fallback else row.architecture) or None,
            "passed": report.passed,
            "complete": report.complete,
            "version": report.version,
            "date": report.date,
        }


def _fields(row: ModelRow, reports: _Reports) -> dict[str, object]:
    return {
        "architecture": row.architecture,
        "plugin": row.plugin.name,
        "distribution": row.plugin.distribution or None,
        "version": row.plugin.version or None,
        "conformance": reports.fields(row),
        "description": row.spec.description,
        "fallback": row.spec.fallback,
        "note": row.note or None,
    }
