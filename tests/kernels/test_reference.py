"""The reference operations against transformers' and torch's own."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from fastgen.kernels.paging import CacheSpec, PagedLayout
from fastgen.kernels.reference import ACTIVATIONS, add_rms_norm, gated_activation, rotary
from fastgen.kernels.reference_attention import TorchPagedAttention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_rms_norm(dtype, with_delta):
    stream, delta = torch.randn(2, 7, 48).to(dtype)
    oracle = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    oracle.weight.data = torch.randn(48).to(dtype)
    added, normed = add_rms_norm(stream, delta if with_delta else None, oracle.weight, 1e-5)
    want = stream + delta if with_delta else stream
    assert torch.equal(added, want)
    torch.testing.assert_close(normed, oracle(want), rtol=1e-5 if dtype == torch.float32 else 0, atol=1e-5)


@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 64), (9, 80)])
def test_rotary(heads, dim):
    x, angles = torch.randn(5, heads, dim), torch.randn(5, dim // 2)
    doubled = torch.cat([angles, angles], -1)
    want, _ = apply_rotary_pos_emb(x, x, doubled.cos(), doubled.sin(), unsqueeze_dim=1)
    torch.testing.assert_close(rotary(x, angles.cos(), angles.sin()), want, rtol=1e-5, atol=1e-6)


def test_partial_rotary_passes_the_rest_through():
    """A7: pairs are (i, i + rotary / 2) inside the first rotary components."""
    x, angles = torch.randn(5, 2, 16), torch.randn(5, 3)
    got = rotary(x, angles.cos(), angles.sin())
    assert torch.equal(got[..., 6:], x[..., 6:])
    torch.testing.assert_close(got[..., :6], rotary(x[..., :6], angles.cos(), angles.sin()))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    gate, up = torch.randn(2, 4, 16)
    got = gated_activation(torch.cat([gate, up], -1), name)
    torch.testing.assert_close(got, ACT2FN[name](gate) * up, rtol=1e-5, atol=1e-6)


def naive_attention(q, k, v, scale):
    """One sequence, the last rows of its context, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    later = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (8, 1, 80), (5, 5, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_paged_attention(heads, kv_heads, dim, dtype, block_size):
    """Random ragged passes over a cache that starts as NaN, with blocks handed out in random order."""
    rng = random.Random(heads * block_size)
    kernel, spec = TorchPagedAttention(), CacheSpec(kv_heads, dim)
    lengths = [1, 2, block_size, block_size + 1, 40, 41, 90]
    blocks = list(range(sum(-(-n // block_size) for n in lengths)))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-n // block_size))] for n in lengths]
    cache = kernel.allocate(spec, sum(map(len, tables)), block_size, dtype, torch.device("cpu"))
    assert all(bool((t == 0).all()) for t in cache)
    for part in cache:
        part.fill_(float("nan"))
    q, k, v = ([torch.randn(n, h, dim).to(dtype) for n in lengths] for h in (heads, kv_heads, kv_heads))
    done = [0] * len(lengths)
    got: list[list[torch.Tensor]] = [[] for _ in lengths]
    while alive := [s for s in range(len(lengths)) if done[s] < lengths[s]]:
        rng.shuffle(alive)
        counts = [rng.choice([1, 1, lengths[s] - done[s], min(7, lengths[s] - done[s])]) for s in alive]
        layout = make_layout(alive, counts, done, tables, block_size)
        taken = [slice(done[s], done[s] + c) for s, c in zip(alive, counts, strict=True)]
        rows = [torch.cat([t[s][at] for s, at in zip(alive, taken, strict=True)]) for t in (q, k, v)]
        out = kernel.attend(*rows, cache, layout, 0.3)
        for s, piece in zip(alive, out.split(counts), strict=True):
            got[s].append(piece)
            done[s] += len(piece)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for s in range(len(lengths)):
        want = naive_attention(q[s], k[s], v[s], 0.3)
        torch.testing.assert_close(torch.cat(got[s]).double(), want, rtol=0, atol=tolerance)


def make_layout(alive, counts, done, tables, block_size):
    width = max(map(len, tables))
    starts = [sum(counts[:i]) for i in range(len(counts))]
    places = [(tables[s], done[s] + i) for s, c in zip(alive, counts, strict=True) for i in range(c)]
    return PagedLayout(
        block_size=block_size,
        starts=starts,
        counts=counts,
        contexts=[done[s] + c for s, c in zip(alive, counts, strict=True)],
        block_table=torch.tensor([tables[s] + [0] * (width - len(tables[s])) for s in alive]),
        slots=torch.tensor([table[p // block_size] * block_size + p % block_size for table, p in places]),
    )


def test_sdpa_is_not_its_own_oracle():
    """The float64 oracle above agrees with torch's attention on a plain case, so that it can be trusted."""
    q, k, v = torch.randn(3, 6, 2, 8)
    want = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), is_causal=True).transpose(0, 1)
    torch.testing.assert_close(naive_attention(q, k, v, 8**-0.5).float(), want, rtol=1e-5, atol=1e-6)
