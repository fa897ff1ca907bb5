"""The library's quantised linear maps beside the reference's."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch

from fastgen.kernels.cpu.library import Library, library
from fastgen.kernels.cpu.quantised import CpuQuantisedLinear
from fastgen.kernels.cpu.support import DTYPES
from fastgen.kernels.quantisation import SCHEMES
from fastgen.kernels.reference_quantisation import TorchQuantisedLinear, grouped, quantise_activations

SHAPES = [
    (1, 576, 96),
    (2, 577, 13),
    (3, 64, 16),
    (4, 100, 50),
    (7, 33, 9),
    (11, 1536, 5),
    (40, 300, 33),
]
"""Rows, in, out: all heights of tiles, and sizes that are no multiple of anything."""

kernel, reference = CpuQuantisedLinear(), TorchQuantisedLinear()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    library().set_threads(request.param)
    yield request.param
    library().set_threads(torch.get_num_threads())


def operands(rows: int, size: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows * size + width)
    return torch.randn(rows, size).to(dtype), torch.randn(width, size).to(dtype), torch.randn(width).to(dtype)


def assert_product(
    found: torch.Tensor, scheme: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Integers are exact, so only sums of groups may be rounded otherwise than in float64.

    For int4, where two ranges of a group may be as good as each other, what the library chose is what is multiplied.
    """
    width, size = weight.shape
    integers, scales = quantise_activations(scheme, x)
    stands_for = (integers.double() * scales).flatten(1)
    if scheme == "int8":  # in the reference's packed form, with what lies beyond the row's end
        quantised = reference._quantised("int8", reference.pack("int8", weight), width, integers.shape[1])
    else:
        quantised = grouped(kernel.unpack("int4", kernel.pack("int4", weight), width, size), 32)
    factors = quantised.double().flatten(1)
    exact = stands_for @ factors.T + (0 if bias is None else bias.double())
    scale = stands_for.abs() @ factors.abs().T + 1
    assert found.dtype == x.dtype
    if found.dtype == torch.bfloat16:
        torch.testing.assert_close(found, exact.bfloat16(), rtol=2**-7, atol=1e-3)
    else:
        assert bool(((found - exact).abs() < 1e-6 * scale).all())


def assert_all_products(rows: int, size: int, width: int, dtype: torch.dtype, scheme: str) -> None:
    x, weight, bias = operands(rows, size, width, dtype)
    packed = kernel.pack(scheme, weight)
    assert packed.shape == (kernel.packed_bytes(scheme, width, size),)
    assert_product(kernel.linear(scheme, x, packed, bias, width), scheme, x, weight, bias)
    assert_product(kernel.linear(scheme, x, packed, None, width), scheme, x, weight, None)


def assert_packing(rows: int, size: int, width: int, dtype: torch.dtype, scheme: str) -> None:
    _, weight, _ = operands(rows, size, width, dtype)
    found = kernel.unpack(scheme, kernel.pack(scheme, weight), width, size)
    wanted = reference.unpack(scheme, reference.pack(scheme, weight), width, size)
    if scheme == "int8":
        assert torch.equal(found, wanted)
    else:
        off, wanted_off = ((one - weight.float()).square().sum() for one in (found, wanted))
        assert off < 1.001 * wanted_off
        assert (found - wanted).norm() < 0.06 * wanted.norm()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size", "width"), SHAPES)
