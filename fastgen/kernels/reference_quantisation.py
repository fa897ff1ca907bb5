"""Quantised linear maps in plain torch: what they mean, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastgen.kernels.quantisation import GROUPS

__all__ = ["TorchQuantisedLinear", "grouped", "quantise_activations", "quantise_int4", "quantise_int8", "rotated"]

_TINY = 1e-30
"""A scale whose inverse could not be represented is none: what it would scale is zero."""
_CUTS = (0.0, 0.025, 0.05, 0.075, 0.1)
"""Shares of a group's range that are tried to be cut off at either end, so that the rest gets finer steps."""


def grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[rows, size] -> [rows, groups, group]`` float32, padded with zeros."""
    return F.pad(x.float(), (0, -x.shape[1] % group)).view(len(x), -(-x.shape[1] // group), group)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """``x [..., group]`` times the Walsh-Hadamard matrix of a power of two, not normalised: twice gives ``group * x``.

    Each sum adds two numbers, in an order that other implementations keep, so that all have the same bits.
    """
    shape, step = x.shape, 1
    while step < shape[-1]:
        first, second = x.reshape(-1, 2, step).unbind(1)
        x = torch.stack((first + second, first - second), 1)
        step *= 2
    return x.view(shape)


def quantise_activations(scheme: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [tokens, in]`` -> integers ``[tokens, groups, group]`` (as float32, -127..127) and scales
    ``[tokens, groups, 1]`` (NaN where a group is not finite); of the rotated activations for int8."""
    wide = grouped(x, GROUPS[scheme])
    if scheme == "int8":
        wide = rotated(wide)
    greatest = wide.abs().amax(-1, keepdim=True)
    used = greatest.isfinite() & (greatest >= _TINY)
    most = torch.full_like(greatest, 127)
    integers = torch.where(used, (wide * (most / greatest)).round(), 0.0)
    scales = torch.where(used, greatest / most, torch.where(greatest.isfinite(), 0.0, torch.nan))
    return integers, scales


def quantise_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight [out, in]`` -> of the rotated weight, integers -127..127 ``[out, groups, 64]`` int8 and scales
    ``[out, groups, 1]`` bfloat16; the rotations' norm is in the scales."""
    wide = rotated(grouped(weight, GROUPS["int8"]))
    greatest = wide.abs().amax(-1, keepdim=True)
    scales = torch.where(greatest.isfinite(), greatest / 127, torch.nan).bfloat16()
    integers = torch.where(greatest.isfinite(), wide * _inverse(scales), 0.0).round()
    return integers.to(torch.int8), scales / GROUPS["int8"]


def quantise_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``weight [out, in]`` -> levels 0..15 ``[out, groups, 32]`` uint8, scales and minima ``[out, groups, 1]`` bfloat16
    (a scale is NaN where its group is not finite).

    Of several ranges, each refitted to the levels it gives by linear regression, the one of least squared error.
    """
    wide = grouped(weight, GROUPS["int4"])
    low, high = wide.aminmax(dim=-1, keepdim=True)
    finite = (high - low).isfinite()
    scales, minima = ((high - low) / 15).bfloat16(), low.bfloat16()
    least = _squared_error(wide, scales, minima)
    for cut in _CUTS:
        tried = _refitted(wide, (high - low) * ((1 - 2 * cut) / 15), low + (high - low) * cut)
        error = _squared_error(wide, *tried)
        better = error < least
        scales, minima = torch.where(better, tried[0], scales), torch.where(better, tried[1], minima)
        least = torch.where(better, error, least)
    levels = torch.where(finite, _levels(wide, scales, minima), 0)
    return levels.to(torch.uint8), torch.where(finite, scales, torch.nan), minima


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    wide = scales.float()
    return torch.where(wide >= _TINY, 1 / wide, 0.0)


def _levels(wide: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    return ((wide - minima.float()) * _inverse(scales)).clamp(0, 15).round()


def _squared_error(wide: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    return (_levels(wide, scales, minima) * scales.float() + minima.float() - wide).square().sum(-1, keepdim=True)


def _refitted(wide: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    levels = _levels(wide, scales.bfloat16(), minima.bfloat16())
    centre, mean = levels.mean(-1, keepdim=True), wide.mean(-1, keepdim=True)
    spread = (levels - centre).square().sum(-1, keepdim=True)
    slope = ((levels - centre) * (wide - mean)).sum(-1, keepdim=True) / spread
    slope = torch.where(spread > 0, slope, scales).bfloat16()
    return slope, (mean - slope.float() * centre).bfloat16()


class TorchQuantisedLinear:
    """Multiplies what the integers stand for in float32, where every product of a group is exact.

    Packed, int8: bfloat16 scales ``[out, groups]``, then int8 ``[out, groups, 64]``. int4: bfloat16 scales
    ``[out, groups]``, minima ``[out, groups]``, then bytes ``[out, groups, 16]``, with a group's first 16 levels in
    their lower halves.
    """

    def layout(self, scheme: str) -> str:
        return "reference-2"

    def packed_bytes(self, scheme: str, out_features: int, in_features: int) -> int:
        groups = out_features * -(-in_features // GROUPS[scheme])
        return groups * (GROUPS[scheme] + 2 if scheme == "int8" else GROUPS[scheme] // 2 + 4)

    def pack(self, scheme: str, weight: torch.Tensor) -> torch.Tensor:
        if scheme == "int8":
            integers, scales = quantise_int8(weight)
            return torch.cat([_bytes(scales), _bytes(integers)])
        levels, scales, minima = quantise_int4(weight)
        low, high = levels.chunk(2, -1)
        return torch.cat([_bytes(scales), _bytes(minima), _bytes(low | high << 4)])

    def linear(
        self, scheme: str, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
    ) -> torch.Tensor:
        integers, scales = quantise_activations(scheme, x)
        weight = self._quantised(scheme, packed, out_features, integers.shape[1])
        bias = None if bias is None else bias.float()
        return F.linear((integers * scales).flatten(1), weight.flatten(1), bias).to(x.dtype)

    def unpack(self, scheme: str, packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
        weight = self._quantised(scheme, packed, out_features, -(-in_features // GROUPS[scheme]))
        if scheme == "int8":
            weight = rotated(weight)
        return weight.flatten(1)[:, :in_features].contiguous()

    def _quantised(self, scheme: str, packed: torch.Tensor, out_features: int, groups: int) -> torch.Tensor:
        """What the integers stand for, ``[out, groups, group]``."""
        shape = (out_features, groups, -1)
        part = 2 * out_features * groups
        scales = packed[:part].view(torch.bfloat16).view(shape).float()
        if scheme == "int8":
            return packed[part:].view(torch.int8).view(shape) * scales
        minima = packed[part : 2 * part].view(torch.bfloat16).view(shape).float()
        pairs = packed[2 * part :].view(shape)
        return torch.cat([pairs & 15, pairs >> 4], -1) * scales + minima


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)
