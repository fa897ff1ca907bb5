"""Recorded passes: done again they give what the code would give, and what cannot be done again is refused."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import torch

from fastgen.kernels.cpu.elementwise import add_rms_norm, embedding, gated_activation
from fastgen.kernels.cpu.linear import linear
from fastgen.kernels.cpu.tape import Arena, NotRepeatable, again, cannot_record, recording


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def test_it_can_be_recorded_here():
    assert cannot_record() is None


def a_pass(ids, positions, table, weight, scale):
    """Operations of the library and of torch: views, copies, several results, in place, results nobody keeps."""
    x = embedding(ids, table)
    x, normed = add_rms_norm(x, x * 0.5, scale, 1e-6, 0.0)
    inner = gated_activation(linear(normed, weight, None), "silu")
    left, right = inner.split(inner.shape[1] // 2, 1)
    mixed = torch.cat([right, left], 1)
    mixed += positions[:, None].float().cos()
    values, places = mixed.sort(1)
    turned = values.t().contiguous().t() + places.to(values.dtype)
    return x[:, : turned.shape[1]].index_select(0, ids - ids.min()) + turned.tanh()


def inputs(rows=3, seed=0):
    torch.manual_seed(seed)
    ids = torch.randperm(rows) + 4
    return ids, torch.randint(0, 100, (rows,)), torch.randn(20, 16), torch.randn(16, 16), torch.randn(16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_computes_with_what_the_tensors_hold_now(dtype):
    ids, positions, *weights = inputs()
    weights = [one.to(dtype) for one in weights]
    with recording(Arena(2**16)) as tape:
        out = a_pass(ids, positions, *weights)
    assert torch.equal(out, a_pass(ids, positions, *weights))
    for seed in range(1, 4):
        other = inputs(seed=seed)
        ids.copy_(other[0])
        positions.copy_(other[1])
        for mine, new in zip(weights, other[2:], strict=True):
            mine.copy_(new)
        expected = a_pass(ids, positions, *weights)
        assert not torch.equal(out, expected)
        with tape.poisoned():
            assert out.isnan().all()
            tape.replay()
        assert torch.equal(out, expected)


def test_recordings_share_an_arena():
    arena = Arena(2**16)
    tapes = []
    for rows in (1, 4, 2):
        tensors = inputs(rows)
        with recording(arena) as tape:
            out = a_pass(*tensors)
        tapes.append((tape, out, tensors))
    for tape, out, tensors in tapes:
        tape.replay()
        assert torch.equal(out, a_pass(*tensors))


def test_memory_is_used_again_within_a_pass():
    x, weight = torch.randn(4, 64), torch.randn(64, 64) / 8

    def chain(x):
        for _ in range(100):
            x = linear(x, weight, None)
        return x

    with recording(Arena(3 * x.nbytes)) as tape:  # input, output, and the one given back
        out = chain(x)
    assert torch.equal(out, chain(x))
    x.normal_()
    tape.replay()
    assert torch.equal(out, chain(x))


def test_too_small_an_arena():
    x, weight = torch.randn(4, 64), torch.randn(64, 64)
    with pytest.raises(MemoryError, match="more memory"), recording(Arena(512)):
        linear(x, weight, None)
    with recording(Arena(2048)) as tape:  # nothing is left behind
        out = linear(x, weight, None)
    tape.replay()
    torch.testing.assert_close(out, x @ weight.T)


@pytest.mark.parametrize(
    "what",
    [
        lambda x: x.max().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x if x[0] > 0 else -x,
        lambda x: int(x[0]),
        lambda x: x + torch.rand(3),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x * torch.tensor([1.0, 2.0, 3.0]),
        lambda x: x + torch.from_numpy(np.zeros(3, dtype=np.float32)),
    ],
)
def test_what_could_differ_the_next_time_is_refused(what):
    x = torch.tensor([1.0, 2.0, 3.0])
    what(x)
    with pytest.raises(NotRepeatable), recording(Arena(4096)):
        what(x)


def test_poison_shows_what_is_computed_in_secret():
    x = torch.randn(16)

    def secret(x):
        out = torch.empty_like(x)
        ctypes.memmove(out.data_ptr(), x.data_ptr(), x.nbytes)
        return out * 2

    with recording(Arena(4096)) as tape:
        out = secret(x)
    assert torch.equal(out, x * 2)

    def look():
        with tape.poisoned():
            tape.replay()
            assert torch.equal(out, x * 2)

    with pytest.raises(AssertionError):
        look()
    assert torch.equal(out, x * 2)  # as it was
    with tape.poisoned():
        tape.replay()
    assert out.isnan().all()


def test_ids_are_checked_again():
    ids, table = torch.tensor([1, 2]), torch.randn(4, 8)
    with recording(Arena(4096)) as tape:
        out = embedding(ids, table)
    ids[1] = 4
    with pytest.raises(IndexError, match="id 4 at place 1 is no row"):
        tape.replay()
    ids[1] = 3
    tape.replay()
    assert torch.equal(out, table[ids])


def test_steps_come_again_in_their_place():
    seen = []
    x, weight = torch.ones(1, 2), torch.eye(2) * 2
    with recording(Arena(4096)) as tape:
        once = linear(x, weight, None)
        again(lambda: seen.append(once.clone()))
        twice = linear(once, weight, None)
        again(lambda: seen.append(twice.clone()))
    assert seen == []
    x.fill_(3)
    tape.replay()
    assert [one[0, 0].item() for one in seen] == [6, 12]
    again(lambda: seen.append(None))  # outside, nothing
    assert len(seen) == 2


def test_recording_does_not_bring_in_the_compiler():
    """torch would import its own at the first operation, which costs the first answer a second."""
    code = (
        "import sys, torch\nfrom fastgen.kernels.cpu import tape\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "x = torch.ones(3)\n"
        "torch.inference_mode().__enter__()\n"
        "with tape.recording(tape.Arena(4096)) as written: y = x + 1\n"
        "x.fill_(4)\nwritten.replay()\n"
        "print(before, int(y[0]), 'torch._dynamo' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "5", "False"], "before; what a replay computed; after"
