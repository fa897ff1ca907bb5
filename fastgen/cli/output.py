"""Tables and JSON on standard output."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["on_terminal", "print_json", "print_table"]

_CONTROL = {**dict.fromkeys([*range(32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}"), 9: "\t", 10: "\n", 13: None}


NARROWEST, PROSE = 8, 20
"""Columns of a terminal that a table's column keeps, and that its last one does, where there is not room for all."""


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
    table = [[" ".join(cell.splitlines()) for cell in row] for row in table]
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
    """By hand: importing a library for it would take a third of the time that `fastgen models` takes."""
    table = [[_one_line(cell) for cell in row] for row in ([columns, *rows] if header else rows)]
    if not table:
        return
    widths = _fitted([max(_cells(row[i]) for row in table) for i in range(len(columns))])
    for number, row in enumerate(table):
        folded = [_fold(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, folded))):
            parts = [cell[line] if line < len(cell) else "" for cell in folded]
            aligned = [
                " " * (width - _cells(part)) + part if name in right else part + " " * (width - _cells(part))
                for part, width, name in zip(parts, widths, columns, strict=True)
            ]
            text = "  ".join(aligned).rstrip()
            click.echo(click.style(text, bold=True) if header and number == 0 else text, err=err)
        if header and number == 0:
            click.echo("─" * (sum(widths) + 2 * (len(widths) - 1)), err=err)


def _one_line(text: str) -> str:
    """``text`` without anything that would move the cursor."""
    return " ".join(text.translate(_CONTROL).split("\n")).replace("\t", " ")


def _cells(text: str) -> int:
    """Columns of the terminal that ``text`` takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def _fitted(widths: list[int]) -> list[int]:
    """``widths``, made narrower until the table fits the terminal: the last column, which holds prose, then the
    widest."""
    room = shutil.get_terminal_size().columns - 2 * (len(widths) - 1)
    last = len(widths) - 1
    while sum(widths) > room and max(widths) > NARROWEST:
        narrowed = last if widths[last] > PROSE else widths.index(max(widths))
        widths[narrowed] -= 1
    return widths


def _fold(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` columns, broken between words where that is possible."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if _cells(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for char in word:
            if _cells(lines[-1] + char) > width:
                lines.append("")
            lines[-1] += char
    return lines
