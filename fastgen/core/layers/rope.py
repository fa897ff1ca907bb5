"""Rotary position embedding: the angles of this pass's tokens, once for all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastgen.core.hf_config import RopeConfig
from fastgen.core.layers.batch import Batch
from fastgen.core.layers.frequencies import inverse_frequencies
from fastgen.errors import UnsupportedModelError
from fastgen.kernels.ops import KernelTable

__all__ = ["Rope"]


class Rope:
    """Turns queries and keys by their positions. One object serves every layer that shares its parameters.

    The dynamic type takes its base from the length of the request's own prompt and keeps it while the request runs.
    (transformers takes it from the longest sequence of the batch so far, so that a batch mate or an earlier request can
    change it.)

    Args:
        config: the rope parameters of the model; the first ``rotary_dim`` components of a head turn.

    Raises:
        UnsupportedModelError: there are none.
    """

    def __init__(self, config: RopeConfig | None) -> None:
        if config is None:
            raise UnsupportedModelError("config.json has no rope settings for these layers")
        self.config = config
        # The frequencies are float32 on the CPU whatever the model's dtype and device are.
        with torch.device("cpu"):
            self.inverse, self.scale = inverse_frequencies(config, config.rotary_dim)
        self._rotary: Callable[..., torch.Tensor]
        self._by_length: dict[int, torch.Tensor] = {}

    def bind(self, kernels: KernelTable) -> None:
        self._rotary = kernels.choose("rotary", rotary_dim=self.config.rotary_dim)

    def regime(self, length: int) -> int | None:
        """What a prompt of this length changes in the keys: ``None`` for nothing (the common case).

        Requests of different regimes cannot share cached keys.
        """
        if self.config.type != "dynamic" or length <= self.config.max_position_embeddings:
            return None
        return length

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``x [tokens, heads, head_dim]``, turned."""
        tables = batch.memo.get(self)
        if tables is None:
            tables = batch.memo[self] = self._tables(batch, x.dtype)
        return self._rotary(x, *tables)

    def _tables(self, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, ``[tokens, rotary_dim / 2]``, computed in float32."""
        inverse = self.inverse
        if self.config.type == "dynamic":
            per_sequence = torch.stack([self._frequencies(length) for length in batch.lengths.tolist()])
            inverse = per_sequence[batch.sequence_of.cpu()]
        angles = batch.positions[:, None].float() * inverse.to(batch.positions.device)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def _frequencies(self, length: int) -> torch.Tensor:
        if self.regime(length) is None:
            return self.inverse
        if length not in self._by_length:
            if len(self._by_length) >= 1024:
                self._by_length.clear()
            with torch.device("cpu"):
                self._by_length[length] = inverse_frequencies(
                    self.config, self.config.rotary_dim, sequence_length=length
                )[0]
        return self._by_length[length]
