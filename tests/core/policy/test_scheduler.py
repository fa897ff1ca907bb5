"""Budget, streams, admission, preemption, aborts: one plan at a time."""

from __future__ import annotations

import random

import pytest

from fastgen.core.policy import NeverFits, Outcome, Pool, Scheduler, Sequence, State
from fastgen.errors import ConfigError

# SplitFuse


def test_every_pass_carries_exactly_the_budget_while_there_is_a_backlog(make_loop):
    loop = make_loop(num_blocks=2000, block_size=16, max_batch_tokens=100, max_sequences=40)
    rng = random.Random(0)
    for _ in range(120):
        length = rng.randint(1, 700)
        loop.add([rng.randrange(90) for _ in range(length)], length + rng.randint(1, 60))
    while loop.scheduler.num_waiting:
        assert loop.step().num_tokens == 100
    loop.drain()
    assert len(loop.reasons) == 120


def test_streams_get_a_token_in_every_pass_while_a_long_prompt_is_read(make_loop):
    loop = make_loop(num_blocks=400, block_size=16, max_batch_tokens=128, max_sequences=16)
    streams = [loop.add([i] * 5, 200) for i in range(10)]
    loop.step()
    long = loop.add([7] * 2000, 2010)
    passes = 0
    while long.num_computed < 2000:
        each = loop.step()
        passes += 1
        assert all(each.counts[seq.id] == 1 for seq in streams)
        assert each.num_tokens == 128 or long.num_computed == 2000
    assert passes == -(-2000 // 118)


def test_a_prompt_alone_takes_the_whole_budget(make_loop):
    loop = make_loop(max_batch_tokens=16)
    loop.add(range(40), 42)
    assert [loop.step().num_tokens for _ in range(3)] == [16, 16, 8]


def test_a_prompt_is_cut_into_even_pieces_where_others_fill_the_pass(make_loop):
    loop = make_loop(max_batch_tokens=16)
    for start in range(4):
        loop.add([start] * 20, 22)
    # 20 tokens need two passes: 10 and 10, and the next prompt takes the other 6.
    assert [loop.step().counts for _ in range(2)] == [{0: 10, 1: 6}, {0: 10, 1: 6}]


def test_streams_are_capped_at_the_budget(make_loop):
    loop = make_loop(max_batch_tokens=3, max_sequences=100)
    for i in range(10):
        loop.add([i], 12)
    loop.drain()
    assert loop.scheduler.max_running == 3
    assert all(each.num_tokens <= 3 for each in loop.passes)
    started: dict[int, int] = {}
    for number, each in enumerate(loop.passes):
        for i in each.counts:
            assert number == started.setdefault(i, number)  # in every pass, once it has begun
            started[i] += 1


def test_priority_is_read_first(make_loop):
    loop = make_loop(max_batch_tokens=16)
    loop.add(range(64), 66)
    loop.step()
    urgent = loop.add([5] * 16, 18, priority=1)
    assert loop.step().counts == {urgent.id: 16}


def test_the_work_of_a_pass_does_not_grow_with_context():
    class CountingList(list):
        reads = 0

        def __getitem__(self, index):
            type(self).reads += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
            return super().__getitem__(index)

        def __iter__(self):
            type(self).reads += len(self)
            return super().__iter__()

    def reads(context: int) -> int:
        scheduler = Scheduler(num_blocks=1000, block_size=4, max_batch_tokens=3000, max_sequences=2)
        for i in range(3):  # the third waits for a slot
            seq = Sequence([i] * context, max_tokens=context + 50)
            seq.tokens = CountingList(seq.tokens)
            scheduler.add(seq)
        plan = scheduler.plan()
        scheduler.commit(plan, [1] * len(plan.sampling))
        CountingList.reads = 0
        for _ in range(40):
            plan = scheduler.plan()
            scheduler.commit(plan, [1, 1])
        return CountingList.reads

    assert reads(1200) == reads(12) <= 2 * 44


# D1: what can never fit, and what can


def test_d1_what_never_fits_is_refused_at_once(make_loop):
    loop = make_loop(num_blocks=4)
    with pytest.raises(NeverFits, match=r"20 tokens.*5 cache blocks of 4 tokens.*has 4; ask for at most 17 tokens"):
        loop.add(range(10), 20)
    assert not loop.scheduler.has_work


def test_d1_the_last_token_needs_no_block(make_loop, solo):
    loop = make_loop(num_blocks=4)
    seq = loop.add(range(8), 17)
    loop.drain()
    assert seq.tokens == solo(range(8), 17)
    with pytest.raises(NeverFits):
        loop.add(range(8), 18)


def test_d1_three_that_fit_one_by_one_all_finish(make_loop, solo):
    loop = make_loop(num_blocks=4)
    seqs = [loop.add([i] * 6, 16) for i in range(3)]
    loop.drain()
    assert [seq.tokens for seq in seqs] == [solo([i] * 6, 16) for i in range(3)]
    assert all(each.num_tokens or each.preempted for each in loop.passes)


# D2: running out of blocks


def test_d2_two_half_read_prompts_do_not_lock_each_other(make_loop, solo):
    loop = make_loop(num_blocks=5, max_batch_tokens=4)
    seqs = [loop.add([i] * 14, 20) for i in range(2)]
    loop.drain()
    assert [seq.tokens for seq in seqs] == [solo([i] * 14, 20) for i in range(2)]
    assert loop.scheduler.stats.preemptions <= 1


@pytest.mark.parametrize("seed", range(10))
def test_d2_random_arrivals_in_a_small_pool(make_loop, solo, seed):
    rng = random.Random(seed)
    loop = make_loop(num_blocks=5, max_batch_tokens=4)
    wanted = []
    for _ in range(8):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 14))]
        wanted.append((loop.add(prompt, rng.randint(len(prompt) + 1, 20)), prompt))
        for _ in range(rng.randrange(6)):
            loop.step()
    loop.drain()
    assert all(seq.tokens == solo(prompt, seq.max_tokens) for seq, prompt in wanted)
    assert loop.scheduler.stats.preemptions <= 8


