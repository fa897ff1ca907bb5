"""A benchmark's results for a person: tables, ratios, and what the figures depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fastgen.bench.record import Record, Row, SpreadRecord
from fastgen.bench.rounds import Result, ratios

__all__ = ["print_record"]

Column = tuple[str, str]
"""Header, and the name of the figure."""

OFFLINE: list[Column] = [
    ("wall s", "wall"),
    ("output tok/s", "output_rate"),
    ("total tok/s", "total_rate"),
    ("first token s", "any_first_token"),
]
GAPS: list[Column] = [("P50", "gap_p50"), ("P95", "gap_p95"), ("P99", "gap_p99"), ("greatest", "gap_max")]
LATENCY: list[Column] = [
    ("first token s", "first_token_p50"),
    *((f"gap {header}", name) for header, name in GAPS),
    ("tok/s", "stream_rate"),
]
RATES: list[Column] = [
    ("wall s", "wall"),
    ("req/s", "request_rate"),
    ("output tok/s", "output_rate"),
    ("first token P50 s", "first_token_p50"),
    ("P95 s", "first_token_p95"),
]
SWEEP: list[Column] = [
    ("req/s", "request_rate"),
    ("mean latency s", "latency_mean"),
    ("gap P50", "gap_p50"),
    ("P95", "gap_p95"),
]
LONG: list[Column] = [
    ("others' median gap meanwhile", "reading_gap_p50"),
    ("first token P50", "long_first_token_p50"),
    ("greatest", "long_first_token_max"),
]


def print_record(console: Console, record: Record, results: Sequence[Result]) -> None:
    """Tables of medians, with the least and the greatest round behind them; then the conditions.

    Args:
        results: what ``record`` was made of, in the same order.
    """
    _print_conditions(console, record)
    tables: dict[str, list[tuple[Row, Result]]] = {}
    for row, result in zip(record.rows, results, strict=True):
        load = "" if record.command == "sweep" else f", {_load(row)}" if _load(row) else ""
        tables.setdefault(f"{row.workload.title}{load}", []).append((row, result))
    for title, pairs in tables.items():
        rows = [row for row, _ in pairs]
        console.print()
        if record.command == "sweep":
            console.print(_sweep_table(record, title, rows))
            continue
        for caption, columns in _columns(record, rows):
            console.print(_table(f"{title}: {caption}" if caption else _title(title, rows[0]), columns, rows))
        for line in _comparison(pairs):
            console.print(line)
    console.print()
    for line in _remarks(record):
        console.print(f"[dim]{line}[/dim]")


def _print_conditions(console: Console, record: Record) -> None:
    info = record.machine
    versions = dict(info["versions"]) | {name: v for row in record.rows for name, v in row.versions.items()}
    named = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    threads = _count(info["threads"], "thread")
    console.print(f"{record.model}, {record.dtype}. {info['processor']}, {info['cores']} cores, {threads}.")
    console.print(f"{named}, Python {info['python']}. Load before the run: {info['load']}.")
    if record.scaling:
        console.print(f"[bold]Not DeepSpeed-FastGen's own setting:[/bold] {record.scaling}.")


def _columns(record: Record, rows: Sequence[Row]) -> list[tuple[str, list[Column]]]:
    """``(caption, columns)`` of each table of one workload; an empty caption stands for the workload's size."""
    if record.command == "offline":
        return [("", OFFLINE)]
    if record.command == "latency":
        return [("", LATENCY)]
    tables = [("", RATES), ("seconds between tokens", GAPS)]
    if all("reading_gap_p50" in row.summary for row in rows):
        tables.append(("while the long prompts are read, seconds", LONG))
    if record.slas:
        kept = [(f"share at {sla.rate:g}/s", f"sla_{sla.rate:g}_kept") for sla in record.slas]
        effective = [(f"req/s at {sla.rate:g}/s", f"sla_{sla.rate:g}_effective") for sla in record.slas]
        promise = f"first token within prompt/{record.slas[0].prompt_rate:g} s, then tokens at a steady rate"
        tables.append((f"effective throughput ({promise})", effective + kept))
    return tables


