"""How parts are put together: blocks, and the decoder made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from fastgen.core.layers import Batch, CachedAttention, Norm, Rope
from fastgen.core.layers.layer import Bindable
from fastgen.core.weight_map import Destination
from fastgen.errors import PluginError
from fastgen.kernels.ops import KernelTable

__all__ = ["Block", "Decoder", "Parallel", "ParallelNorms", "PostNorm", "PreNorm", "Sandwich"]


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
    """A norm before each branch: ``x + attn(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, norm1: Norm, attn: nn.Module, norm2: Norm, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def forward(
        self, stream: torch.Tensor, delta: torch.Tensor | None, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stream, normed = self.norm1(stream, delta)
        stream, normed = self.norm2(stream, self.attn(normed, batch))
        return stream, self.mlp(normed)


class PostNorm(Block):
    """A norm after each branch, before it is added: ``x + norm(attn(x))``, then ``x + norm(mlp(x))``."""

    def __init__(self, attn: nn.Module, norm1: Norm, mlp: nn.Module, norm2: Norm) -> None:
        super().__init__()
        self.attn, self.norm1, self.mlp, self.norm2 = attn, norm1, mlp, norm2

    def forward(
        self, stream: torch.Tensor, delta: torch.Tensor | None, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stream = stream if delta is None else stream + delta
        stream = stream + self.norm1.alone(self.attn(stream, batch))
        return stream, self.norm2.alone(self.mlp(stream))


class Sandwich(Block):
    """Norms before and after each branch: ``x + post1(attn(pre1(x)))``, then ``x + post2(mlp(pre2(x)))``."""

    def __init__(self, pre1: Norm, attn: nn.Module, post1: Norm, pre2: Norm, mlp: nn.Module, post2: Norm) -> None:
        super().__init__()
        self.pre1, self.attn, self.post1 = pre1, attn, post1
        self.pre2, self.mlp, self.post2 = pre2, mlp, post2

    def forward(
        self, stream: torch.Tensor, delta: torch.Tensor | None, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stream, normed = self.pre1(stream, delta)
        stream, normed = self.pre2(stream, self.post1.alone(self.attn(normed, batch)))
        return stream, self.post2.alone(self.mlp(normed))


class Parallel(Block):
    """Both branches read one norm of the stream: ``x + attn(norm(x)) + mlp(norm(x))``."""

    def __init__(self, norm1: Norm, attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.mlp = norm1, attn, mlp

    def forward(
        self, stream: torch.Tensor, delta: torch.Tensor | None, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stream, normed = self.norm1(stream, delta)
        return stream, self.attn(normed, batch) + self.mlp(normed)


class ParallelNorms(Block):
    """Each branch reads a norm of its own of the same stream: ``x + attn(norm1(x)) + mlp(norm2(x))``."""

    def __init__(self, norm1: Norm, attn: nn.Module, norm2: Norm, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def forward(
        self, stream: torch.Tensor, delta: torch.Tensor | None, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stream, normed = self.norm1(stream, delta)
        return stream, self.attn(normed, batch) + self.mlp(self.norm2.alone(stream))


class Decoder(nn.Module):
    """A whole causal language model.

    Args:
        embed: ``(batch) -> [tokens, hidden]`` with a ``vocab_rows``, the number of ids it knows; an `Embed` or a part
            that stands for it.
        blocks: in their order.
        norm: ``(stream, delta) -> (sum, its norm)``, a `Norm` or a part that stands for it.
        head: ``[rows, hidden] -> [rows, vocab]`` with a ``vocab_rows``, the width of its logits; a `Head` or a part
            that stands for it.

    Raises:
        PluginError: an embedding or a head without ``vocab_rows``.
    """

    remarks: tuple[str, ...] = ()
    """What whoever loads this model should be told: shown as warnings, also by ``fastgen explain``."""

    def __init__(self, embed: nn.Module, blocks: Iterable[Block], norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        for name, part in (("embed", embed), ("head", head)):
            if not isinstance(getattr(part, "vocab_rows", None), int):
                raise PluginError(
                    f"the decoder's {name}, a {type(part).__name__}, does not say its vocab_rows (an int)"
                )
        self.embed, self.blocks, self.norm, self.head = embed, nn.ModuleList(blocks), norm, head
        self._ropes: tuple[Rope, ...] = ()
        for index, attention in enumerate(self.attentions()):
            attention.index = index

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Destination] | None:
        """Where each tensor of a checkpoint goes (``{name in the file: destination}``; the layer there gets it by
        ``load(slot, tail, tensor)``), from a decoder that knows by itself. ``None``: the family's weight map says it.

        Raises:
            CheckpointError: names tensors that nothing takes, parts that nothing fills, and shapes that do not fit.
        """
        return None

    def loaded(self) -> None:
        """Called once, when weights and kernels are there: for what can be computed or checked only then."""

    def attentions(self) -> Iterator[CachedAttention]:
        """Every part that keeps keys and values, in the order of its cache."""
        for module in self.modules():
            if isinstance(module, CachedAttention):
                yield module

    def bind(self, kernels: KernelTable) -> None:
        """Choose the kernels of every part. Called once, before the first pass."""
        for module in self.modules():
            if module is not self and isinstance(module, Bindable):
                module.bind(kernels)
        self._ropes = tuple(module for module in self.modules() if isinstance(module, Rope))

    def regime(self, length: int) -> tuple[int, ...]:
        """What a prompt of this length changes in the keys: part of the key of cached prefixes."""
        regimes = (rope.regime(length) for rope in self._ropes)
        return tuple(sorted({regime for regime in regimes if regime is not None}))

    def renewal(self, length: int) -> int | None:
        """The length at which all keys of a prompt of ``length`` tokens have to be computed anew; ``None``: never."""
        lengths = (rope.renewal(length) for rope in self._ropes)
        return min((found for found in lengths if found is not None), default=None)

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
