"""The contract between parts, checkpoints and kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from fastgen.errors import ConfigError
from fastgen.kernels.ops import KernelTable

__all__ = ["Bindable", "Layer", "Want", "building", "parameter"]

_MOST_BYTES = 2**60  # torch counts bytes in 63 bits

Want = tuple[str, str]
"""``(slot, tail)``: a place one checkpoint tensor fills; tail is ``weight``, ``bias``, ..."""


@runtime_checkable
class Bindable(Protocol):
    """A part that asks for kernels once it is built."""

    def bind(self, kernels: KernelTable) -> None: ...


class Layer(nn.Module):
    """A part that owns parameters: says which checkpoint tensors must fill them, and takes each one in."""

    def want(self) -> dict[Want, tuple[int, ...]]:
        """Every place that must be filled, with the shape of the tensor that fills it."""
        raise NotImplementedError

    def place(self, slot: str, tail: str) -> torch.Tensor:
        """The view of this layer's own memory that ``(slot, tail)`` names; writing there is loading."""
        raise NotImplementedError

    def spread(self, slot: str, tail: str, tensor: torch.Tensor) -> dict[Want, torch.Tensor]:
        """The places one checkpoint tensor fills, with what goes where: itself, unless the layer can take several
        together. Also asked with tensors without data; views only."""
        return {(slot, tail): tensor}

    def load(self, slot: str, tail: str, tensor: torch.Tensor) -> None:
        """Copy one checkpoint tensor, of the shape in ``want``, into its place, converting its dtype."""
        self.place(slot, tail).copy_(tensor)


_where: ContextVar[tuple[torch.dtype, torch.device]] = ContextVar("where")


@contextmanager
def building(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Parameters made inside are of this dtype, on this device (in this thread alone, unlike torch's own defaults)."""
    token = _where.set((dtype, device))
    try:
        yield
    finally:
        _where.reset(token)


def parameter(*shape: int) -> nn.Parameter:
    """An unfilled parameter, of the dtype and on the device of `building`; serving needs no gradients.

    Raises:
        ConfigError: there is no tensor of this shape.
    """
    dtype, device = _where.get((torch.float32, torch.device("cpu")))
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > _MOST_BYTES:
        raise ConfigError(f"config.json describes a part of shape {list(shape)}, which cannot be: check its sizes")
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
