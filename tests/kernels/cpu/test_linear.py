"""The library's linear map beside float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastgen.kernels.cpu.library import Library, library
from fastgen.kernels.cpu.linear import linear

SHAPES = [
    (1, 576, 960),
    (2, 577, 13),
    (3, 1536, 96),
    (5, 100, 50),
    (6, 100, 50),
    (10, 64, 9),
    (11, 576, 9),
    (24, 100, 50),
    (40, 33, 5),
    (140, 601, 13),
]
"""Rows, in, out: both kernels, and sizes that are no multiple of anything."""


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    library().set_threads(request.param)
    yield request.param
    library().set_threads(torch.get_num_threads())


def operands(rows: int, size: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows * size + width)
    return torch.randn(rows, size).to(dtype), torch.randn(width, size).to(dtype), torch.randn(width).to(dtype)


def assert_product(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scale = x.double().abs() @ weight.double().abs().T + 1  # what rounding errors are relative to
    assert found.dtype == x.dtype
    if found.dtype == torch.bfloat16:
        torch.testing.assert_close(found, exact.bfloat16(), rtol=2**-7, atol=1e-3)
    else:
        assert bool(((found - exact).abs() < 1e-6 * scale).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size", "width"), SHAPES)
@pytest.mark.usefixtures("threads")
def test_products(rows: int, size: int, width: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, size, width, dtype)
    assert_product(linear(x, weight, bias), x, weight, bias)
    assert_product(linear(x, weight, None), x, weight, None)


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_rows_that_lie_apart(rows: int) -> None:
    x, weight, bias = operands(rows, 96, 40, torch.float32)
    wide = torch.randn(rows, 200)
    wide[:, 10:106] = x
    assert_product(linear(wide[:, 10:106], weight, bias), x, weight, bias)
    assert_product(linear(x.T.contiguous().T, weight, bias), x, weight, bias)  # a column at a time


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_empty_and_what_is_no_number(rows: int) -> None:
    x, weight, bias = operands(rows, 70, 6, torch.float32)
    assert linear(x, weight, bias).shape == (rows, 6)
    if rows:
        x[0, 69] = float("nan")
        found = linear(x, weight, bias)
        assert found[0].isnan().all()
        assert_product(found[1:], x[1:], weight, bias)  # other rows are unhurt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_how_many_others_there_are(dtype: torch.dtype) -> None:
    x, weight, bias = operands(140, 70, 30, dtype)
    found = linear(x, weight, bias)
    for rows in (11, 16, 17, 24, 25, 40, 139):
        assert torch.equal(linear(x[:rows], weight, bias), found[:rows])


def test_a_wrong_weight_is_seen() -> None:
    x, weight, bias = operands(4, 96, 40, torch.float32)
    wrong = weight.clone()
    wrong[39, 95] += 0.1
    with pytest.raises(AssertionError):
        assert_product(linear(x, wrong, bias), x, weight, bias)


def test_mixed_formats_are_torchs() -> None:
    x, weight, _ = operands(2, 8, 8, torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x, weight.bfloat16(), None)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 16])
def test_other_widths_of_vectors(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sources for narrower and wider registers; the compiler splits what the processor has not."""
    other = Library(library().level, lanes=lanes)
    monkeypatch.setattr("fastgen.kernels.cpu.linear.library", lambda: other)
    for rows, size, width in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x, weight, bias = operands(rows, size, width, dtype)
            assert_product(linear(x, weight, bias), x, weight, bias)
