"""Tables and JSON on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["print_json", "print_table"]


def print_json(value: Any) -> None:
    """``value`` as one JSON document. Raises ValueError for NaN and infinities, which JSON does not have."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """A table: drawn on a terminal, aligned plain text, one row a line, when piped. ``right``: columns of numbers."""
    if sys.stdout.isatty():
        _draw(columns, rows, right)
        return
    table = [[name.upper() for name in columns], *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    for row in table:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(Text(name), justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: brackets in a description are no markup
    Console().print(table)
