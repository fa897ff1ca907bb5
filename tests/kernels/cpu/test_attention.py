"""The library's attention against the reference, and against plain softmax in numpy's float64."""

from __future__ import annotations

import random

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


def check(spec, heads, scores, dtype, block_size, lengths=None, seed=0, tolerance=None):
    """Random ragged passes, blocks handed out in random order; whatever nobody owns is NaN."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tolerance = tolerance or TOLERANCE[dtype]
    lengths = lengths or [1, 2, block_size, block_size + 1, 40, 41, 90]
    blocks = list(range(sum(-(-n // block_size) for n in lengths) + 3))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-n // block_size))] for n in lengths]
    mine, reference = CpuPagedAttention(), TorchPagedAttention()
    caches = [one.allocate(spec, 3 + sum(map(len, tables)), block_size, dtype, CPU) for one in (mine, reference)]
    for cache in caches:
        for part in (cache.keys, cache.values):
            if part is not None:
                assert bool((part == 0).all())
                part.fill_(float("nan"))
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
            want = plain_attention(q[-count:], k, v, scores)
            torch.testing.assert_close(piece.double(), want, rtol=0, atol=tolerance)


def split(rows, widths, heads, spec):
    """Query, key and value as slices of one buffer."""
    query, key, value = rows.split(widths, 1)
    query, key = query.unflatten(1, (heads, -1)), key.unflatten(1, (spec.kv_heads, -1))
    return query, key, key[..., : spec.value_dim] if spec.values_in_keys else value.unflatten(1, (spec.kv_heads, -1))


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
def test_heads(heads, kv_heads, dim, value_dim, dtype, block_size):
    check(CacheSpec(kv_heads, dim, value_dim), heads, Scores(0.3), dtype, block_size)


@pytest.mark.thorough
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 16, 24, 40])
def test_rules(rules, dtype, block_size):
    check(CacheSpec(3, 16, 16), 6, Scores(0.3, **RULES[rules]), dtype, block_size)


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("rules", ["plain", "window", "softcap"])
def test_any_scale(rules, scale):
    check(CacheSpec(3, 16, 16), 6, Scores(scale, **RULES[rules]), torch.float32, 16)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(4, 24, 16), (3, 19, 13), (16, 72, 64)])
@pytest.mark.parametrize("block_size", [5, 16])
def test_values_in_keys(heads, dim, value_dim, block_size, dtype):
    spec = CacheSpec(1, dim, value_dim, values_in_keys=True)
    for rules in ({}, {"window": 6}):
        check(spec, heads, Scores(0.3, **rules), dtype, block_size)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_threads(threads, dtype):
    check(CacheSpec(3, 16, 16), 6, Scores(0.3, **RULES["all"]), dtype, 16, seed=threads)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts(threads, window):
    """Longer than what a thread takes as one task, and a chunk of several tiles of queries."""
    check(CacheSpec(2, 16, 16), 4, Scores(0.3, window=window), torch.float32, 16, [700, 1, 430], seed=5)


def test_large_scores():
    """A later token that outweighs all before it, and one that counts for nothing."""
    check(CacheSpec(3, 16, 16), 6, Scores(40.0), torch.float32, 16, tolerance=2e-4)


def test_a_call_made_again_reads_the_arrays():
    """What changes between passes of one shape is read from the tensors, not from the lists or from a plan."""
    spec, scores, kernel = CacheSpec(2, 16, 16), Scores(0.3), CpuPagedAttention()
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
    torch.testing.assert_close(got.double(), plain_attention(query, key, value, scores), rtol=0, atol=1e-5)


def test_what_is_seen_is_not_ignored():
    """A control for the poisoned cache: NaN in a token that is seen does show."""
    spec, kernel = CacheSpec(1, 8, 8), CpuPagedAttention()
    cache = kernel.allocate(spec, 1, 16, torch.float32, CPU)
    value = torch.randn(3, 1, 8)
    value[1] = float("nan")
    out = kernel.attend(
        torch.randn(3, 1, 8), torch.randn(3, 1, 8), value, cache, make_layout([0], [3], [0], [[0]], 16), Scores(1.0)
    )
    assert bool(out[1:].isnan().all())


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_every_width_of_vectors(lanes, monkeypatch):
    built = Library(best_level(), lanes=lanes)
    monkeypatch.setattr(module, "library", lambda: built)
    built.set_threads(2)
    for dtype in TOLERANCE:
        check(CacheSpec(3, 20, 12), 9, Scores(0.3, **{**RULES["all"], "slopes": None}), dtype, 16)
        check(CacheSpec(1, 19, 13, values_in_keys=True), 16, Scores(0.3), dtype, 24)


def test_what_it_supports():
    (one,) = module.IMPLEMENTATIONS
    assert one.supports(Need("paged_attention", "cpu", "bfloat16")) is None
    assert one.supports(Need("paged_attention", "cuda", "float32")) == "runs on a CPU, not on cuda"
    assert "float16" in (one.supports(Need("paged_attention", "cpu", "float16")) or "")
