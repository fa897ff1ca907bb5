"""Norms, rotary embedding, activations, look-ups and the greatest of a row in the library: src/norm.cpp, rope.cpp,
activation.cpp, embedding.cpp, rows.cpp.

They mean what the functions of these names in ``fastgen/kernels/reference.py`` mean, bfloat16 rounded where they round
it, without gradients. What the library does not take (a part kept in another format than the model's, shapes to be
broadcast) goes to those.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from functools import cache, partial

import torch

from fastgen.kernels import reference
from fastgen.kernels.cpu.library import library
from fastgen.kernels.cpu.support import DTYPES, RANK, supports
from fastgen.kernels.cpu.tape import again
from fastgen.kernels.ops import Implementation, Need

__all__ = [
    "IMPLEMENTATIONS",
    "activation",
    "add_layer_norm",
    "add_rms_norm",
    "argmax",
    "embedding",
    "gated_activation",
    "rotary",
]

_CODES = {
    "gelu": 0,
    "gelu_accurate": 1,
    "gelu_fast": 1,
    "gelu_new": 1,
    "gelu_python": 0,
    "gelu_python_tanh": 1,
    "gelu_pytorch_tanh": 1,
    "mish": 2,
    "quick_gelu": 3,
    "relu": 4,
    "relu2": 5,
    "sigmoid": 6,
    "silu": 7,
    "swish": 7,
    "tanh": 8,
}
"""Activations by their code in src/activation.h."""


@cache
def _operation(name: str) -> Callable[..., None]:
    lib = library()
    return partial(lib.call, lib.op(name))


def add_rms_norm(
    stream: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``stream [..., size]`` (plus ``delta``, of its shape) and its norm times ``offset + weight [size]``."""
    dtype, size = stream.dtype, stream.shape[-1]
    if not _norm_fits(dtype, size, stream, delta, weight):
        return reference.add_rms_norm(stream, delta, weight, eps, offset)
    stream, delta, added, normed = _norm_tensors(stream, delta)
    _operation("fg_add_rms_norm")(
        stream.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        added.data_ptr(),
        normed.data_ptr(),
        stream.numel() // size,
        size,
        float(eps),
        float(offset),
        DTYPES[dtype],
    )
    return added, normed


