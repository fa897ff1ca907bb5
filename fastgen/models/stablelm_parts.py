"""StableLM 2 12B's norm of queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastgen import api as fg

__all__ = ["NormPerHead"]


class NormPerHead(fg.Norm):
    """Layer norm of each head of ``[..., heads * head_dim]`` apart, with weights of its own and no bias; slots are the
    heads' numbers."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__(heads * head_dim, eps)
        self.weight = fg.parameter(heads * head_dim)
        self.heads, self.head_dim = heads, head_dim

    def want(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {(str(head), "weight"): (self.head_dim,) for head in range(self.heads)}

    def place(self, slot: str, tail: str) -> torch.Tensor:
        return self.weight.view(self.heads, self.head_dim)[int(slot)]

    def forward(self, stream: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        stream = stream if delta is None else stream + delta
        heads = stream.view(*stream.shape[:-1], self.heads, self.head_dim).float()
        normed = F.layer_norm(heads, (self.head_dim,), eps=self.eps).flatten(-2) * self.weight.float()
        return stream, normed.to(stream.dtype)
