"""What only some OPT checkpoints have: norms after the sums, and embeddings narrower than the stream."""

from __future__ import annotations

import torch
from torch import nn

from fastgen import api as fg

__all__ = ["NarrowEmbed", "NarrowHead", "NoNorm", "NormAfterSum"]


class NormAfterSum(fg.Block):
    """The order of the first transformers (Vaswani et al., 2017): ``norm(x + attn(x))``, then ``norm(x + mlp(x))``."""

    def __init__(self, norm1: fg.Norm, attn: nn.Module, norm2: fg.Norm, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def forward(
        self, stream: torch.Tensor, delta: torch.Tensor | None, batch: fg.Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stream = stream if delta is None else stream + delta
        _, stream = self.norm1(stream, self.attn(stream, batch))
        _, stream = self.norm2(stream, self.mlp(stream))
        return stream, None


class NoNorm(nn.Module):
    """Stands for the last norm where the last block has one already."""

    def forward(self, stream: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        stream = stream if delta is None else stream + delta
        return stream, stream


class NarrowEmbed(fg.Embed):
    """Rows of the table are widened before the positions are added."""

    positions: fg.Table

    def __init__(self, tokens: fg.Table, positions: fg.Table) -> None:
        super().__init__(tokens, positions=positions, position_offset=2)
        self.project = fg.Linear(tokens.width, positions.width)

    def forward(self, batch: fg.Batch) -> torch.Tensor:
        positions: torch.Tensor = self.positions(batch.positions + self.position_offset)
        return self.project(self.tokens(batch.ids)) + positions


class NarrowHead(fg.Head):
    """The stream is narrowed to the table's width first."""

    def __init__(self, hidden: int, tokens: fg.Table, tied: bool) -> None:
        super().__init__(tokens, tied=tied)
        self.project = fg.Linear(hidden, tokens.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(self.project(hidden))