def add_layer_norm(
    stream: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``stream [..., size]`` (plus ``delta``, of its shape) and its norm, by ``weight [size]`` and ``bias [size]``."""
    dtype, size = stream.dtype, stream.shape[-1]
    if not _norm_fits(dtype, size, stream, delta, weight, bias):
        return reference.add_layer_norm(stream, delta, weight, bias, eps)
    stream, delta, added, normed = _norm_tensors(stream, delta)
    _operation("fg_add_layer_norm")(
        stream.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        added.data_ptr(),
        normed.data_ptr(),
        stream.numel() // size,
        size,
        float(eps),
        DTYPES[dtype],
    )
    return added, normed


def _norm_tensors(
    stream: torch.Tensor, delta: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """``stream`` and ``delta``, contiguous, and room for their sum (with no delta, the stream itself) and its norm."""
    if not stream.is_contiguous():
        stream = stream.contiguous()
    if delta is None:
        return stream, None, stream, torch.empty_like(stream)
    if not delta.is_contiguous():
        delta = delta.contiguous()
    return stream, delta, torch.empty_like(stream), torch.empty_like(stream)


def _norm_fits(
    dtype: torch.dtype, size: int, stream: torch.Tensor, delta: torch.Tensor | None, *parameters: torch.Tensor | None
) -> bool:
    """Whether all are of one format that the library knows, and of the sizes it reads."""
    if size == 0 or dtype not in DTYPES:
        return False
    if delta is not None and (delta.dtype != dtype or delta.numel() != stream.numel()):
        return False
    for one in parameters:
        if one is not None and (one.dtype != dtype or one.numel() != size or not one.is_contiguous()):
            return False
    return True


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x [tokens, heads, head_dim]``, also one part of wider rows, turned by ``cos`` and ``sin [tokens, rotary_dim /
    2]``."""
    dtype, half = x.dtype, cos.shape[-1]
    tokens, heads, size = x.shape
    count = tokens * half
    if (
        dtype not in DTYPES
        or cos.dtype != dtype
        or sin.dtype != dtype
        or cos.numel() != count
        or sin.numel() != count
        or 2 * half > size
    ):
        return reference.rotary(x, cos, sin)
    token_stride, head_stride, stride = x.stride()
    if stride != 1:
        x = x.contiguous()
        token_stride, head_stride, _ = x.stride()
    if not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _operation("fg_rotary")(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        tokens,
        heads,
        size,
        half,
        token_stride,
        head_stride,
        DTYPES[dtype],
    )
    return out


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """``act(x)`` of any shape."""
    dtype = DTYPES.get(x.dtype)
    code = _CODES.get(name)
    if dtype is None or code is None:
        return reference.activation(x, name)
    if not x.is_contiguous():
        x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1] if x.ndim else 1
    _operation("fg_activation")(x.data_ptr(), out.data_ptr(), x.numel() // max(size, 1), size, code, dtype)
    return out


def gated_activation(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """``gate_up [..., 2 * hidden] -> act(gate) * up [..., hidden]``."""
    dtype = DTYPES.get(gate_up.dtype)
    code = _CODES.get(name)
    *rows, both = gate_up.shape
    if dtype is None or code is None or both % 2 or not both:
        return reference.gated_activation(gate_up, name)
    if not gate_up.is_contiguous():
        gate_up = gate_up.contiguous()
    size = both // 2
    out = torch.empty((*rows, size), dtype=gate_up.dtype)
    _operation("fg_gated_activation")(gate_up.data_ptr(), out.data_ptr(), gate_up.numel() // both, size, code, dtype)
    return out


class _Wrong(threading.local):
    """Where an operation leaves the place of an id that is none; of each thread its own."""

    def __init__(self) -> None:
        self.place = array("q", [-1])


_wrong = _Wrong()


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``ids [tokens]`` int64, ``weight [rows, hidden]`` of any format -> ``[tokens, hidden]``.

    Raises:
        IndexError: an id that is no row.
    """
    if ids.dtype != torch.int64 or ids.ndim != 1 or weight.ndim != 2 or not weight.is_contiguous():
        return reference.embedding(ids, weight)
    if not ids.is_contiguous():
        ids = ids.contiguous()
    tokens, (rows, width) = ids.numel(), weight.shape
    out = torch.empty((tokens, width), dtype=weight.dtype)
    wrong = _wrong.place
    _operation("fg_embedding")(
        ids.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        wrong.buffer_info()[0],
        tokens,
        rows,
        width * weight.element_size(),
    )
    _check_ids(wrong, ids, rows)
    again(partial(_check_ids, wrong, ids, rows))
    return out


def _check_ids(wrong: array[int], ids: torch.Tensor, rows: int) -> None:
    if wrong[0] >= 0:
        place, wrong[0] = wrong[0], -1
        raise IndexError(f"id {int(ids[place])} at place {place} is no row of the table: it has {rows}, from 0")


def argmax(x: torch.Tensor) -> torch.Tensor:
    """``x [rows, size]``, also a part of wider rows, ``-> [rows]`` int64: where each row's greatest is."""
    dtype = DTYPES.get(x.dtype)
    if dtype is None or x.ndim != 2 or not x.shape[1]:
        return reference.argmax(x)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size = x.shape
    out = torch.empty(rows, dtype=torch.int64)
    _operation("fg_argmax")(x.data_ptr(), out.data_ptr(), rows, size, x.stride(0), dtype)
    return out


def _activation_supports(need: Need) -> str | None:
    name = need.sizes.get("activation")
    if name is not None and name not in _CODES:
        return f"does not know the activation {name!r}"
    return supports(need)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *(
        Implementation(function.__name__, "cpu", function, supports, rank=RANK, repeatable=True)
        for function in (embedding, add_rms_norm, add_layer_norm, rotary, argmax)
    ),
    *(
        Implementation(function.__name__, "cpu", function, _activation_supports, rank=RANK, repeatable=True)
        for function in (activation, gated_activation)
    ),
)
