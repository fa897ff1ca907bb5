"""Quantised linear maps in the library: src/quant_int8.cpp, quant_int4.cpp, quant_pack.cpp.

The packed form: src/quant.h.
"""

from __future__ import annotations

from array import array
from functools import cache

import torch

from fastgen.kernels.cpu.library import Library, library
from fastgen.kernels.cpu.support import DTYPES, RANK, supports
from fastgen.kernels.ops import Implementation
from fastgen.kernels.quantisation import GROUPS
from fastgen.kernels.reference_quantisation import rotated

__all__ = ["IMPLEMENTATIONS", "CpuQuantisedLinear"]


class CpuQuantisedLinear:
    """Keeps nothing of a call: it may be made again with the same pointers."""

    def layout(self, scheme: str) -> str:
        return f"cpu-2-panel{_panel(library())}"

    def packed_bytes(self, scheme: str, out_features: int, in_features: int) -> int:
        panel = _panel(library())
        groups = -(-out_features // panel) * -(-in_features // GROUPS[scheme])
        return 4 * groups * (panel // 2) * _words(scheme)

    def pack(self, scheme: str, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype not in DTYPES:
            weight = weight.float()
        weight = weight.contiguous()
        width, size = weight.shape
        packed = torch.empty(self.packed_bytes(scheme, width, size), dtype=torch.uint8)
        lib = library()
        lib.call(lib.op(f"fg_pack_{scheme}"), weight.data_ptr(), packed.data_ptr(), width, size, DTYPES[weight.dtype])
        return packed

    def linear(
        self, scheme: str, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
    ) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
            bias = bias.to(x.dtype).contiguous()
        rows, size = x.shape
        out = torch.empty((rows, out_features), dtype=x.dtype)
        lib = library()
        lib.call(
            lib.op(f"fg_linear_{scheme}"),
            x.data_ptr(),
            packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            out_features,
            x.stride(0),
            out_features,
            DTYPES[x.dtype],
        )
        return out

    def unpack(self, scheme: str, packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
        panel, words = _panel(library()), _words(scheme)
        groups = packed.view(torch.int32).view(-1, -(-in_features // GROUPS[scheme]), panel // 2 * words)
        weight = _int8(groups, panel) if scheme == "int8" else _int4(groups, panel)
        return weight.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)[:out_features, :in_features].contiguous()


@cache
def _panel(lib: Library) -> int:
    """Outputs that lie side by side in packed weights: kPanel of src/quant.h."""
    panel = array("q", [0])
    lib.call(lib.op("fg_quant_panel"), panel.buffer_info()[0])
    return panel[0]


def _words(scheme: str) -> int:
    """32-bit words that a group of inputs takes for two outputs."""
    return GROUPS["int8"] // 2 + 1 if scheme == "int8" else GROUPS["int4"] // 4 + 2


def _int8(groups: torch.Tensor, panel: int) -> torch.Tensor:
    """``[panels, groups, words]`` -> ``[panels, groups, panel, group]``."""
    scales = groups[..., : panel // 2].contiguous().view(torch.bfloat16).float()
    values = groups[..., panel // 2 :].contiguous().view(torch.uint8)
    values = values.view(*groups.shape[:2], -1, panel, 4).transpose(2, 3).flatten(3)
    return rotated((values.float() - 128) * scales[..., None])


def _int4(groups: torch.Tensor, panel: int) -> torch.Tensor:
    """``[panels, groups, words]`` -> ``[panels, groups, panel, group]``."""
    minima, scales = (
        groups[..., :panel].contiguous().view(torch.bfloat16).float().view(*groups.shape[:2], -1, 2, 1).unbind(3)
    )
    pairs = groups[..., panel:].contiguous().view(torch.uint8).view(*groups.shape[:2], -1, panel, 1, 4).transpose(2, 3)
    return torch.cat([pairs & 15, pairs >> 4], -2).flatten(3) * scales + minima


IMPLEMENTATIONS = (Implementation("quantised_linear", "cpu", CpuQuantisedLinear, supports, rank=RANK, repeatable=True),)
"""What the library can be asked for."""
