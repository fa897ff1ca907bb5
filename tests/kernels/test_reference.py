"""The reference operations against transformers' and torch's own."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from fastgen.core.layers.attention import alibi_slopes
from fastgen.kernels.paging import CacheSpec, PagedLayout, Scores
from fastgen.kernels.reference import (
    ACTIVATIONS,
    add_layer_norm,
    add_rms_norm,
    argmax,
    experts,
    gated_activation,
    rotary,
)
from fastgen.kernels.reference_attention import TorchPagedAttention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_rms_norm(dtype, with_delta):
    stream, delta = torch.randn(2, 7, 48).to(dtype)
    oracle = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    oracle.weight.data = torch.randn(48).to(dtype)
    added, normed = add_rms_norm(stream, delta if with_delta else None, oracle.weight, 1e-5, 0.0)
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


@pytest.mark.parametrize("size", [1, 5, 128, 255, 256, 300, 1000, 49152])
def test_argmax_is_the_first_of_equals(size):
    x = torch.randint(-40, 40, (50, size), generator=torch.Generator().manual_seed(size)).float()
    x[0, -1] = x[1, size // 2] = x[2, 0] = 99.0
    x[3, -1] = x[4, 0] = float("nan")
    x[5, -1] = float("inf")
    x[6] = -float("inf")
    x[7, :-1] = -float("inf")
    for rows in (x, x.bfloat16(), x.half(), x[:, : max(1, size - 1)], x[::2], x.t().contiguous().t()):
        assert torch.equal(argmax(rows), rows.max(-1).indices)
        assert argmax(rows).tolist() == rows.float().numpy().argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_an_offset(dtype):
    x = torch.randn(7, 48).to(dtype)
    oracle = Gemma2RMSNorm(48, eps=1e-5).to(dtype)
    oracle.weight.data = torch.randn(48).to(dtype)
    _, normed = add_rms_norm(x, None, oracle.weight, 1e-5, 1.0)
    torch.testing.assert_close(normed, oracle(x), rtol=1e-5 if dtype == torch.float32 else 0, atol=1e-5)


@pytest.mark.parametrize("with_bias", [True, False])
def test_add_layer_norm(with_bias):
    stream, delta = torch.randn(2, 7, 48)
    weight, bias = torch.randn(48), torch.randn(48) if with_bias else None
    added, normed = add_layer_norm(stream, delta, weight, bias, 1e-5)
    want = (added - added.mean(-1, keepdim=True)) / (added.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    want = want * weight + (0 if bias is None else bias)
    assert torch.equal(added, stream + delta)
    torch.testing.assert_close(normed, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts(tokens):
    """Each token through its own experts, one after the other; an expert nobody chose costs nothing."""
    x, gate_up, down = torch.randn(tokens, 16), torch.randn(5, 24, 16), torch.randn(5, 16, 12)
    chosen = torch.stack([torch.randperm(4)[:3] for _ in range(tokens)])  # never expert 4
    weights = torch.rand(tokens, 3)
    gate_up[4] = float("nan")
    want = torch.zeros(tokens, 16)
    for token in range(tokens):
        for e, w in zip(chosen[token], weights[token], strict=True):
            want[token] += w * (down[e] @ gated_activation((gate_up[e] @ x[token])[None], "silu")[0])
    torch.testing.assert_close(experts(x, gate_up, down, chosen, weights, "silu"), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 4, 6, 7, 12, 20])
def test_a15_alibi_slopes(heads):
    alibi = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # rows of [0, slope], in bfloat16
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)).bfloat16().float(), alibi[:, 0, 1])
    if heads == 6:
        assert alibi_slopes(6) == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]


def naive_attention(q, k, v, scores):
    """One sequence, the last rows of its context, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    found = torch.einsum("qhd,khd->hqk", q.double(), k) * scores.scale
    if scores.softcap:
        found = torch.tanh(found / scores.softcap) * scores.softcap
    if scores.slopes:
        found = found + torch.tensor(scores.slopes).double()[:, None, None] * torch.arange(len(k))
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    unseen = (distance < 0) | (distance >= (scores.window or len(k)))
    return torch.einsum("hqk,khd->qhd", found.masked_fill(unseen, float("-inf")).softmax(-1), v)