def test_d2_the_newest_of_the_lowest_priority_is_evicted(make_loop):
    loop = make_loop(num_blocks=9, max_batch_tokens=32, prefix_caching=False)
    for i, priority in enumerate((0, 1, 0)):
        loop.add([i] * 7, 30, priority=priority)
    loop.step()
    while not loop.passes[-1].preempted:
        loop.step()
    assert loop.passes[-1].preempted == [2]
    loop.drain()
    first = [i for each in loop.passes for i in each.preempted]
    assert 1 not in first


def test_d2_a_victim_returns_before_newcomers(make_loop):
    loop = make_loop(num_blocks=6, max_batch_tokens=32)
    for i in range(2):
        loop.add([i] * 8, 20)
    while not loop.passes or not loop.passes[-1].preempted:
        loop.step()
    loop.add([5], 6)
    loop.drain()
    admitted = [i for each in loop.passes for i in each.admitted]
    assert admitted == [0, 1, 1, 2]


def crowd(make_loop) -> tuple[int, int, int]:
    """Two hundred answers through a pool that holds a handful of them: most preemptions of one sequence, tokens
    computed again, tokens in all."""
    loop = make_loop(num_blocks=60, max_batch_tokens=64, max_sequences=60, prefix_caching=False)
    rng = random.Random(0)
    seqs = [loop.add([i] * rng.randint(1, 6), rng.randint(20, 60)) for i in range(200)]
    loop.drain()
    total = sum(len(seq.tokens) for seq in seqs)
    return max(seq.preemptions for seq in seqs), loop.scheduler.stats.recomputed_tokens, total


def test_d2_recomputing_is_bounded(make_loop):
    most, recomputed, total = crowd(make_loop)
    assert most <= 4  # log2(60) + 2 is the proven bound
    assert recomputed <= total / 3


