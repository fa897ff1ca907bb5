"""The library's attention against the reference, and against plain softmax in numpy's float64."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastgen.core.layers.attention import alibi_slopes
from fastgen.kernels.cpu import attention as module
from fastgen.kernels.cpu.attention import CpuPagedAttention
from fastgen.kernels.cpu.isa import best_level
from fastgen.kernels.cpu.library import Library, library
from fastgen.kernels.ops import Need
from fastgen.kernels.paging import CacheSpec, PagedLayout, Scores
from fastgen.kernels.reference_attention import TorchPagedAttention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=[2])
def threads(request):
    library().set_threads(request.param)
    yield request.param
    library().set_threads(1)


def plain_attention(q, k, v, scores):
    """``q [rows, heads, dim]`` are the last of the context of ``k`` and ``v [context, kv_heads, dim]``; float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.double().numpy() for t in (q, k, v))
    out = np.empty((len(q), q.shape[1], v.shape[2]))
    for row, head in np.ndindex(out.shape[:2]):
        position = len(k) - len(q) + row
        first = 0 if scores.window is None else max(0, position - scores.window + 1)
        seen = slice(first, position + 1)
        found = k[seen, head // group] @ q[row, head] * scores.scale
        if scores.softcap is not None:
            found = scores.softcap * np.tanh(found / scores.softcap)
        if scores.slopes is not None:
            found = found + scores.slopes[head] * np.arange(first, position + 1)
        weights = np.exp(found - found.max())
        out[row, head] = weights / weights.sum() @ v[seen, head // group]
    return torch.from_numpy(out)


def as_kept(x, kv_dtype, group, most=127):
    """``x [tokens, kv_heads, dim]`` as it comes back from the cache: in int8, for each ``group`` of components the
    multiples of one scale in bfloat16."""
    if kv_dtype == "auto":
        return x
    groups = []
    for some in x.double().split(group, -1):
        scale = (some.abs().amax(-1, keepdim=True) / most).bfloat16().double()
        groups.append((some / scale).round().clamp(-most, most) * scale)
    return torch.cat(groups, -1)


def check(spec, heads, scores, dtype, block_size, lengths=None, seed=0, tolerance=None):
    """Random ragged passes, blocks handed out in random order; whatever nobody owns is NaN."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    if tolerance is None:  # what lies halfway between two codes, as bfloat16's short numbers do, may become either
        tolerance = TOLERANCE[dtype] * (2 if spec.kv_dtype == "int8" and dtype == torch.bfloat16 else 1)
    lengths = lengths or [1, 2, block_size, block_size + 1, 40, 41, 90]
    blocks = list(range(sum(-(-n // block_size) for n in lengths) + 3))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-n // block_size))] for n in lengths]
    mine, reference = CpuPagedAttention(), TorchPagedAttention()
    caches = [one.allocate(spec, 3 + sum(map(len, tables)), block_size, dtype, CPU) for one in (mine, reference)]
    for cache in caches:
        for part in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
            if part is not None:
                assert bool((part == 0).all())
                part.fill_(float("nan") if part.is_floating_point() else 99)
    widths = (heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.value_dim)
    fused = [torch.randn(n, sum(widths)).to(dtype) for n in lengths]
    done = [0] * len(lengths)
    while alive := [s for s in range(len(lengths)) if done[s] < lengths[s]]:
        rng.shuffle(alive)
        counts = [rng.choice([1, 1, lengths[s] - done[s], min(7, lengths[s] - done[s])]) for s in alive]
        rows = torch.cat([fused[s][done[s] : done[s] + c] for s, c in zip(alive, counts, strict=True)])
        query, key, value = split(rows, widths, heads, spec)
        layout = make_layout(alive, counts, done, tables, block_size)
        given = None if spec.values_in_keys else value
        got = mine.attend(query, key, given, caches[0], layout, scores)
        other = reference.attend(query, key, given, caches[1], layout, scores)
        torch.testing.assert_close(got, other, rtol=0, atol=tolerance)
        for s, count, piece in zip(alive, counts, got.split(counts), strict=True):
            done[s] += count
            q, k, v = split(fused[s][: done[s]], widths, heads, spec)
            k, v = as_kept(k, spec.kv_dtype, 32), as_kept(v, spec.kv_dtype, 64)
            v = k[..., : spec.value_dim] if spec.values_in_keys else v
            want = plain_attention(q[-count:], k, v, scores)
            torch.testing.assert_close(piece.double(), want, rtol=0, atol=tolerance)


def split(rows, widths, heads, spec):
    """Query, key and value as slices of one buffer."""
    query, key, value = rows.split(widths, 1)
    query, key = query.unflatten(1, (heads, -1)), key.unflatten(1, (spec.kv_heads, -1))
    return query, key, key[..., : spec.value_dim] if spec.values_in_keys else value.unflatten(1, (spec.kv_heads, -1))


KV_DTYPES = ["auto", "int8"]


def make_layout(alive, counts, done, tables, block_size):
    """As the engine's: views of larger buffers, and any valid block where a sequence has none."""
    width = max(map(len, tables))
    places = [(tables[s], done[s] + i) for s, c in zip(alive, counts, strict=True) for i in range(c)]
    starts, contexts = (
        [sum(counts[:i]) for i in range(len(counts))],
        [done[s] + c for s, c in zip(alive, counts, strict=True)],
    )
    table = torch.zeros(len(alive), width + 5, dtype=torch.int64)
    for row, s in enumerate(alive):
        table[row, : len(tables[s])] = torch.tensor(tables[s])
    spans = torch.full((3, len(alive) + 4), -1)
    spans[:, : len(alive)] = torch.tensor([starts, counts, contexts])
    return PagedLayout(
        block_size=block_size,
        starts=starts,
        counts=counts,
        contexts=contexts,
        block_table=table[:, :width],
        slots=torch.tensor([table[p // block_size] * block_size + p % block_size for table, p in places]),
        spans=spans[:, : len(alive)],
    )


HEADS = [(4, 4, 16, 16), (9, 3, 64, 64), (16, 1, 80, 80), (5, 5, 33, 33), (4, 2, 16, 24), (4, 1, 24, 8), (2, 1, 3, 1)]
RULES = {
    "plain": {},
    "window": {"window": 6},
    "narrow": {"window": 1},
    "softcap": {"softcap": 1.5},
    "alibi": {"slopes": tuple(alibi_slopes(6))},
    "all": {"window": 17, "softcap": 2.0, "slopes": tuple(alibi_slopes(6))},
}


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), HEADS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_heads(heads, kv_heads, dim, value_dim, dtype, block_size, kv_dtype):
    check(CacheSpec(kv_heads, dim, value_dim, kv_dtype=kv_dtype), heads, Scores(0.3), dtype, block_size)


@pytest.mark.thorough
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 16, 24, 40])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rules(rules, dtype, block_size, kv_dtype):
    check(CacheSpec(3, 16, 16, kv_dtype=kv_dtype), 6, Scores(0.3, **RULES[rules]), dtype, block_size)


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("rules", ["plain", "window", "softcap"])
def test_any_scale(rules, scale):
    check(CacheSpec(3, 16, 16), 6, Scores(scale, **RULES[rules]), torch.float32, 16)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(4, 24, 16), (3, 19, 13), (16, 72, 64)])