@pytest.mark.usefixtures("threads")
def test_products(rows: int, size: int, width: int, dtype: torch.dtype, scheme: str) -> None:
    assert_all_products(rows, size, width, dtype, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size", "width"), SHAPES)
@pytest.mark.usefixtures("threads")
def test_packing(rows: int, size: int, width: int, dtype: torch.dtype, scheme: str) -> None:
    assert_packing(rows, size, width, dtype, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_wrong_weight_is_seen(scheme: str) -> None:
    x, weight, bias = operands(4, 96, 40, torch.float32)
    wrong = weight.clone()
    wrong[39, 95] += 0.5
    found = kernel.linear(scheme, x, kernel.pack(scheme, wrong), bias, 40)
    with pytest.raises(AssertionError):
        assert_product(found, scheme, x, weight, bias)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_rows_that_lie_apart(rows: int, scheme: str) -> None:
    x, weight, bias = operands(rows, 96, 40, torch.float32)
    packed = kernel.pack(scheme, weight.T.contiguous().T)
    wide = torch.randn(rows, 200)
    wide[:, 10:106] = x
    assert_product(kernel.linear(scheme, wide[:, 10:106], packed, bias, 40), scheme, x, weight, bias)
    columns = x.T.contiguous().T
    assert_product(kernel.linear(scheme, columns, packed, bias.double(), 40), scheme, x, weight, bias)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [0, 1, 2, 20])
def test_empty_zero_and_what_is_no_number(rows: int, scheme: str) -> None:
    x, weight, bias = operands(rows, 70, 20, torch.float32)
    weight[3] = 0
    packed = kernel.pack(scheme, weight)
    assert kernel.linear(scheme, x, packed, bias, 20).shape == (rows, 20)
    if not rows:
        return
    assert torch.equal(kernel.linear(scheme, x, packed, bias, 20)[:, 3], bias[3].expand(rows))
    assert torch.equal(kernel.linear(scheme, torch.zeros_like(x), packed, bias, 20), bias.expand(rows, 20))
    for wrong in (float("nan"), float("inf"), -float("inf")):
        hurt = x.clone()
        hurt[0, 69] = wrong
        found = kernel.linear(scheme, hurt, packed, bias, 20)
        assert found[0].isnan().all()
        assert torch.equal(found[1:], kernel.linear(scheme, x, packed, bias, 20)[1:])  # other rows are unhurt


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers(wrong: float, scheme: str) -> None:
    x, weight, _ = operands(2, 96, 20, torch.float32)
    weight[17, 40] = wrong
    found = kernel.linear(scheme, x, kernel.pack(scheme, weight), None, 20)
    assert found.isnan().any(0).tolist() == [row == 17 for row in range(20)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1e20])
def test_great_and_small_numbers(scale: float, scheme: str) -> None:
    x, weight, _ = operands(3, 96, 20, torch.float32)
    packed = kernel.pack(scheme, weight)
    found = kernel.linear(scheme, x * scale, packed, None, 20)
    torch.testing.assert_close(found, reference.linear(scheme, x * scale, reference.pack(scheme, weight), None, 20),
                               rtol=0.2, atol=0.2 * scale)  # fmt: skip


class Guarded:
    """Memory whose end is the end of what may be touched: the system kills who reads or writes one byte further."""

    def __init__(self, size: int) -> None:
        pages = -(-size // mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        guard = whole.data_ptr() + pages * mmap.PAGESIZE
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        self.bytes = whole[pages * mmap.PAGESIZE - size : pages * mmap.PAGESIZE]

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        held = self.bytes.view(tensor.dtype).view(tensor.shape)
        return held.copy_(tensor)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size", "width"), [(1, 577, 13), (5, 64, 16), (3, 33, 50)])
def test_nothing_is_touched_beyond_the_ends(rows: int, size: int, width: int, dtype: torch.dtype, scheme: str) -> None:
    x, weight, bias = (Guarded(one.numel() * one.itemsize).hold(one) for one in operands(rows, size, width, dtype))
    packed = Guarded(kernel.packed_bytes(scheme, width, size)).bytes
    lib = library()
    lib.call(lib.op(f"fg_pack_{scheme}"), weight.data_ptr(), packed.data_ptr(), width, size, DTYPES[dtype])
    assert torch.equal(packed, kernel.pack(scheme, weight))
    assert_product(kernel.linear(scheme, x, packed, bias, width), scheme, x, weight, bias)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 16])
def test_other_widths_of_vectors(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sources for narrower and wider registers; the compiler splits what the processor has not."""
    other = Library(library().level, lanes=lanes)
    monkeypatch.setattr("fastgen.kernels.cpu.quantised.library", lambda: other)
    assert kernel.layout("int8") == f"cpu-2-panel{2 * lanes}"
    for scheme in SCHEMES:
        for rows, size, width in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                assert_all_products(rows, size, width, dtype, scheme)
                assert_packing(rows, size, width, dtype, scheme)