def test_d2_without_spare_blocks_it_thrashes(make_loop, monkeypatch):
    """The negative control of the bound above."""

    def greedy(self, seq, staying, *, released=0):
        return self.allocator.available + released >= self.blocks_for(len(seq.tokens))

    monkeypatch.setattr(Pool, "fits", greedy)
    most, recomputed, total = crowd(make_loop)
    assert most > 4
    assert recomputed > total / 2


def test_d2_a_preempted_sequence_finds_its_own_blocks(make_loop):
    loop = make_loop(queue_order="priority", max_sequences=1)
    seq = loop.add(range(13), 20)
    loop.step()
    loop.add([9] * 3, 5, priority=1)
    while seq.preemptions == 0 or seq.state is State.WAITING:
        loop.step()
    assert loop.passes[-1].starts[seq.id] == 12
    assert loop.scheduler.stats.recomputed_tokens == 1


# D4: prefix hits


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9])
@pytest.mark.parametrize("budget", [3, 16])
def test_d4_the_same_prompt_twice(make_loop, solo, length, budget):
    loop = make_loop(max_batch_tokens=budget)
    prompt = list(range(length))
    for hits in (0, (length - 1) // 4 * 4):
        seq = loop.add(prompt, length + 3)
        loop.drain()
        assert seq.tokens == solo(prompt, length + 3)
        assert seq.num_cached == hits
    assert loop.scheduler.stats.prefix_queried_tokens == 2 * length


def test_d4_an_eviction_between_is_seen_at_admission(make_loop):
    loop = make_loop(num_blocks=4)
    loop.add(range(9), 10)
    loop.drain()
    loop.add([50] * 10, 16)  # takes all four blocks in the end
    again = loop.add(range(9), 10)
    loop.drain()
    assert again.num_cached == 0


def test_d4_equal_prompts_at_once_share_blocks_in_the_end(make_loop):
    loop = make_loop(max_batch_tokens=64)
    seqs = [loop.add(range(16), 30) for _ in range(2)]
    loop.step()
    plan = loop.plan()
    assert seqs[0].blocks[:4] == seqs[1].blocks[:4]
    assert [write for write in plan.block_writes if write[0] == seqs[1].slot][:4] == [
        (seqs[1].slot, i, seqs[0].blocks[i]) for i in range(4)
    ]


# D5, at the level of plans


def test_d5_a_salt_keeps_tenants_apart(make_loop):
    loop = make_loop()
    hits = []
    for salt in ("a", "b", "a"):
        seq = loop.add(range(9), 10, namespace=("model", salt))
        loop.drain()
        hits.append(seq.num_cached)
    assert hits == [0, 0, 8]


# D9: prompts that must be computed


def test_d9_prompt_logprobs_read_no_prefix_but_write_one(make_loop):
    loop = make_loop(max_batch_tokens=4)
    loop.add(range(9), 11)
    loop.drain()
    scored = loop.add(range(9), 11, read_cache=False)
    loop.passes.clear()
    loop.drain()
    assert [(each.starts[scored.id], each.counts[scored.id]) for each in loop.passes][:3] == [(0, 4), (4, 4), (8, 1)]
    writer = make_loop(max_batch_tokens=4)
    writer.add(range(9), 11, read_cache=False)
    writer.drain()
    reader = writer.add(range(9), 11)
    writer.drain()
    assert reader.num_cached == 8


# How sequences end


def test_stop_ids_and_min_tokens(make_loop, solo):
    answer = solo([3, 1, 4], 20)[3:]
    loop = make_loop()
    seq = loop.add([3, 1, 4], 20, stop_ids={answer[2]})
    late = loop.add([3, 1, 4], 20, stop_ids=set(answer), min_tokens=5)
    loop.drain()
    assert (seq.finish_reason, seq.stop, seq.num_output) == ("stop", answer[2], 3)
    assert (late.finish_reason, late.stop, late.num_output) == ("stop", answer[5], 6)


def test_a_stop_id_as_last_token_is_a_stop(make_loop, solo):
    last = solo([3, 1, 4], 6)[-1]
    loop = make_loop()
    seq = loop.add([3, 1, 4], 6, stop_ids={last})
    loop.drain()
    assert (seq.finish_reason, seq.num_output) == ("stop", 3)


def test_a_failed_row_ends_its_own_sequence_only(make_loop):
    loop = make_loop()
    bad, good = loop.add(range(8), 12), loop.add([1] * 8, 12)
    plan = loop.plan()
    outcomes = loop.scheduler.commit(plan, [None, 5])
    assert [(o.sequence, o.token, o.finish_reason) for o in outcomes] == [(bad, None, "error"), (good, 5, None)]
    loop.drain()
    assert loop.add(range(9), 12).num_cached == 0  # nothing it computed is trusted


def test_a_failed_pass_ends_what_was_in_it(make_loop):
    loop = make_loop(max_batch_tokens=8)
    first = loop.add(range(8), 12)
    waiting = loop.add([1] * 8, 12)
    plan = loop.plan()
    assert [(o.sequence, o.finish_reason) for o in loop.scheduler.fail(plan)] == [(first, "error")]
    loop.drain()
    assert waiting.finish_reason == "length"
    again = loop.add(range(8), 12)
    loop.drain()
    assert again.num_cached == 0


# D8: abort at every stage


def end_by_abort(loop, seq) -> None:
    """Twice, and it is reported once; the pool comes back and the next request is right."""
    loop.scheduler.abort(seq)
    loop.scheduler.abort(seq)
    assert loop.scheduler.has_work
    loop.drain()
    loop.scheduler.abort(seq)
    assert not loop.scheduler.has_work
    assert loop.reasons[seq.id] == seq.finish_reason == "abort"
    assert (seq.blocks, seq.slot) == ([], -1)


def next_request_is_right(loop, solo) -> None:
    seq = loop.add(range(13), 20)
    loop.drain()
    assert seq.tokens == solo(range(13), 20)


def test_d8_while_queued(make_loop, solo):
    loop = make_loop()
    end_by_abort(loop, loop.add(range(13), 20))
    next_request_is_right(loop, solo)


@pytest.mark.parametrize("passes", [1, 3, 4, 6], ids=["between chunks", "last chunk next", "first token", "streaming"])
def test_d8_between_passes(make_loop, solo, passes):
    loop = make_loop(max_batch_tokens=4)
    seq = loop.add(range(13), 20)
    for _ in range(passes):
        loop.step()
    end_by_abort(loop, seq)
    next_request_is_right(loop, solo)


@pytest.mark.parametrize("passes", [0, 2, 3, 5], ids=["first chunk", "middle chunk", "last chunk", "streaming"])
def test_d8_in_a_running_pass(make_loop, solo, passes):
    loop = make_loop(max_batch_tokens=4)
    seq = loop.add(range(13), 20)
    for _ in range(passes):
        loop.step()
    known = len(seq.tokens)
    plan = loop.plan()
    loop.scheduler.abort(seq)
    assert seq.state is State.RUNNING  # the pass still writes to its blocks
    assert loop.scheduler.stats.used_blocks > 0
    outcomes = loop.commit(plan)
    assert [(o.token, o.finish_reason) for o in outcomes] == [(None, "abort")]
    assert len(seq.tokens) == known
    assert (seq.blocks, seq.slot, loop.scheduler.has_work) == ([], -1, False)
    next_request_is_right(loop, solo)


def test_d8_running_but_not_in_the_pass(make_loop):
    loop = make_loop(max_batch_tokens=4)
    low = loop.add(range(13), 20)
    loop.step()
    loop.add([1] * 4, 6, priority=1)
    plan = loop.plan()
    assert low not in plan.sequences
    loop.scheduler.abort(low)
    assert Outcome(low, None, "abort") in loop.commit(plan)
    loop.drain()


def test_d8_while_preempted(make_loop, solo):
    loop = make_loop(queue_order="priority", max_sequences=1)
    seq = loop.add(range(13), 20)
    loop.step()
    loop.add([1] * 4, 30, priority=1)
    loop.step()
    assert (seq.state, seq.preemptions) == (State.WAITING, 1)
    end_by_abort(loop, seq)
    next_request_is_right(loop, solo)


def test_d8_in_the_pass_that_would_finish_it(make_loop):
    loop = make_loop()
    seq = loop.add(range(4), 5)
    plan = loop.plan()
    loop.scheduler.abort(seq)
    assert [o.finish_reason for o in loop.commit(plan)] == ["abort"]


def test_d8_after_the_end_changes_nothing(make_loop):
    loop = make_loop()
    seq = loop.add(range(4), 5)
    loop.drain()
    loop.scheduler.abort(seq)
    assert not loop.scheduler.has_work
    assert (loop.reasons[seq.id], seq.finish_reason) == ("length", "length")


def test_d8_what_an_aborted_pass_computed_is_a_true_prefix(make_loop):
    loop = make_loop(max_batch_tokens=8)
    seq = loop.add(range(20), 24)
    plan = loop.plan()
    loop.scheduler.abort(seq)
    loop.commit(plan)
    again = loop.add(range(20), 24)
    loop.drain()
    assert again.num_cached == 8  # complete computed blocks, not the 20 tokens it had blocks for


# Misuse


def test_plan_and_commit_alternate(make_loop):
    loop = make_loop()
    loop.add(range(4), 6)
    plan = loop.plan()
    with pytest.raises(RuntimeError, match="was not committed"):
        loop.scheduler.plan()
    with pytest.raises(ValueError, match="0 tokens given for 1 sampling rows"):
        loop.scheduler.commit(plan, [])
    loop.commit(plan)
    with pytest.raises(RuntimeError, match="not the plan in flight"):
        loop.scheduler.commit(plan, [1])


def test_a_sequence_is_added_once(make_loop):
    loop = make_loop()
    seq = loop.add(range(4), 6)
    with pytest.raises(ValueError, match="was added before"):
        loop.scheduler.add(seq)
    with pytest.raises(ValueError, match="was never added"):
        loop.scheduler.abort(Sequence([1], max_tokens=2))


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_batch_tokens", "max_sequences"])
def test_sizes_below_one_are_refused(make_loop, name):
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        make_loop(**{name: 0})


def test_an_idle_scheduler_plans_an_empty_pass(make_loop):
    loop = make_loop()
    assert loop.step().num_tokens == 0
    assert loop.scheduler.stats.passes == 0


def test_stats_count_what_happened(make_loop):
    loop = make_loop()
    loop.add(range(8), 10)
    loop.step()
    stats = loop.scheduler.stats
    assert (stats.running, stats.waiting, stats.used_blocks, stats.passes, stats.tokens) == (1, 0, 2, 1, 8)
    loop.drain()
    stats = loop.scheduler.stats
    assert (stats.running, stats.cached_blocks, stats.free_blocks, stats.tokens) == (0, 2, 62, 9)


# Computing anew at a length


def test_renewal_at_a_length(make_loop):
    """A sequence that comes to know ten tokens computes all of them again, once, under its other namespace."""
    loop = make_loop()
    seq = loop.add(range(6), 14, namespace="short", renew_at=10, renewed_namespace="long")
    other = loop.add(range(6), 14, namespace="short")
    while seq.state is not State.FINISHED:
        loop.step()
    starts = [p.starts.get(seq.id) for p in loop.passes]
    assert starts == [0, 6, 7, 8, 0, 10, 11, 12]
    assert (seq.renewed, seq.namespace, seq.preemptions) == (10, "long", 0)
    assert other.renewed == 0
    assert loop.scheduler.stats.recomputed_tokens == 9
    again = loop.add(range(13), 15, namespace="long")
    loop.drain()
    assert again.num_cached == 4  # the first block is of the prompt's own tokens


def test_renewal_does_not_outlive_the_end(make_loop):
    loop = make_loop()
    seq = loop.add(range(6), 10, renew_at=10)
    loop.drain()
    assert (len(seq.tokens), seq.renewed) == (10, 0)
