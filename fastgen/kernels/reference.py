"""Every operation in plain torch: the meaning of each, and the implementation that runs anywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fastgen.kernels.ops import Implementation
from fastgen.kernels.reference_attention import TorchPagedAttention

__all__ = ["ACTIVATIONS", "IMPLEMENTATIONS"]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
"""By the names in transformers' configs."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.index_select(0, ids)


def add_rms_norm(
    stream: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm (Zhang and Sennrich, 2019), statistics in float32, the product in the weight's dtype."""
    if delta is not None:
        stream = stream + delta
    if stream.dtype == torch.float32:
        return stream, F.rms_norm(stream, weight.shape, weight, eps)
    wide = stream.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return stream, wide.to(stream.dtype) * weight


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021) in the half-split pairing of GPT-NeoX: component i turns with
    component i + rotary_dim / 2."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.empty_like(x)
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., half : 2 * half]).addcmul_(first, sin)
    if x.shape[-1] > 2 * half:
        turned[..., 2 * half :] = x[..., 2 * half :]
    return turned


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    return ACTIVATIONS[name](x)


def gated_activation(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[name](gate) * up


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *(
        Implementation(function.__name__, "torch", function, rank=0)
        for function in (linear, embedding, add_rms_norm, rotary, activation, gated_activation)
    ),
    Implementation("paged_attention", "torch", TorchPagedAttention, rank=0),
)
