"""Rotary position embedding: the angles of this pass's tokens, once for all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fastgen.core.layers.batch import Batch
from fastgen.core.layers.frequencies import inverse_frequencies
from fastgen.core.rope_config import RopeConfig
from fastgen.errors import UnsupportedModelError
from fastgen.kernels.ops import KernelTable

__all__ = ["Rope"]


class Rope(nn.Module):
    """Turns queries and keys by their positions. One object serves every layer that shares its parameters.

    The types "dynamic" and "longrope" take their frequencies from the length of the request's own prompt (transformers
    takes them from the longest sequence of the batch so far, so that a batch mate or an earlier request can change
    them). "dynamic" keeps them while the request runs; a "longrope" request that grows past the original length is
    computed anew with the factors for long ones, as transformers' ``generate`` does.

    Args:
        config: the rope parameters of the model; the first ``rotary_dim`` components of a head turn.

    Raises:
        UnsupportedModelError: there are none.
    """

    def __init__(self, config: RopeConfig | None) -> None:
        if config is None:
            raise UnsupportedModelError("config.json has no rope settings for these layers")
        super().__init__()
        self.config = config
        # The frequencies are float32 on the CPU whatever the model's dtype and device are.
        with torch.device("cpu"):
            self.inverse, self.scale = inverse_frequencies(config, config.rotary_dim)
        self._rotary: Callable[..., torch.Tensor]
        self._by_regime: dict[int, torch.Tensor] = {}

    def bind(self, kernels: KernelTable) -> None:
        self._rotary = kernels.choose("rotary", rotary_dim=self.config.rotary_dim)

    def regime(self, length: int) -> int | None:
        """What a prompt of this length changes in the keys: ``None`` for nothing (the common case).

        Requests of different regimes cannot share cached keys.
        """
        match self.config.type:
            case "dynamic" if length > self.config.max_position_embeddings:
                return length
            case "longrope" if length > (self.config.original_max_position_embeddings or length):
                return -1  # one for all lengths, and no length itself
        return None

    def renewal(self, length: int) -> int | None:
        """The length at which the keys of a prompt of ``length`` tokens have to be computed anew; ``None``: never."""
        if self.config.type == "longrope" and self.regime(length) is None:
            return (self.config.original_max_position_embeddings or length) + 1
        return None

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``x [tokens, heads, head_dim]``, turned."""
        tables = batch.memo.get(self)
        if tables is None:
            tables = batch.memo[self] = self._tables(batch, x.dtype)
        return self._rotary(x, *tables)

    def _tables(self, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, ``[tokens, rotary_dim / 2]``, computed in float32."""
        inverse = self.inverse
        if self.config.type in ("dynamic", "longrope"):
            per_sequence = torch.stack([self._frequencies(length) for length in batch.lengths.tolist()])
            inverse = per_sequence[batch.sequence_of.cpu()]
        angles = batch.positions[:, None].float() * inverse.to(batch.positions.device)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def _frequencies(self, length: int) -> torch.Tensor:
        regime = self.regime(length)
        if regime is None:
            return self.inverse
        if regime not in self._by_regime:
            if len(self._by_regime) >= 1024:
                self._by_regime.clear()
            with torch.device("cpu"):
                self._by_regime[regime] = inverse_frequencies(
                    self.config, self.config.rotary_dim, sequence_length=length
                )[0]
        return self._by_regime[regime]