@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_values_in_keys(heads, dim, value_dim, block_size, dtype, kv_dtype):
    spec = CacheSpec(1, dim, value_dim, values_in_keys=True, kv_dtype=kv_dtype)
    for rules in ({}, {"window": 6}):
        check(spec, heads, Scores(0.3, **rules), dtype, block_size)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_threads(threads, dtype, kv_dtype):
    check(CacheSpec(3, 16, 16, kv_dtype=kv_dtype), 6, Scores(0.3, **RULES["all"]), dtype, 16, seed=threads)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_long_contexts(threads, window, kv_dtype):
    """Longer than what a thread takes as one task, and a chunk of several tiles of queries."""
    spec = CacheSpec(2, 16, 16, kv_dtype=kv_dtype)
    check(spec, 4, Scores(0.3, window=window), torch.float32, 16, [700, 1, 430], seed=5)


def test_large_scores():
    """A later token that outweighs all before it, and one that counts for nothing."""
    check(CacheSpec(3, 16, 16), 6, Scores(40.0), torch.float32, 16, tolerance=2e-4)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_call_made_again_reads_the_arrays(kv_dtype):
    """What changes between passes of one shape is read from the tensors, not from the lists or from a plan."""
    spec, scores, kernel = CacheSpec(2, 16, 16, kv_dtype=kv_dtype), Scores(0.3), CpuPagedAttention()
    cache = kernel.allocate(spec, 8, 16, torch.float32, CPU)
    key, value = torch.randn(2, 40, 2, 16)
    fill = make_layout([0], [40], [0], [[6, 1, 4]], 16)
    kernel.attend(torch.randn(40, 4, 16), key, value, cache, fill, scores)
    query = torch.randn(1, 4, 16)
    layout = make_layout([0], [1], [4], [[6, 1, 4]], 16)
    kernel.attend(query, key[4:5], value[4:5], cache, layout, scores)
    layout.spans[2, 0] = 40
    layout.slots[0] = 4 * 16 + 7
    got = kernel.attend(query, key[39:40], value[39:40], cache, layout, scores)
    want = plain_attention(query, as_kept(key, kv_dtype, 32), as_kept(value, kv_dtype, 64), scores)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("odd", ["key", "value"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 3, 90])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("values_in_keys", [False, True])