HEADS = [(4, 4, 16, 16), (9, 3, 64, 64), (8, 1, 80, 80), (5, 5, 33, 33), (4, 2, 16, 24), (4, 1, 24, 8)]
RULES = {
    "plain": {},
    "window": {"window": 6},
    "narrow": {"window": 1},
    "softcap": {"softcap": 1.5},
    "alibi": {"slopes": True},
    "all": {"window": 17, "softcap": 2.0, "slopes": True},
}


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_paged_attention(heads, kv_heads, dim, value_dim, dtype, block_size):
    check_attention(CacheSpec(kv_heads, dim, value_dim), heads, Scores(0.3), dtype, block_size)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_paged_attention_rules(rules, dtype, block_size):
    given = dict(RULES[rules])
    if "slopes" in given:
        given["slopes"] = tuple(alibi_slopes(6))
    check_attention(CacheSpec(3, 16, 16), 6, Scores(0.3, **given), dtype, block_size)


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("rules", ["plain", "window", "softcap"])
def test_paged_attention_with_any_scale(rules, scale):
    """Nothing that comes later is seen, whatever scores are multiplied by."""
    check_attention(CacheSpec(3, 16, 16), 6, Scores(scale, **RULES[rules]), torch.float32, 5)


@pytest.mark.parametrize("rules", ["plain", "window"])
def test_values_in_keys(rules):
    spec = CacheSpec(1, 24, 16, values_in_keys=True)
    assert spec.width == 24
    check_attention(spec, 4, Scores(0.3, **RULES[rules]), torch.float32, 5)


@pytest.mark.parametrize("other", [Scores(0.3), Scores(0.3, 6), Scores(-0.3), Scores(0.0)], ids=str)
def test_layers_of_different_scores_share_a_pass(other):
    """What torch does by itself is planned otherwise: a chunk after a capped layer's needs a mask of its own."""
    kernel, spec = TorchPagedAttention(), CacheSpec(2, 8, 8)
    for first, second in ((Scores(0.3, other.window, 1.5), other), (Scores(0.3, other.window), other)):
        q, k, v = torch.randn(3, 11, 2, 8)
        caches = [kernel.allocate(spec, 3, 4, torch.float32, torch.device("cpu")) for _ in range(2)]
        for begin, end in ((0, 6), (6, 11)):  # the second goes on from the first
            layout = make_layout([0], [end - begin], [begin], [[2, 0, 1]], 4)
            rows = slice(begin, end)
            for cache, scores in zip(caches, (first, second), strict=True):
                got = kernel.attend(q[rows], k[rows], v[rows], cache, layout, scores)
                want = naive_attention(q[rows], k[:end], v[:end], scores)
                torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def check_attention(spec, heads, scores, dtype, block_size):
    """Random ragged passes over a cache that starts as NaN, with blocks handed out in random order."""
    rng = random.Random(heads * block_size)
    kernel = TorchPagedAttention()
    lengths = [1, 2, block_size, block_size + 1, 40, 41, 90]
    blocks = list(range(sum(-(-n // block_size) for n in lengths)))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-n // block_size))] for n in lengths]
    cache = kernel.allocate(spec, sum(map(len, tables)), block_size, dtype, torch.device("cpu"))
    for part in (cache.keys, cache.values):
        if part is not None:
            assert bool((part == 0).all())
            part.fill_(float("nan"))
    widths = ((heads, spec.head_dim), (spec.kv_heads, spec.head_dim), (spec.kv_heads, spec.value_dim))
    q, k, v = ([torch.randn(n, *width).to(dtype) for n in lengths] for width in widths)
    if spec.values_in_keys:
        v = [key[..., : spec.value_dim] for key in k]
    done = [0] * len(lengths)
    got: list[list[torch.Tensor]] = [[] for _ in lengths]
    while alive := [s for s in range(len(lengths)) if done[s] < lengths[s]]:
        rng.shuffle(alive)
        counts = [rng.choice([1, 1, lengths[s] - done[s], min(7, lengths[s] - done[s])]) for s in alive]
        layout = make_layout(alive, counts, done, tables, block_size)
        taken = [slice(done[s], done[s] + c) for s, c in zip(alive, counts, strict=True)]
        query, key, value = (torch.cat([t[s][at] for s, at in zip(alive, taken, strict=True)]) for t in (q, k, v))
        out = kernel.attend(query, key, None if spec.values_in_keys else value, cache, layout, scores)
        for s, piece in zip(alive, out.split(counts), strict=True):
            got[s].append(piece)
            done[s] += len(piece)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for s in range(len(lengths)):
        want = naive_attention(q[s], k[s], v[s], scores)
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
    torch.testing.assert_close(naive_attention(q, k, v, Scores(8**-0.5)).float(), want, rtol=1e-5, atol=1e-6)
