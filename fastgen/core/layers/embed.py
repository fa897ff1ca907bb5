"""Tokens in, logits out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fastgen.core.layers.batch import Batch
from fastgen.core.layers.layer import Layer, Want, parameter
from fastgen.core.layers.linear import Linear
from fastgen.kernels.ops import KernelTable

__all__ = ["Embed", "Head", "Table"]


class Table(Layer):
    """Rows looked up by number: ``[rows, width]``."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self.weight = parameter(rows, width)
        self._embedding: Callable[..., torch.Tensor]

    def want(self) -> dict[Want, tuple[int, ...]]:
        return {("", "weight"): (self.rows, self.width)}

    def place(self, slot: str, tail: str) -> torch.Tensor:
        return self.weight

    def bind(self, kernels: KernelTable) -> None:
        self._embedding = kernels.choose("embedding", rows=self.rows, width=self.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(ids, self.weight)


class Embed(nn.Module):
    """The first stream of a decoder, ``[tokens, hidden]``."""

    def __init__(self, tokens: Table) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, batch: Batch) -> torch.Tensor:
        stream: torch.Tensor = self.tokens(batch.ids)
        return stream


class Head(nn.Module):
    """Logits, ``[rows, vocab]``, from its own projection or, tied, from the table of the embedding."""

    def __init__(self, proj: Linear | None = None, *, tied: Table | None = None) -> None:
        super().__init__()
        if (proj is None) == (tied is None):
            raise ValueError("a head has a projection of its own or the embedding's table: give one of them")
        self.proj = proj
        self._tied = (tied,)  # in a tuple: the table is the embedding's part, not ours
        self._linear: Callable[..., torch.Tensor]

    @property
    def vocab_rows(self) -> int:
        """Rows of logits."""
        table = self._tied[0]
        if table is not None:
            return table.rows
        assert self.proj is not None
        return self.proj.out_features

    def bind(self, kernels: KernelTable) -> None:
        table = self._tied[0]
        if table is not None:
            self._linear = kernels.choose("linear", in_features=table.width, out_features=table.rows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        table = self._tied[0]
        if table is not None:
            return self._linear(hidden, table.weight, None)
        assert self.proj is not None
        return self.proj(hidden)