def test_a_nan_reaches_those_who_see_it(odd, number, heads, window, kv_dtype, values_in_keys):
    """The rows before it, and those whose window has passed it, do not; that the others do is the control."""
    length = 130
    for place in (0, 5, 63, 64, 70, 129):
        spec, kernel = CacheSpec(1, 70, 70, values_in_keys, kv_dtype), CpuPagedAttention()
        cache = kernel.allocate(spec, 9, 16, torch.float32, CPU)
        query, key, value = torch.rand(length, heads, 70), torch.rand(length, 1, 70), torch.rand(length, 1, 70)
        (key if odd == "key" or values_in_keys else value)[place, 0, 7] = number
        layout = make_layout([0], [length], [0], [list(range(9))], 16)
        out = kernel.attend(query, key, None if values_in_keys else value, cache, layout, Scores(1.0, window))
        position = torch.arange(length)
        sees = (position >= place) & (position < place + (window or length))
        finite = out.isfinite()
        assert bool(finite[~sees].all())
        assert not bool(finite[sees].all(-1).any())


class TestInt8:
    """How far a cache of 8 bits is from the exact answer."""

    BOUND = 0.02

    def error(self, dim, most=127, spread=None):
        """The greatest of outputs of about 1; ``most``: codes are no larger."""
        torch.manual_seed(0)
        query, key, value = torch.randn(30, 6, dim), torch.randn(300, 2, dim), torch.randn(300, 2, dim)
        if spread is not None:
            key[..., 0] *= spread  # one component dwarfs the others, as in the keys of some models
            query[..., 0] /= spread
        scores = Scores(dim**-0.5)
        want = plain_attention(query, key, value, scores)
        if most != 127:
            key, value = as_kept(key, "int8", 32, most), as_kept(value, "int8", 64, most)
            return (plain_attention(query, key, value, scores) - want).abs().max()
        kernel = CpuPagedAttention()
        cache = kernel.allocate(CacheSpec(2, dim, dim, kv_dtype="int8"), 20, 16, torch.float32, CPU)
        for first, last, q in ((0, 270, torch.zeros(270, 6, dim)), (270, 300, query)):
            layout = make_layout([0], [last - first], [first], [list(range(20))], 16)
            got = kernel.attend(q, key[first:last], value[first:last], cache, layout, scores)
        return (got.double() - want).abs().max()

    @pytest.mark.parametrize("dim", [16, 64, 80, 128])
    def test_it_is_small(self, dim):
        assert 0 < self.error(dim) < self.BOUND

    def test_a_large_component_costs_only_its_group(self):
        assert self.error(128, spread=20.0) < 3 * self.BOUND

    def test_fewer_bits_would_not_do(self):
        """A control of the bound."""
        assert self.error(64, most=15) > self.BOUND

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("dim", [3, 64, 80, 200])
    def test_a_token_is_kept_the_same_whoever_writes_it(self, dtype, dim):
        """Whole, or in pieces; into the same blocks."""
        query, key, value = torch.randn(3, 70, 2, dim).to(dtype)
        spec = CacheSpec(2, dim, dim, kv_dtype="int8")
        caches = []
        for pieces in ([70], [1] * 70, [33, 20, 17]):
            kernel, done = CpuPagedAttention(), 0
            cache = kernel.allocate(spec, 5, 16, dtype, CPU)
            for count in pieces:
                layout = make_layout([0], [count], [done], [[4, 1, 3, 0, 2]], 16)
                some = slice(done, done + count)
                kernel.attend(query[some], key[some], value[some], cache, layout, Scores(1.0))
                done += count
            caches.append(cache)
        for other in caches[1:]:
            for name in ("keys", "values", "key_scales", "value_scales"):
                assert torch.equal(getattr(caches[0], name), getattr(other, name))

    def test_what_a_token_takes(self):
        """Codes, and a scale of two bytes for 32 of a key's components and 64 of a value's; all of an allocation but
        its slack."""
        for kernel in (CpuPagedAttention(), TorchPagedAttention()):
            for dim, bytes_a_head in ((64, 68), (80, 86), (128, 136)):
                spec = CacheSpec(3, dim, 16, kv_dtype="int8")
                taken = kernel.bytes_per_token(spec, torch.bfloat16)
                assert taken == 3 * (bytes_a_head + 18)
                cache = kernel.allocate(spec, 100, 16, torch.bfloat16, CPU)
                parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
                assert 0 <= sum(part.nbytes for part in parts) - 1600 * taken < 1000
                assert kernel.bytes_per_token(replace(spec, kv_dtype="auto"), torch.bfloat16) == 6 * (dim + 16)

    def test_zeros_and_what_is_too_small(self):
        """They come back as zeros, not as NaN."""
        kernel, spec = CpuPagedAttention(), CacheSpec(1, 8, 8, kv_dtype="int8")
        cache = kernel.allocate(spec, 1, 16, torch.float32, CPU)
        value = torch.zeros(2, 1, 8)
        value[1] = 1e-40
        layout = make_layout([0], [2], [0], [[0]], 16)
        out = kernel.attend(torch.ones(2, 1, 8), torch.zeros(2, 1, 8), value, cache, layout, Scores(1.0))
        assert bool((out.abs() < 1e-30).all())


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_every_width_of_vectors(lanes, monkeypatch):
    built = Library(best_level(), lanes=lanes)
    monkeypatch.setattr(module, "library", lambda: built)
    built.set_threads(2)
    for dtype in TOLERANCE:
        for kv_dtype in KV_DTYPES:
            rules = Scores(0.3, **{**RULES["all"], "slopes": None})
            check(CacheSpec(3, 20, 12, kv_dtype=kv_dtype), 9, rules, dtype, 16)
            check(CacheSpec(2, 80, 72, kv_dtype=kv_dtype), 4, Scores(0.1), dtype, 16)
            check(CacheSpec(1, 19, 13, values_in_keys=True, kv_dtype=kv_dtype), 16, Scores(0.3), dtype, 24)


def test_what_it_supports():
    (one,) = module.IMPLEMENTATIONS
    assert one.supports(Need("paged_attention", "cpu", "bfloat16")) is None
    assert one.supports(Need("paged_attention", "cuda", "float32")) == "runs on a CPU, not on cuda"
    assert "float16" in (one.supports(Need("paged_attention", "cpu", "float16")) or "")
