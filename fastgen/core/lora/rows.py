"""What a weight map's transform does to rows, so that the same can be done to the rows of a LoRA factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastgen.core.weight_map import Transform

__all__ = ["RowMap", "row_map"]


@dataclass(frozen=True)
class RowMap:
    """Where the output rows of a checkpoint module go. ``slots[slot][i]`` is the row that comes to row ``i`` of the
    slot. ``transposed``: the checkpoint stores the weight as ``[in, out]``."""

    slots: dict[str, torch.Tensor]
    transposed: bool


def row_map(transform: Transform, config: Any, rows: int, columns: int) -> RowMap | None:
    """Find out by trying: a weight whose entries are their row's number, and one of their columns' numbers.

    A transform may only slice, view, permute and concatenate, so if what it makes of the first is constant along each
    row, and of the second the numbers in order, it moves whole rows.

    Args:
        rows: of the module's weight as linear algebra has it, ``[out, in]``.
        columns: of the same.

    Returns:
        ``None`` if the transform takes no weight of this size, stored either way, or does more than move rows.
    """
    few = min(columns, 4)  # whole rows move whatever their width is; some transforms insist on the real one
    for width, transposed in dict.fromkeys(((few, False), (few, True), (columns, False), (columns, True))):
        row = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, width)
        column = torch.arange(width, dtype=torch.int32)[None].expand(rows, width)
        try:
            by_row, by_column = (
                transform((weight.t() if transposed else weight).contiguous(), config) for weight in (row, column)
            )
        except Exception:  # the transform's own: it cannot take this shape apart
            continue
        if all(_moves_rows(by_row[slot], by_column[slot], rows, width) for slot in by_row):
            return RowMap({slot: part[:, 0].long().clone() for slot, part in by_row.items()}, transposed)
    return None


def _moves_rows(by_row: torch.Tensor, by_column: torch.Tensor, rows: int, columns: int) -> bool:
    if by_row.ndim != 2 or by_row.shape[1] != columns or not len(by_row):
        return False
    in_range = int(by_row.min()) >= 0 and int(by_row.max()) < rows
    order = torch.arange(columns, dtype=by_column.dtype)
    return in_range and bool((by_row == by_row[:, :1]).all()) and bool((by_column == order).all())
