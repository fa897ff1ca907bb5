"""The policies that Dynamic SplitFuse is compared with, pass by pass."""

from __future__ import annotations

from typing import get_args

import pytest

from fastgen.config import EngineConfig
from fastgen.core.policy import POLICIES, QUEUE_ORDERS, NeverFits, Sequence, policy_named
from fastgen.errors import ConfigError


def prompts(loop, *lengths: int, new: int = 20) -> list[Sequence]:
    """With nothing in common."""
    return [loop.add([length] * length, length + new) for length in lengths]


def test_prefill_first_stalls_generations_while_a_prompt_fits(make_loop):
    loop = make_loop(policy="prefill-first", num_blocks=200, max_batch_tokens=60)
    prompts(loop, 10, 12)
    assert loop.step().counts == {0: 10, 1: 12}
    assert loop.step().counts == {0: 1, 1: 1}
    prompts(loop, 50, 30, 20, new=10)
    assert loop.step().counts == {2: 50}  # 30 more would be over budget, and nobody overtakes
    assert loop.step().counts == {3: 30, 4: 20}
    assert loop.step().counts == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}


def test_whole_prompts_join_the_running_generations(make_loop):
    loop = make_loop(policy="whole-prompt", num_blocks=200, max_batch_tokens=60)
    prompts(loop, 10, 12)
    assert loop.step().counts == {0: 10, 1: 12}
    prompts(loop, 50, 30, 20, new=10)
    assert loop.step().counts == {0: 1, 1: 1, 2: 50}
    assert loop.step().counts == {0: 1, 1: 1, 2: 1, 3: 30, 4: 20}


def test_splitfuse_on_the_same_arrivals_carries_the_same_in_every_pass(make_loop):
    """What the two above are compared with."""
    loop = make_loop(num_blocks=200, max_batch_tokens=34)
    prompts(loop, 10, 12)
    assert loop.step().num_tokens == 22
    prompts(loop, 50, 30, 16)
    assert [loop.step().num_tokens for _ in range(3)] == [34, 34, 34]
    assert all({0, 1} <= set(each.counts) for each in loop.passes)


@pytest.mark.parametrize("policy", ["prefill-first", "whole-prompt"])
def test_only_the_uncached_end_of_a_prompt_counts(make_loop, policy):
    loop = make_loop(policy=policy, num_blocks=200, max_batch_tokens=40)
    loop.add(range(33), 34)
    loop.drain()
    loop.add([9] * 30, 33)
    loop.add(range(33), 34)  # one token to compute: it fits beside the other
    assert loop.step().counts == {1: 30, 2: 1}


@pytest.mark.parametrize("policy", ["prefill-first", "whole-prompt"])
def test_a_preempted_sequence_is_computed_again_in_one_piece(make_loop, solo, policy):
    loop = make_loop(policy=policy, num_blocks=8, max_batch_tokens=40, prefix_caching=False)
    sequences = [loop.add([i] * 8, 24) for i in range(2)]
    loop.drain()
    assert loop.scheduler.stats.preemptions == 1
    again = next(each for each in loop.passes[1:] if each.admitted)
    assert again.counts[1] > 8
    assert [seq.tokens for seq in sequences] == [solo([i] * 8, 24) for i in range(2)]


@pytest.mark.parametrize("policy", ["prefill-first", "whole-prompt"])
def test_what_can_never_run_whole_is_refused_at_once(make_loop, policy):
    loop = make_loop(policy=policy, max_batch_tokens=16)
    loop.add(range(10), 17)
    with pytest.raises(NeverFits, match=r"a pass of 17, but max_batch_tokens is 16 .* ask for at most 17 tokens"):
        loop.add(range(10), 18)


@pytest.mark.parametrize(
    ("policy", "budget"), [("splitfuse", 512), ("prefill-first", 2048), ("whole-prompt", 2048 + 127)]
)
def test_budget(policy, budget):
    """Room for the longest prompt, beside all others where they run together; never less than was asked for."""
    assert policy_named(policy).budget(512, 2048, 128) == budget
    assert policy_named(policy).budget(9000, 2048, 128) == 9000


def test_names():
    assert get_args(EngineConfig.model_fields["policy"].annotation) == POLICIES
    assert get_args(EngineConfig.model_fields["queue_order"].annotation) == QUEUE_ORDERS
    with pytest.raises(ConfigError, match=r"policy: 'split-fuse' is none of .*Did you mean 'splitfuse'"):
        policy_named("split-fuse")
