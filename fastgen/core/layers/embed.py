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
    """The first stream of a decoder, ``[tokens, hidden]``: ``tokens[id] * scale + positions[position + offset]``.

    Args:
        tokens: a row for each token id.
        positions: learned position embeddings, if the model has them.
        position_offset: of the row for position 0.
        scale: of the token's row, in the model's dtype.
    """

    def __init__(
        self,
        tokens: Table,
        *,
        positions: Table | None = None,
        position_offset: int = 0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions
        self.position_offset = position_offset
        # Rounded as the checkpoint's training rounded it: to the model's dtype, first.
        self.scale = None if scale is None else _rounded(scale, tokens.weight.dtype)

    @property
    def vocab_rows(self) -> int:
        """Ids it knows."""
        return self.tokens.rows

    def forward(self, batch: Batch) -> torch.Tensor:
        stream: torch.Tensor = self.tokens(batch.ids)
        if self.scale is not None:
            stream = stream * self.scale
        if self.positions is not None:
            stream = stream + self.positions(batch.positions + self.position_offset)
        return stream


def _rounded(number: float, dtype: torch.dtype) -> float:
    with torch.device("cpu"):
        return torch.tensor(number, dtype=dtype).item()


class Head(nn.Module):
    """Logits, ``[rows, vocab]``, from the table of the embedding or from a projection of its size.

    Args:
        tokens: the embedding's table.
        tied: whether the logits come from it; if not, the part ``proj`` is the head's own.
        bias: whether its own projection has one.
        scale: multiplies the logits.
        softcap: ``softcap * tanh(logits / softcap)``, after the scale.
    """

    def __init__(
        self,
        tokens: Table,
        *,
        tied: bool,
        bias: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.proj = None if tied else Linear(tokens.width, tokens.rows, bias=bias)
        self.scale, self.softcap = scale, softcap
        self._table = (tokens,)  # in a tuple: the table is the embedding's part, not ours
        self.weight: nn.Parameter | None = None
        self._linear: Callable[..., torch.Tensor]
        self._substitute: Callable[..., torch.Tensor] | None = None

    @property
    def vocab_rows(self) -> int:
        """Rows of logits."""
        return self._table[0].rows

    @property
    def tied(self) -> Table | None:
        """The table that the logits come from, if it is the embedding's."""
        return self._table[0] if self.proj is None else None

    def substitute(self, weight: torch.Tensor, linear: Callable[..., torch.Tensor]) -> None:
        """Take the logits from a copy of the embedding's table in another form, by which ``linear(x, weight, None)``
        multiplies, whatever is bound later. The look-up of ids keeps the table."""
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._substitute = linear

    def bind(self, kernels: KernelTable) -> None:
        table = self._table[0]
        self._linear = self._substitute or kernels.choose("linear", in_features=table.width, out_features=table.rows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.proj is not None:
            logits = self.proj(hidden)
        else:
            logits = self._linear(hidden, self._table[0].weight if self.weight is None else self.weight, None)
        if self.scale is not None:
            logits = logits * self.scale
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
