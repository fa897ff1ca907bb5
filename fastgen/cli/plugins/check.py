"""`fastgen plugins check`: is this plugin fit to be published?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fastgen.cli.output import print_json, print_table
from fastgen.cli.plugins.candidate import Candidate
from fastgen.cli.plugins.findings import Finding, skipped
from fastgen.core.plugin.conformance import Conformance

__all__ = ["check"]

SHOWN = {"pass": "ok", "fail": "FAILED", "warn": "warning", "skip": "-"}
COLOURS = {"pass": "green", "fail": "red", "warn": "yellow", "skip": ""}


@click.command()
@click.argument("name", metavar="NAME|PATH")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--skip-conformance", is_flag=True, help="Do not run the plugin's tests.")
def check(name: str, as_json: bool, skip_conformance: bool) -> None:
    """Check a plugin as its users' machines will: NAME is an installed plugin or distribution, PATH the top directory
    of a source tree, which need not be installed. This runs the plugin's code and its tests.

    \b
    versions     its requirement on fastgen holds this version and ends somewhere
    loads        its entry modules can be imported, its hooks return specs
    light        doing that loads no torch, transformers or triton, and opens no device
    api only     of fastgen it imports fastgen.api alone (read from the sources)
    twice        registering it again changes nothing
    spawn        a spawned process has the same plugins
    references   what its specs name can be loaded
    keywords     the distribution's keywords name its architectures
    tests, conformance   its tests pass, and the conformance kit noticed every planted fault

    The exit code is 1 if something fails.
    """
    from fastgen.cli.plugins.candidate import find_candidate
    from fastgen.cli.plugins.conformance import check_conformance
    from fastgen.cli.plugins.hygiene import check_hygiene

    with tempfile.TemporaryDirectory(prefix="fastgen-check-") as folder:
        workspace = Path(folder)
        candidate = find_candidate(name, workspace)
        findings, architectures = check_hygiene(candidate, workspace)
        reports: dict[str, Conformance] = {}
        if skip_conformance:
            findings.append(skipped("conformance", "--skip-conformance"))
        elif any(finding.check == "loads" and finding.status == "fail" for finding in findings):
            findings.append(skipped("conformance", "not tried, since the plugin does not load"))
        else:
            more, reports = check_conformance(candidate, architectures, workspace)
            findings += more
    wrong = [finding for finding in findings if finding.status == "fail"]
    if as_json:
        facts: dict[str, Any] = {
            "distribution": candidate.distribution,
            "version": candidate.version,
            "installed": candidate.installed,
            "plugins": [entry.plugin for entry in candidate.entries],
            "architectures": architectures,
            "passed": not wrong,
            "checks": [finding.as_json() for finding in findings],
            "conformance": {entry: report.as_json() for entry, report in reports.items()},
        }
        print_json(facts)
    else:
        _print(candidate, findings)
    if wrong:
        click.get_current_context().exit(1)


def _print(candidate: Candidate, findings: Sequence[Finding]) -> None:
    place = "installed" if candidate.installed else str(candidate.tree)
    click.echo(f"{candidate.label} ({place})\n")
    print_table(
        ("check", "result", "detail"), [(f.check, SHOWN[f.status], f.detail.partition("\n")[0]) for f in findings]
    )
    for finding in findings:
        if finding.remedy:
            title = click.style(f"{finding.check}: {SHOWN[finding.status]}", fg=COLOURS[finding.status], bold=True)
            click.echo(f"\n{title}\n{_indented(finding.detail)}\n  To do: {_indented(finding.remedy).lstrip()}")
    count = sum(finding.status == "fail" for finding in findings)
    if count:
        click.echo(f"\n{count} check{'s' if count != 1 else ''} failed")
    else:
        click.echo("\nnothing failed")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
