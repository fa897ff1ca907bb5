"""A benchmark's results for a person: one table a workload, the ratio, and what the numbers depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fastgen.bench.engines import ENGINES
from fastgen.bench.offline import Result, Spread, ratios, same_tokens

__all__ = ["print_report"]


def print_report(console: Console, results: Sequence[Result], info: dict[str, Any], *, model: str, dtype: str) -> None:
    """Tables of ``results`` (medians, with the least and the greatest round behind them) and the machine's ``info``."""
    versions = ", ".join(f"{name} {number}" for name, number in info["versions"].items())
    console.print(f"{model}, {dtype}. {info['processor']}, {info['cores']} cores, {info['threads']} threads.")
    console.print(f"{versions}, Python {info['python']}. Load before the run: {info['load']}.")
    names = list(dict.fromkeys(result.workload.name for result in results))
    for name in names:
        rows = [result for result in results if result.workload.name == name]
        console.print()
        console.print(_table(rows))
        for line in _comparison(rows):
            console.print(line)
    console.print()
    for engine in dict.fromkeys(result.engine for result in results):
        console.print(f"[dim]{ENGINES[engine].note}[/dim]")


def _table(rows: Sequence[Result]) -> Table:
    work = rows[0].workload
    table = Table(
        title=f"{work.title}: {len(work.requests)} request{'s' * (len(work.requests) > 1)}, "
        f"{work.prompt_tokens:,} tokens in, {work.output_tokens:,} out, {len(rows[0].runs)} rounds",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("engine")
    for header in ("wall s", "output tok/s", "total tok/s", "first token s"):
        table.add_column(header, justify="right")
    for row in rows:
        rates = (_spread(row.wall, 2), _spread(row.output_rate, 1), _spread(row.total_rate, 1))
        table.add_row(row.engine, *rates, _spread(row.first_token, 3))
    return table


def _comparison(rows: Sequence[Result]) -> list[str]:
    """fastgen (or the first engine) beside each other engine."""
    first, *others = sorted(rows, key=lambda row: row.engine != "fastgen")
    total = len(first.workload.requests)
    return [
        f"{first.engine} is {_spread(ratios(first, other), 2)} times as fast as {other.engine}; "
        f"same tokens in {same_tokens(first, other)} of {total} requests."
        for other in others
    ]


def _spread(value: Spread, digits: int) -> str:
    middle = f"{value.median:,.{digits}f}"
    if value.low == value.high:
        return middle
    return f"{middle} ({value.low:,.{digits}f}..{value.high:,.{digits}f})"
