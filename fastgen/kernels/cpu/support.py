"""What the library can be asked for."""

from __future__ import annotations

import torch

from fastgen.kernels.cpu.library import unavailable
from fastgen.kernels.ops import Need

__all__ = ["DTYPES", "RANK", "supports"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Number formats by their code in src/op.h."""
RANK = 5
"""Above torch's operations (0) and below what a plugin brings, unless that says otherwise (10)."""
_NAMES = frozenset(str(dtype).removeprefix("torch.") for dtype in DTYPES)


def supports(need: Need) -> str | None:
    """``None``, or why the library cannot serve this need."""
    if need.device != "cpu":
        return f"runs on a CPU, not on {need.device}"
    if need.dtype not in _NAMES:
        return f"computes {' and '.join(sorted(_NAMES))}, not {need.dtype}"
    return unavailable()
