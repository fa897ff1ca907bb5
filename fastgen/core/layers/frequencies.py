"""Rotary frequencies of every rope type: the maths of transformers' ``modeling_rope_utils``, step for step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastgen.core.rope_config import RopeConfig
from fastgen.errors import UnsupportedModelError

__all__ = ["inverse_frequencies"]


def inverse_frequencies(
    rope: RopeConfig, rotary_dim: int, *, sequence_length: int | None = None
) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair, and the factor that multiplies cosines and sines.

    Args:
        rope: The settings.
        rotary_dim: Rotated dimensions per head, even; usually ``rope.rotary_dim``.
        sequence_length: For the types ``"dynamic"`` and ``"longrope"``: the length in tokens they are chosen for.
            Unset, or up to the length the model was trained at, they are the model's own.

    Returns:
        Frequencies ``[rotary_dim / 2]``, float32, on the CPU, and the attention factor (1.0 but for ``"yarn"`` and
        ``"longrope"``).

    Raises:
        UnsupportedModelError: a type that is not known.
    """
    match rope.type:
        case "default":
            return _powers(rope.theta, rotary_dim), 1.0
        case "linear":
            return _powers(rope.theta, rotary_dim) / _set(rope, "factor"), 1.0
        case "dynamic":
            return _dynamic(rope, rotary_dim, sequence_length), 1.0
        case "llama3":
            return _llama3(rope, rotary_dim), 1.0
        case "yarn":
            return _yarn(rope, rotary_dim), _yarn_attention_factor(rope)
        case "longrope":
            return _longrope(rope, rotary_dim, sequence_length), _longrope_attention_factor(rope)
    raise UnsupportedModelError(f"rope type {rope.type!r} is not supported")


def _set(rope: RopeConfig, name: str) -> float:
    value: float | None = getattr(rope, name)
    if value is None:
        raise UnsupportedModelError(f"rope type {rope.type!r} needs {name}, which is not set")
    return value


def _exponents(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim


def _powers(theta: float, rotary_dim: int) -> Tensor:
    return 1.0 / (theta ** _exponents(rotary_dim))


def _dynamic(rope: RopeConfig, rotary_dim: int, sequence_length: int | None) -> Tensor:
    """NTK-aware scaling: the base grows with the length, so that the slowest pair stretches by ``factor``."""
    factor, limit = _set(rope, "factor"), rope.max_position_embeddings
    length = max(sequence_length or 0, limit)
    stretch = (factor * length / limit) - (factor - 1)
    return _powers(rope.theta * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim)


def _llama3(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Slow pairs are divided by ``factor``, fast ones kept, and those between blended."""
    factor, original = _set(rope, "factor"), _set(rope, "original_max_position_embeddings")
    low, high = _set(rope, "low_freq_factor"), _set(rope, "high_freq_factor")
    kept = _powers(rope.theta, rotary_dim)
    wavelength = 2 * math.pi / kept
    divided = torch.where(wavelength > original / low, kept / factor, kept)
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * divided / factor + blend * divided
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, divided)


def _yarn(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over the pairs, from kept to divided by ``factor``."""
    factor, original = _set(rope, "factor"), _set(rope, "original_max_position_embeddings")

    def pair_of(rotations: float) -> float:
        return (rotary_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = torch.clamp((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)

    base = rope.theta ** _exponents(rotary_dim)
    keep = 1 - ramp
    return 1.0 / (factor * base) * (1 - keep) + 1.0 / base * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """An explicit factor wins; then the ratio of the two mscale terms; then the paper's 0.1 ln(factor) + 1."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _set(rope, "factor")

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _longrope(rope: RopeConfig, rotary_dim: int, sequence_length: int | None) -> Tensor:
    """LongRoPE (https://arxiv.org/abs/2402.13753): a divisor for each pair, from one of two lists."""
    original = _set(rope, "original_max_position_embeddings")
    factors = rope.long_factor if (sequence_length or 0) > original else rope.short_factor
    divisors = torch.tensor(factors, dtype=torch.float32, device="cpu")
    return 1.0 / (divisors * rope.theta ** _exponents(rotary_dim))


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor, original = _set(rope, "factor"), _set(rope, "original_max_position_embeddings")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
