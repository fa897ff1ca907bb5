"""Tables and JSON on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["on_terminal", "print_json", "print_table"]

_CONTROL = {**dict.fromkeys([*range(32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}"), 9: "\t", 10: "\n", 13: None}


def on_terminal(text: str) -> str:
    """``text`` as it may be shown: a model's words must not move the cursor, or give a terminal orders. When standard
    output is piped, it is left as it is."""
    return text.translate(_CONTROL) if sys.stdout.isatty() else text


def print_json(value: Any) -> None:
    """``value`` as one JSON document. Raises ValueError for NaN and infinities, which JSON does not have."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    header: bool = True,
    err: bool = False,
) -> None:
    """A table: drawn on a terminal, aligned plain text, one row a line, when piped.

    Args:
        right: columns of numbers.
        header: show the columns' names.
        err: print to standard error.
    """
    if (sys.stderr if err else sys.stdout).isatty():
        _draw(columns, rows, right, header=header, err=err)
        return
    table = [*([[name.upper() for name in columns]] if header else []), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    for row in table:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        ]
        click.echo("  ".join(cells).rstrip(), err=err)


def _draw(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], *, header: bool, err: bool
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_header=header)
    for name in columns:
        table.add_column(Text(name), justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: brackets in a description are no markup
    Console(stderr=err).print(table)
