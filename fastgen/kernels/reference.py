"""Every operation in plain torch: the meaning of each, and the implementation that runs anywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fastgen.kernels.ops import Implementation
from fastgen.kernels.reference_attention import TorchPagedAttention
from fastgen.kernels.reference_quantisation import TorchQuantisedLinear

__all__ = ["ACTIVATIONS", "IMPLEMENTATIONS", "argmax", "mix_experts"]

_STRIPE = 128  # columns whose maximum is taken in one go


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_accurate": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_python": F.gelu,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "mish": F.mish,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
"""By the names in transformers' configs."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.index_select(0, ids)


def add_rms_norm(
    stream: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm (Zhang and Sennrich, 2019), statistics in float32. The product is in the weight's dtype,
    but with an offset, where ``offset + weight`` would lose the weight's last bits, in float32."""
    if delta is not None:
        stream = stream + delta
    if stream.dtype == torch.float32:
        return stream, F.rms_norm(stream, weight.shape, offset + weight if offset else weight, eps)
    wide = stream.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return stream, (wide * (offset + weight.float())).to(stream.dtype)
    return stream, wide.to(stream.dtype) * weight


def add_layer_norm(
    stream: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer norm (Ba et al., 2016)."""
    if delta is not None:
        stream = stream + delta
    return stream, F.layer_norm(stream, stream.shape[-1:], weight, bias, eps)


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


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    activation_name: str,
) -> torch.Tensor:
    """A mixture of gated experts."""

    def run(expert: int, inputs: torch.Tensor, out: torch.Tensor) -> None:
        inner = gated_activation(F.linear(inputs, gate_up[expert]), activation_name)
        torch.mm(inner, down[expert].t(), out=out)

    return mix_experts(x, chosen, weights, len(gate_up), run)


def mix_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    count: int,
    run: Callable[[int, torch.Tensor, torch.Tensor], None],
) -> torch.Tensor:
    """The chosen experts' weighted sum, whatever an expert is: each runs once, on all tokens that chose it.

    Args:
        x: ``[tokens, hidden]``.
        chosen, weights: ``[tokens, k]``, the former int64.
        count: how many experts there are.
        run: ``(expert, inputs [n, hidden], out [n, hidden])``: puts into ``out`` what an expert makes of ``inputs``.
    """
    per_token = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # choices, sorted by their expert
    tokens = chosen.flatten().bincount(minlength=count).tolist()
    inputs = x.index_select(0, order // per_token)
    outputs = torch.empty_like(inputs)
    first = 0
    for expert, n in enumerate(tokens):
        if n:
            run(expert, inputs[first : first + n], outputs[first : first + n])
            first += n
    outputs *= weights.flatten().index_select(0, order).unsqueeze(1).to(outputs.dtype)
    # Each token's choices side by side, added in the order they were chosen, whatever else is in the pass.
    sorted_back = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return sorted_back.view(len(x), per_token, -1).sum(1)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """As ``x.argmax(-1)``, which on a CPU takes ten times as long as a maximum, because it carries indices along: here
    only within the stripe that has the row's."""
    size = x.shape[1]
    stripes = size // _STRIPE
    if x.device.type != "cpu" or stripes < 2:
        return x.argmax(-1)
    whole = torch.unflatten(x[:, : stripes * _STRIPE], 1, (stripes, _STRIPE))
    stripe = whole.amax(-1).max(-1).indices
    inside = whole[torch.arange(len(x)), stripe].max(-1)
    peaks, places = inside.values, inside.indices + stripe * _STRIPE
    if stripes * _STRIPE < size:
        rest = x[:, stripes * _STRIPE :].max(-1)
        later = (rest.values > peaks) | (rest.values.isnan() & ~peaks.isnan())
        places = places.where(~later, rest.indices + stripes * _STRIPE)
    return places


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *(
        Implementation(function.__name__, "torch", function, rank=0, repeatable=function is not experts)
        for function in (
            linear,
            embedding,
            add_rms_norm,
            add_layer_norm,
            rotary,
            activation,
            gated_activation,
            experts,
            argmax,
        )
    ),
    Implementation("paged_attention", "torch", TorchPagedAttention, rank=0),
    Implementation("quantised_linear", "torch", TorchQuantisedLinear, rank=0),
)
