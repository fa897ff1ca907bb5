"""Keys and values in 8 bits: what the implementations of attention that offer it agree on.

A token's key (or value) of one head becomes integers from -127 to 127, with a scale in bfloat16 for every group of its
components: what a token is kept as depends on nothing but itself, so a cache filled in any order, by whatever pieces,
is the same cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastgen.kernels.paging import CacheSpec

__all__ = ["KEY_GROUP", "VALUE_GROUP", "bytes_per_token", "dequantise", "groups", "quantise"]

KEY_GROUP, VALUE_GROUP = 32, 64
"""Components that share a scale; the last group of a head may be smaller. Of keys fewer, because some of their
components are much larger than others in many models. The same as in ``cpu/src/attention_codes.h``."""
_MOST = 127
_SMALLEST = 1e-30  # scales below have no inverse worth the name: what is so small becomes 0


def groups(dim: int, group: int) -> int:
    """Scales of a head of ``dim`` components."""
    return -(-dim // group)


def bytes_per_token(spec: CacheSpec) -> int:
    """Codes and scales of one token in one layer."""
    scales = groups(spec.head_dim, KEY_GROUP)
    scales += 0 if spec.values_in_keys else groups(spec.value_dim, VALUE_GROUP)
    return spec.width + spec.kv_heads * scales * torch.bfloat16.itemsize


def quantise(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., dim]`` to codes ``[..., dim]`` int8 and scales ``[..., groups]`` bfloat16; the scale of a group with a
    NaN or an infinity in it is NaN."""
    dim = x.shape[-1]
    padded = F.pad(x.float(), (0, groups(dim, group) * group - dim))
    grouped = padded.view(*x.shape[:-1], -1, group)
    most = grouped.abs().amax(-1) + (grouped * 0).sum(-1)
    scales = (most / _MOST).bfloat16()  # rounded first, so that its own rounding is no error of the codes
    steps = scales.float()
    inverse = torch.where(steps > _SMALLEST, 1 / steps, 0.0)
    codes = (grouped * inverse[..., None]).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-_MOST, _MOST)
    return codes.to(torch.int8).flatten(-2)[..., :dim], scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """``codes [..., dim]`` and ``scales [..., groups]`` to numbers ``[..., dim]``."""
    spread = scales.float().repeat_interleave(group, -1)[..., : codes.shape[-1]]
    return (codes * spread).to(dtype)
