"""The library's norms, rotary embedding, activations and look-ups against the reference, which is torch's and is itself
tested against transformers'."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from fastgen.errors import ConfigError
from fastgen.kernels import reference
from fastgen.kernels.cpu import elementwise as cpu
from fastgen.kernels.cpu.isa import best_level, level_named
from fastgen.kernels.cpu.library import Library, library
from fastgen.kernels.ops import KernelTable, Need

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [F32, BF16]
SIZES = [1, 7, 40, 576, 1000]
ROWS = [0, 1, 5, 300]  # the last is shared out among threads
NAMES = sorted(reference.ACTIVATIONS)
CANCELLING = {name for name in NAMES if name.startswith("gelu")}
"""Whose values far below 0 are small differences of numbers near 1, in torch too."""


@pytest.fixture(autouse=True)
def two_threads():
    library().set_threads(2)
    yield
    library().set_threads(1)


def same(got, want, *, cancels=False):
    """Float32 but for the order of additions; bfloat16 to the last bit but for a rounding now and then."""
    assert got.dtype == want.dtype
    assert got.is_contiguous()
    if want.dtype == F32:
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-5 if cancels else 2e-6, equal_nan=True)
        return
    rtol, atol = (2**-6, 2e-5) if cancels else (2**-7, 1e-30)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
    differ = (got != want) & ~(got.isnan() & want.isnan())
    assert differ.sum() <= 1 + (0.02 if cancels else 0.001) * want.numel()


def numbers(*shape, dtype=F32, scale=3.0):
    return (torch.randn(*shape) * scale).to(dtype)


def both(function, *arguments):
    """What the library and the reference make of it, flat."""
    results = (getattr(where, function)(*arguments) for where in (cpu, reference))
    return tuple(one if isinstance(one, tuple) else (one,) for one in results)


def check(function, *arguments):
    for got, want in zip(*both(function, *arguments), strict=True):
        same(got, want, cancels=arguments[-1] in CANCELLING if "activation" in function else False)


def check_everything(dtype, size, rows):
    """Each operation once, at this size."""
    torch.manual_seed(size + rows)
    stream, delta = numbers(2, rows, size, dtype=dtype)
    weight, bias = numbers(2, size, dtype=dtype)
    check("add_rms_norm", stream, delta, weight, 1e-5, 0.0)
    check("add_rms_norm", stream, delta, weight, 1e-5, 1.0)
    check("add_layer_norm", stream, delta, weight, bias, 1e-5)
    for name in NAMES:
        check("activation", stream, name)
        check("gated_activation", torch.cat([stream, delta], -1), name)
    angles = torch.randn(rows, size) * 100
    x = numbers(rows, 3, 2 * size + 1, dtype=dtype)
    check("rotary", x, angles.cos().to(dtype), angles.sin().to(dtype))
    assert torch.equal(cpu.argmax(stream), stream.argmax(-1))
    table, ids = numbers(11, size, dtype=dtype), torch.randint(11, (rows,))
    assert torch.equal(cpu.embedding(ids, table), table[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_everything(dtype, size, rows):
    check_everything(dtype, size, rows)


@pytest.mark.slow  # each compiles the library
@pytest.mark.parametrize("level", ["generic", "best in 16 lanes"])
def test_every_build_gives_the_same(level, monkeypatch):
    built = Library(level_named(level)) if level == "generic" else Library(best_level(), lanes=16)
    built.set_threads(2)
    monkeypatch.setattr(cpu, "_operation", lambda name: partial(built.call, built.op(name)))
    for dtype in DTYPES:
        for size in SIZES:
            check_everything(dtype, size, 5)
    check_everything(BF16, 576, 300)
    test_argmax_of_ties_infinities_and_nan(F32, 2100)
    built.set_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("weighted", "biased", "added"), [(1, 0, 1), (0, 0, 1), (1, 1, 0), (0, 1, 0), (0, 0, 0)])
def test_layer_norm_without_some_of_its_parts(dtype, weighted, biased, added):
    stream, delta = numbers(2, 4, 100, dtype=dtype)
    weight, bias = numbers(2, 100, dtype=dtype)
    check(
        "add_layer_norm", stream, delta if added else None, weight if weighted else None, bias if biased else None, 0.1
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_add_leaves_the_stream_itself(dtype):
    stream, weight = numbers(4, 100, dtype=dtype), numbers(100, dtype=dtype)
    check("add_rms_norm", stream, None, weight, 1e-5, 0.0)
    assert cpu.add_rms_norm(stream, None, weight, 1e-5, 0.0)[0] is stream
    assert cpu.add_layer_norm(stream, None, weight, None, 1e-5)[0] is stream


def test_norms_of_rows_far_from_zero():
    """Where the variance must not come from a difference of squares."""
    x = torch.randn(3, 777) + 1e4
    double = x.double()
    want = (double - double.mean(-1, keepdim=True)) / (double.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(cpu.add_layer_norm(x, None, None, None, 1e-5)[1].double(), want, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads(dtype):
    check("add_rms_norm", numbers(2, 3, 64, dtype=dtype), None, numbers(64, dtype=dtype), 1e-6, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_would_catch_a_wrong_result(dtype):
    """What these tests compare with is strict enough for it: an offset, an epsilon, half a row off."""
    stream, delta = numbers(2, 5, 576, dtype=dtype)
    weight = numbers(576, dtype=dtype)
    want = reference.add_rms_norm(stream, delta, weight, 1e-5, 0.0)[1]
    for wrong in (
        cpu.add_rms_norm(stream, delta, weight, 1e-5, 1.0)[1],
        cpu.add_rms_norm(stream, delta, weight, 1e-1, 0.0)[1],
        cpu.add_rms_norm(stream, delta.roll(1, -1), weight, 1e-5, 0.0)[1],
        cpu.add_layer_norm(stream, delta, weight, None, 1e-5)[1],
    ):
        with pytest.raises(AssertionError):
            same(wrong, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views(dtype):
    """Parts of wider rows, every other element, columns: as if copied first."""
    weight = numbers(40, dtype=dtype)
    wide = numbers(6, 120, dtype=dtype)
    for x in (wide[:, 40:80], wide[:, ::3], numbers(40, 6, dtype=dtype).t(), wide[::2, :40]):
        delta = numbers(len(x), 80, dtype=dtype)[:, ::2]
        check("add_rms_norm", x, delta, weight, 1e-5, 0.0)
        check("add_layer_norm", x, delta, weight, weight, 1e-5)
        check("activation", x, "silu")
        check("gated_activation", x, "gelu")
        assert torch.equal(cpu.argmax(x), x.argmax(-1))
    ids = torch.arange(12)[::3]
    assert torch.equal(cpu.embedding(ids, wide.t()), wide.t()[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [2, 10, 64])
def test_rotary_of_a_part_of_a_fused_projection(dtype, rotary_dim):
    fused = numbers(7, 12, 64, dtype=dtype)
    angles = torch.randn(7, rotary_dim // 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    for x in (fused[:, :9], fused[:, 1::2], fused.transpose(1, 2)[:, :, :11].transpose(1, 2), fused.flip(0)):
        check("rotary", x, *tables)
    check("rotary", numbers(64, 12, 7, dtype=dtype).permute(2, 1, 0), *tables)
    got = cpu.rotary(fused[:, :9], *tables)
    assert torch.equal(got[..., rotary_dim:], fused[:, :9, rotary_dim:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_activations_of_every_size_of_number(dtype, name):
    """Infinities, NaN, denormal and huge numbers, and a fine grid, against float64."""
    special = torch.tensor([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 88.7, -88.7, 104.0, -104.0])
    x = torch.cat([special, torch.linspace(-30, 30, 40_001)]).to(dtype)
    got, want = cpu.activation(x, name), reference.activation(x, name)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    exact = reference.activation(x.double(), name)[len(special) :]
    mine, torchs = ((one[len(special) :].double() - exact).abs() / (exact.abs() + 1e-3) for one in (got, want))
    assert mine.max() <= max(1.5 * torchs.max(), 4e-6)
    if name not in CANCELLING:
        same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 6, 99])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_infinities_and_nan_stay_in_their_row(dtype, place, value):
    stream, weight = numbers(3, 100, dtype=dtype), numbers(100, dtype=dtype)
    stream[1, place] = value
    check("add_rms_norm", stream, None, weight, 1e-5, 0.0)
    check("add_rms_norm", stream, stream, weight, 1e-5, 1.0)
    check("add_layer_norm", stream, stream, weight, weight, 1e-5)
    check("gated_activation", stream, "silu")
    ones = torch.ones(3, 5, dtype=dtype)
    check("rotary", stream.view(3, 10, 10), ones, ones)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 31, 64, 71, 1024, 1025, 2100, 8200, 49152])
def test_argmax_of_ties_infinities_and_nan(dtype, vocabulary):
    torch.manual_seed(vocabulary)
    ties = torch.randint(-3, 3, (40, vocabulary)).to(dtype)
    assert torch.equal(cpu.argmax(ties), ties.argmax(-1))
    for value in (float("nan"), float("inf"), -float("inf"), -0.0):
        logits = numbers(8, vocabulary, dtype=dtype)
        logits[torch.randint(2, logits.shape).bool() if value == 0 else torch.rand(logits.shape) < 0.1] = value
        logits[0] = value
        logits[1, -1] = value
        logits[2, 0] = float("nan")
        assert torch.equal(cpu.argmax(logits), logits.argmax(-1))
    zeros = torch.tensor([[-0.0, 0.0, -0.0]], dtype=dtype)
    assert cpu.argmax(zeros).tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [3, 70, 16501])
def test_argmax_wherever_it_is(dtype, vocabulary):
    """A row is read in several places at once, in blocks: the greatest, or a NaN, and its equals in any two of them;
    in rows that are part of wider ones, with greater numbers beside."""
    places = torch.linspace(0, vocabulary - 1, 97).long().unique()
    pairs = torch.cartesian_prod(places, places)
    wide = torch.full((len(places), vocabulary + 2), 9.0, dtype=dtype)
    x = wide[:, 1:-1]
    for rows in pairs.split(len(places)):
        for value in (1.0, float("nan")):
            x.fill_(-1.0)
            x.scatter_(1, rows, value)
            assert torch.equal(cpu.argmax(x), rows.amin(-1))
        x.fill_(-float("inf"))
        x.scatter_(1, rows[:, :1], 1.0)
        x.scatter_(1, rows[:, 1:], float("nan"))
        assert torch.equal(cpu.argmax(x), rows[:, 1])


@pytest.mark.parametrize("wrong", [-1, 11, 2**62])
def test_an_id_that_is_no_row_is_refused(wrong):
    table = numbers(11, 5)
    with pytest.raises(IndexError, match=rf"id {wrong} at place 2 is no row of the table: it has 11"):
        cpu.embedding(torch.tensor([3, 4, wrong]), table)
    assert torch.equal(cpu.embedding(torch.tensor([3]), table), table[3:4])  # and is forgotten


def test_what_the_library_does_not_take_goes_to_torch():
    half, weight = numbers(2, 3, 8, dtype=torch.float16), numbers(8)
    check_exactly("add_rms_norm", half[0], half[1], weight.half(), 1e-5, 0.0)
    check_exactly("add_rms_norm", numbers(3, 8, dtype=BF16), None, weight, 1e-5, 1.0)
    check_exactly("add_rms_norm", numbers(3, 8), weight, weight, 1e-5, 0.0)  # one delta for all rows
    check_exactly("add_layer_norm", half[0], None, weight.half(), None, 1e-5)
    check_exactly("rotary", half, *torch.ones(2, 2, 4, dtype=torch.float16))
    check_exactly("activation", half, "gelu")
    check_exactly("gated_activation", half, "relu")
    check_exactly("embedding", torch.tensor([1, 0], dtype=torch.int32), half[0])
    with pytest.raises(RuntimeError):
        cpu.add_rms_norm(numbers(3, 8), None, numbers(9), 1e-5, 0.0)
    assert torch.equal(cpu.argmax(half[0]), half[0].argmax(-1))
    assert torch.equal(cpu.argmax(half[0].double()), half[0].argmax(-1))


def check_exactly(function, *arguments):
    for got, want in zip(*both(function, *arguments), strict=True):
        assert torch.equal(got, want)


def test_what_it_serves():
    table = KernelTable("cpu", "bfloat16", [*reference.IMPLEMENTATIONS, *cpu.IMPLEMENTATIONS])
    assert table.choose("add_rms_norm", size=576) is cpu.add_rms_norm
    assert table.choose("argmax", size=576) is cpu.argmax
    assert all(table.choose("activation", activation=name) is cpu.activation for name in NAMES)
    (gated,) = (one for one in cpu.IMPLEMENTATIONS if one.operation == "gated_activation")
    assert gated.supports(Need("gated_activation", "cpu", "float32", {"activation": "tahn"})) is not None
    for device, dtype, reason in (("cuda", "float32", "not on cuda"), ("cpu", "float16", "not float16")):
        with pytest.raises(ConfigError, match=reason):
            KernelTable(device, dtype, cpu.IMPLEMENTATIONS).choose("rotary")