def _load(row: Row) -> str:
    if row.workload.clients is not None:
        return _count(row.workload.clients, "client")
    if row.workload.rate is not None:
        return f"{row.workload.rate:g} arrivals/s"
    return ""


def _title(title: str, row: Row) -> str:
    work = row.workload
    return (
        f"{title}: {_count(work.requests, 'request')}, {work.prompt_tokens:,} tokens in, {work.output_tokens:,} out, "
        f"{_count(len(row.rounds), 'round')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("engine", no_wrap=True)
    shown = [(header, name) for header, name in columns if any(name in row.summary for row in rows)]
    for header, _ in shown:
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(row.engine, *(_cell(row.summary.get(name)) for _, name in shown))
    return table


def _sweep_table(record: Record, title: str, rows: Sequence[Row]) -> Table:
    """A line a load and engine."""
    effective = [(f"req/s at {sla.rate:g}/s", f"sla_{sla.rate:g}_effective") for sla in record.slas]
    columns = SWEEP + effective
    table = Table(title=_title(title, rows[0]), title_justify="left", title_style="bold")
    table.add_column("load", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for header, _ in columns:
        table.add_column(header, justify="right")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        last = after is None or _load(after) != _load(row)
        cells = (_median(row.summary.get(name)) for _, name in columns)
        table.add_row(_load(row), row.engine, *cells, end_section=last)
    if record.slas:
        table.caption_justify = "left"
        table.caption = (
            f"Medians. req/s at N/s: requests whose first token came within prompt/{record.slas[0].prompt_rate:g} s, "
            "and whose moving average of gaps stayed under 1/N s."
        )
    return table


def _comparison(pairs: Sequence[tuple[Row, Result]]) -> list[str]:
    """fastgen (or the first engine) beside each other engine, by wall time."""
    (_, first), *others = sorted(pairs, key=lambda pair: not pair[0].engine.startswith("fastgen"))
    total = len(first.workload.requests)
    lines = []
    for row, result in others:
        same = row.same_tokens
        times = ratios(first, result)
        spread = f"{_number(times.median)} ({_number(times.low)}..{_number(times.high)})"
        told = "the tokens are not told" if same is None else f"same tokens in {same} of {total} requests"
        lines.append(f"{first.engine} is {spread} times as fast as {row.engine}; {told}.")
    return lines


def _remarks(record: Record) -> list[str]:
    """How engines were driven, and what may have spoiled the figures."""
    lines = list(dict.fromkeys(row.note for row in record.rows if row.note))
    for about in (row.workload.about for row in record.rows):
        if "distribution" in about:
            lines.append(f"Drawn: {about['distribution']}, seed {about['seed']}.")
            break
    rounds = [one for row in record.rows for one in row.rounds]
    busiest = max(one.other_cores for one in rounds)
    if busiest >= 0.1:
        lines.append(f"Other processes kept up to {busiest:.2f} cores busy during a round: the machine was not quiet.")
    for row in record.rows:
        cached, inexact = max(one.cached for one in row.rounds), max(one.inexact for one in row.rounds)
        if cached:
            lines.append(f"{row.engine} found up to {cached:,} prompt tokens of a round in its cache.")
        if inexact:
            lines.append(
                f"{row.engine} sent several tokens a chunk in {inexact} requests; their times are interpolated."
            )
    return lines


def _cell(value: SpreadRecord | None) -> str:
    """The median, and the spread below it."""
    if value is None:
        return "-"
    low, high = _number(value.low), _number(value.high)
    return _number(value.median) + ("" if low == high else f"\n[dim]{low}..{high}[/dim]")


def _median(value: SpreadRecord | None) -> str:
    return "-" if value is None else _number(value.median)


def _number(value: float) -> str:
    """Three digits that count, at most four after the point."""
    if not value:
        return "0"
    digits = min(4, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{digits}f}"
