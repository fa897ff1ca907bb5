"""Quantised linear maps in torch beside numpy and exact products."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch

from fastgen.kernels.ops import KernelTable
from fastgen.kernels.quantisation import GROUPS, SCHEMES
from fastgen.kernels.reference import IMPLEMENTATIONS
from fastgen.kernels.reference_quantisation import (
    TorchQuantisedLinear,
    quantise_activations,
    quantise_int4,
    rotated,
)

SHAPES = [(1, 64, 16), (3, 100, 7), (5, 33, 40), (2, 576, 13)]
"""Tokens, in, out: also sizes that are no multiple of a group."""
LOST = {"int8": 0.012, "int4": 0.12}
"""Of a product of normal numbers, the share that quantisation may cost."""

kernel = TorchQuantisedLinear()


def operands(tokens: int, size: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens * size + width)
    return torch.randn(tokens, size), torch.randn(width, size), torch.randn(width)


def lost(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def test_it_is_registered() -> None:
    table = KernelTable("cpu", "bfloat16", IMPLEMENTATIONS)
    factory = table.choose("quantised_linear", scheme="int8", in_features=8, out_features=8)
    assert table.shared(factory) is table.shared(factory)


def test_rotation_is_the_walsh_hadamard_matrix() -> None:
    matrix = reduce(np.kron, [np.array([[1.0, 1.0], [1.0, -1.0]])] * 6)
    x = torch.randn(3, 5, 64, dtype=torch.float64)
    np.testing.assert_allclose(rotated(x).numpy(), x.numpy() @ matrix, atol=1e-12)
    torch.testing.assert_close(rotated(rotated(x)), 64 * x)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_activations_are_numpys_roundings(scheme: str) -> None:
    group = GROUPS[scheme]
    x = torch.randn(4, 3 * group + 5)
    integers, scales = quantise_activations(scheme, x)
    assert integers.shape == (4, 4, group)
    padded = np.zeros((4, 4 * group), dtype=np.float32)
    padded[:, : x.shape[1]] = x.numpy()
    wide = padded.reshape(4, 4, group)
    if scheme == "int8":
        wide = rotated(torch.from_numpy(wide)).numpy()
    greatest = np.abs(wide).max(-1, keepdims=True)
    np.testing.assert_array_equal(scales.numpy(), greatest / np.float32(127))
    np.testing.assert_array_equal(integers.numpy(), np.rint(wide * (np.float32(127) / greatest)))
    assert integers.abs().amax(-1).eq(127).all()


def test_activations_of_nothing_and_of_no_numbers() -> None:
    x = torch.zeros(4, 64)
    x[1, 3], x[2, 40], x[3, 0] = float("nan"), float("inf"), 1e-35
    integers, scales = quantise_activations("int4", x)
    assert integers.count_nonzero() == 0
    assert scales[..., 0].isnan().tolist() == [[False, False], [True, False], [False, True], [False, False]]
    assert scales.nan_to_num(0).count_nonzero() == 0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "size", "width"), SHAPES)
def test_products_are_nearly_those_of_the_weight(
    tokens: int, size: int, width: int, dtype: torch.dtype, scheme: str
) -> None:
    x, weight, bias = operands(tokens, size, width)
    weight = weight.to(dtype)
    packed = kernel.pack(scheme, weight)
    assert packed.dtype == torch.uint8
    assert packed.shape == (kernel.packed_bytes(scheme, width, size),)
    exact = x.double() @ weight.double().T
    assert lost(kernel.linear(scheme, x, packed, None, width), exact) < LOST[scheme]
    assert lost(kernel.linear(scheme, x, packed, bias, width), exact + bias) < LOST[scheme]
    narrow = kernel.linear(scheme, x.bfloat16(), packed, bias.bfloat16(), width)
    assert narrow.dtype == torch.bfloat16
    assert lost(narrow, exact + bias) < LOST[scheme] + 0.01


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("tokens", "size", "width"), SHAPES)
def test_unpacked_weights_are_what_products_are_made_of(tokens: int, size: int, width: int, scheme: str) -> None:
    _, weight, _ = operands(tokens, size, width)
    packed = kernel.pack(scheme, weight)
    unpacked = kernel.unpack(scheme, packed, width, size)
    assert lost(unpacked, weight.double()) < {"int8": 0.007, "int4": 0.08}[scheme]
    one_by_one = kernel.linear(scheme, torch.eye(size), packed, None, width).T  # these activations lose nothing
    if size % 64 == 0 or scheme == "int4":
        torch.testing.assert_close(one_by_one, unpacked, rtol=1e-5, atol=1e-5)
    wrong = packed.clone()
    wrong[-16 if scheme == "int4" else -64] ^= 0x44  # the first value of the last group
    assert (kernel.unpack(scheme, wrong, width, size) - unpacked).abs().max() > 0.01


def test_int4_beats_plain_rounding_of_the_range() -> None:
    weight = torch.randn(200, 320)
    levels, scales, minima = quantise_int4(weight)
    groups = weight.view(200, 10, 32)
    found = (levels * scales.float() + minima.float() - groups).square().sum(-1)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    plain = (((groups - low) / step).round() * step + low - groups).square().sum(-1)
    assert found.mean() < 0.9 * plain.mean()


def test_int4_keeps_what_has_sixteen_levels() -> None:
    levels = torch.randint(16, (5, 3, 32))
    levels[..., 0], levels[..., 1] = 0, 15
    weight = (levels * 0.125 - 0.5).flatten(1)
    assert torch.equal(kernel.unpack("int4", kernel.pack("int4", weight), 5, 96), weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_empty_zero_and_what_is_no_number(scheme: str) -> None:
    x, weight, bias = operands(3, 96, 8)
    weight[2] = 0
    weight[5, 7] = float("nan")
    weight[6, 7] = float("inf")
    packed = kernel.pack(scheme, weight)
    found = kernel.linear(scheme, x, packed, bias, 8)
    assert found.isnan().any(0).tolist() == [row in (5, 6) for row in range(8)]
    assert torch.equal(found[:, 2], bias[2].expand(3))
    assert kernel.linear(scheme, x[:0], packed, bias, 8).shape == (0, 8)
    x[1, 95] = float("nan")
    assert kernel.linear(scheme, x, packed, bias, 8)[:, 0].isnan().tolist() == [False, True, False]
