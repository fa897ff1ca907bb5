"""The linear map in the library: src/linear.cpp."""

from __future__ import annotations

import torch

from fastgen.kernels.cpu.library import library
from fastgen.kernels.cpu.support import DTYPES, RANK, supports
from fastgen.kernels.ops import Implementation

__all__ = ["IMPLEMENTATIONS", "linear"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x [tokens, in]``, ``weight [out, in]``, ``bias [out]`` -> ``[tokens, out]``, sums in float32."""
    dtype = x.dtype
    if dtype != weight.dtype or not weight.is_contiguous():  # a part that was kept in another format than the model's
        return torch.nn.functional.linear(x, weight, bias)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size = x.shape
    width = weight.shape[0]
    out = torch.empty((rows, width), dtype=dtype)
    lib = library()
    lib.call(
        lib.op("fg_linear"),
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        size,
        width,
        x.stride(0),
        width,
        DTYPES[dtype],
    )
    return out


IMPLEMENTATIONS = (Implementation("linear", "cpu", linear, supports, rank=RANK, repeatable=True),)
