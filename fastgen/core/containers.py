"""How parts are put together: blocks, and the decoder made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fastgen.core.layers import MLP, Attention, Batch, Embed, Head, RMSNorm
from fastgen.core.layers.layer import Bindable
from fastgen.kernels.ops import KernelTable

__all__ = ["Block", "Decoder", "PreNorm"]


class Block(nn.Module):
    """One layer of a decoder: ``(stream, delta, batch) -> (stream, delta)``.

    ``delta`` is the branch output that is not yet added to the stream (``None`` before the first block), so that the
    addition and the next norm can run as one operation. A new order of norms and branches is a new small Block.
    """

    def forward(
        self, stream: torch.Tensor, delta: torch.Tensor | None, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError


class PreNorm(Block):
    """A norm before each branch, as in GPT-2 and Llama."""

    def __init__(self, norm1: RMSNorm, attn: Attention, norm2: RMSNorm, mlp: MLP) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def forward(
        self, stream: torch.Tensor, delta: torch.Tensor | None, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stream, normed = self.norm1(stream, delta)
        stream, normed = self.norm2(stream, self.attn(normed, batch))
        return stream, self.mlp(normed)


class Decoder(nn.Module):
    """A whole causal language model."""

    def __init__(self, embed: Embed, blocks: Iterable[Block], norm: RMSNorm, head: Head) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm, self.head = embed, nn.ModuleList(blocks), norm, head
        for index, attention in enumerate(self.attentions()):
            attention.index = index

    def attentions(self) -> Iterator[Attention]:
        """Every part that keeps keys and values, in the order of its cache."""
        for module in self.modules():
            if isinstance(module, Attention):
                yield module

    def bind(self, kernels: KernelTable) -> None:
        """Choose the kernels of every part. Called once, before the first pass."""
        for module in self.modules():
            if module is not self and isinstance(module, Bindable):
                module.bind(kernels)

    def regime(self, length: int) -> tuple[int, ...]:
        """What a prompt of this length changes in the keys: part of the key of cached prefixes."""
        regimes = (attention.rope.regime(length) for attention in self.attentions())
        return tuple(sorted({regime for regime in regimes if regime is not None}))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits of the rows asked for, ``[len(batch.rows), vocab]``."""
        stream: torch.Tensor = self.embed(batch)
        delta: torch.Tensor | None = None
        for block in self.blocks:
            stream, delta = block(stream, delta, batch)
        # Norm and head only where somebody will read the logits.
        stream = stream.index_select(0, batch.rows)
        delta = None if delta is None else delta.index_select(0, batch.rows)
        logits: torch.Tensor = self.head(self.norm(stream, delta)[1])
        return logits
