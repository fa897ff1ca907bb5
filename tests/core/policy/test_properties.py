"""Random driving of the scheduler against a shadow model, every policy and queue order, 270,000 passes and more.

The shadow plays the runtime. It keeps its own block tables from what plans announce, and for every position of every
physical block a fingerprint of the whole token prefix (and namespace) whose K/V was written there. A row may rely on a
block only if the fingerprints are exactly its own. Everything else the scheduler promises is checked after every plan
and every commit too. ``test_the_shadow_catches`` breaks the scheduler in a dozen ways and sees each of them caught.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from fastgen.core.policy import (
    POLICIES,
    QUEUE_ORDERS,
    BlockAllocator,
    BlockError,
    Pool,
    PrefixCache,
    PrefixMatch,
    Scheduler,
    Sequence,
    State,
)
from fastgen.core.policy import pool as pool_module
from fastgen.core.policy import prefix_cache as prefix_cache_module
from fastgen.core.policy import residents as residents_module
from fastgen.core.policy.composition import PrefillFirst, SplitFuse, WholePrompt
from fastgen.core.policy.residents import Residents

EPISODES = 345
STEPS = 120  # of arrivals; then it drains
VOCAB = 3  # few tokens: shared prefixes and equal outputs are common
STOP = 2


def extend(fingerprint: int, token: int) -> int:
    """Fingerprint of a prefix and one more token; 61 bits, so no collision in a test run."""
    return (fingerprint * 1_000_003 + token + 1) % (2**61 - 1)


def root_print(seq: Sequence) -> int:
    """Before the first token."""
    return hash(seq.namespace) % 1009 + 7


def rank(seq: Sequence) -> tuple[int, int]:
    return (-seq.priority, seq.seniority)


class Shadow:
    """The runtime and the book-keeper; every method asserts."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.size = scheduler.block_size
        self.content = [[None] * self.size for _ in range(scheduler.num_blocks)]
        self.tables: dict[int, list[int]] = {}
        self.prints: dict[int, list[int]] = {}  # by sequence id: fingerprint of each known prefix
        self.alive: dict[int, Sequence] = {}
        self.ended: Counter[int] = Counter()
        self.log: list[object] = []
        self.passes = self.renewals = 0

    def add(self, seq: Sequence) -> None:
        self.scheduler.add(seq)
        self.alive[seq.id] = seq
        self.prints[seq.id] = [root_print(seq)]
        self.follow(seq)

    def follow(self, seq: Sequence) -> None:
        prints = self.prints[seq.id]
        if prints[0] != root_print(seq):
            assert seq.renewed, "another namespace, and not renewed"
            assert seq.state is not State.RUNNING, "keeps blocks that do not hold what it relies on"
            prints[:] = [root_print(seq)]
            self.renewals += 1
        for token in seq.tokens[len(prints) - 1 :]:
            prints.append(extend(prints[-1], token))

    def running(self) -> list[Sequence]:
        return [seq for seq in self.alive.values() if seq.state is State.RUNNING]

    def plan(self):
        scheduler = self.scheduler
        before = self.running()
        streams = [seq for seq in before if len(seq.tokens) - seq.num_computed == 1]
        runnable = any(seq.state is not State.FINISHED for seq in self.alive.values())
        plan = scheduler.plan()
        self.passes += 1
        counts = dict(zip((seq.id for seq in plan.sequences), plan.counts, strict=True))
        self.log.append((tuple(counts.items()), tuple(plan.block_writes), tuple(s.slot for s in plan.admitted)))

        assert len(counts) == len(plan.sequences), "a sequence is in the pass twice"
        assert plan.num_tokens == sum(plan.counts) <= scheduler.max_batch_tokens, "the pass is over budget"
        assert all(count >= 1 for count in plan.counts), "an empty row"
        assert plan.sequences or not runnable, "nothing runs though something could"
        if isinstance(scheduler._policy, PrefillFirst) and plan.admitted:
            assert plan.sequences == plan.admitted, "something else runs beside the prompts"
            streams = []
        for seq in streams:
            assert counts.get(seq.id) == 1 or seq in plan.preempted, "a stream was left out of the pass"
        staying = [seq for seq in before if seq.state is State.RUNNING]
        assert all(rank(seq) < rank(victim) for seq in staying for victim in plan.preempted), "the wrong victim"
        self.check_filled(plan, counts)

        for seq in plan.admitted:
            assert seq.state is State.RUNNING
            assert 0 <= seq.num_computed < len(seq.tokens), "nothing left to compute after a prefix hit"
            assert seq.read_cache or seq.num_computed == 0, "took a prefix though told not to"
            assert len(seq.blocks) * self.size >= len(seq.tokens), "admitted without blocks for all its tokens"
            self.tables[seq.slot] = seq.blocks.copy()
        for slot, index, block in plan.block_writes:
            table = self.tables[slot]
            table[index : index + 1] = [block]
        self.check_state()
        self.compute(plan)
        return plan

    def check_filled(self, plan, counts: dict[int, int]) -> None:
        scheduler = self.scheduler
        left = scheduler.max_batch_tokens - plan.num_tokens
        if not isinstance(scheduler._policy, SplitFuse):
            assert all(c == s.behind for s, c in zip(plan.sequences, plan.counts, strict=True)), "a prompt was cut"
        if not left or plan.preempted:
            return
        running = self.running()
        stalled = isinstance(scheduler._policy, PrefillFirst) and plan.admitted
        for seq in running:
            if not (stalled and seq.behind == 1):
                assert counts.get(seq.id) == seq.behind, "budget left, but prompt tokens wait"
        head = scheduler._waiting.head()
        if head is None or len(running) == scheduler.max_running:
            return
        assert running, "an empty machine admits nobody"
        if not isinstance(scheduler._policy, SplitFuse) and len(head.tokens) > left:
            return  # without its prefix hits, that is; close enough
        needed = math.ceil(len(head.tokens) / self.size) + max(head.headroom, len(running) + 1)
        alone = head.headroom and math.ceil(len(head.tokens) / self.size) + head.headroom >= scheduler.num_blocks
        assert alone or scheduler.pool.allocator.available < needed, "budget left, but a sequence that fits waits"

    def compute(self, plan) -> None:
        """Run the pass: rely on the prefix, write the new positions."""
        counts = self.scheduler.pool.allocator.counts
        written = set()
        for seq, count in zip(plan.sequences, plan.counts, strict=True):
            table, prints, start = self.tables[seq.slot], self.prints[seq.id], seq.num_computed
            for i in range(0, start, self.size):
                n = min(self.size, start - i)
                held = self.content[table[i // self.size]][:n]
                assert held == prints[i + 1 : i + 1 + n], "a block does not hold what a sequence relies on"
            for i in range(start, start + count):
                block = table[i // self.size]
                assert counts[block] == 1, "writes into a block that others hold"
                assert (block, i % self.size) not in written, "two rows write the same place"
                written.add((block, i % self.size))
                self.content[block][i % self.size] = prints[i + 1]
        rows = [i for i, s in enumerate(plan.sequences) if s.num_computed + plan.counts[i] == len(s.tokens)]
        assert plan.sampling == rows, "the sampling rows are wrong"

    def sample(self, plan) -> list[int | None]:
        """The token a fixed model would give: a function of the prefix alone."""
        return [self.prints[plan.sequences[row].id][-1] // 7 % VOCAB for row in plan.sampling]

    def commit(self, plan, tokens: list[int | None]) -> None:
        for row, token in zip(plan.sampling, tokens, strict=True):
            if token is None:
                self.spoil(plan, row)
        aborted = {seq.id for seq in self.alive.values() if seq.aborted}
        sampled = [plan.sequences[row] for row in plan.sampling]
        known = {seq.id: len(seq.tokens) for seq in self.alive.values()}
        outcomes = self.scheduler.commit(plan, tokens)
        assert [o.sequence for o in outcomes[: len(sampled)]] == sampled, "outcomes are not in row order"
        for outcome, token in zip(outcomes, tokens, strict=False):
            seq = outcome.sequence
            expected = None
            if seq.id in aborted:
                token, expected = None, "abort"
            elif token is None:
                expected = "error"
            elif token in seq.stop_ids and known[seq.id] + 1 - seq.num_prompt > seq.min_tokens:
                expected = "stop"
            elif known[seq.id] + 1 == seq.max_tokens:
                expected = "length"
            assert (outcome.token, outcome.finish_reason) == (token, expected), "the wrong outcome"
            assert len(seq.tokens) == known[seq.id] + (token is not None)
        assert all(o.finish_reason == "abort" for o in outcomes[len(sampled) :])
        assert aborted <= {o.sequence.id for o in outcomes}, "an abort was not reported"
        self.settle(outcomes)

    def spoil(self, plan, row: int) -> None:
        """What a failed row wrote may be NaN: nobody may rely on it."""
        seq = plan.sequences[row]
        for i in range(seq.num_computed, seq.num_computed + plan.counts[row]):
            self.content[self.tables[seq.slot][i // self.size]][i % self.size] = None

    def fail(self, plan) -> None:
        for row in range(len(plan.sequences)):
            self.spoil(plan, row)
        outcomes = self.scheduler.fail(plan)
        assert [o.sequence for o in outcomes[: len(plan.sequences)]] == plan.sequences
        assert all(o.finish_reason in ("abort", "error") and o.token is None for o in outcomes)
        self.settle(outcomes)

    def settle(self, outcomes) -> None:
        for outcome in outcomes:
            seq = outcome.sequence
            self.follow(seq)
            if outcome.finish_reason is not None:
                self.ended[seq.id] += 1
                assert self.ended[seq.id] == 1, "a sequence ended twice"
                assert seq.state is State.FINISHED
                assert seq.finish_reason == outcome.finish_reason
                assert not seq.blocks
                assert seq.slot == -1
                del self.alive[seq.id]
        self.check_state(tables=False)

    def check_state(self, *, tables: bool = True) -> None:
        scheduler, allocator = self.scheduler, self.scheduler.pool.allocator
        running = self.running()
        owners = [0] * scheduler.num_blocks
        for seq in running:
            for block in seq.blocks:
                owners[block] += 1
            if tables:
                assert self.tables[seq.slot] == seq.blocks, "the runtime's block table is stale"
        assert owners == allocator.counts, "a block's count is not the number of its owners"
        assert allocator.num_used == sum(map(bool, owners))
        assert allocator.num_free + allocator.num_cached + allocator.num_used == scheduler.num_blocks
        assert len({seq.slot for seq in running}) == len(running) == scheduler.num_running <= scheduler.max_running
        assert all(0 <= seq.slot < scheduler.max_running for seq in running)

    def check_tree(self) -> None:
        """Every cached block holds the K/V of exactly the path that leads to it."""
        cache = self.scheduler.pool.cache
        if cache is None:
            return
        seen = 0
        paths = [(root, [hash(namespace) % 1009 + 7]) for namespace, root in cache._roots.items()]
        while paths:
            node, prints = paths.pop()
            for key, child in node.children.items():
                path = prints[-1:]
                for token in key:
                    path.append(extend(path[-1], token))
                assert self.content[child.block] == path[1:], "a cached block is stale"
                paths.append((child, path))
                seen += 1
        assert seen == len(cache), "a cached block cannot be reached"
        assert set(self.scheduler.pool.allocator.cached_blocks()) <= cache._nodes.keys()


def random_scheduler(rng: random.Random, **fixed) -> Scheduler:
    whole = fixed.get("policy", "splitfuse") != "splitfuse"
    options = {
        "num_blocks": rng.randint(3, 16),
        "block_size": rng.randint(1, 4),
        "max_batch_tokens": rng.choice((8, 16, 31, 36, 80) if whole else (1, 2, 3, 5, 8, 16)),
        "max_sequences": rng.randint(1, 6),
        "queue_order": rng.choice(QUEUE_ORDERS),
        "prefix_caching": rng.random() < 0.85,
        "seed": rng.randrange(100),
    }
    return Scheduler(**{**options, **fixed})


def random_sequence(rng: random.Random, scheduler: Scheduler) -> Sequence:
    limit = min(scheduler.max_sequence_tokens, 32)
    document = random.Random(rng.randrange(3))  # one of three texts, cut anywhere
    longest = limit - 1 if rng.random() < 0.6 else min(3, limit - 1)
    prompt = [document.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
    if rng.random() < 0.4:
        prompt[-1] = rng.randrange(VOCAB)
    return Sequence(
        prompt,
        max_tokens=rng.randint(len(prompt) + 1, limit),
        stop_ids={STOP} if rng.random() < 0.3 else (),
        min_tokens=rng.randrange(3),
        priority=rng.choice((0, 0, 0, 1, -1)),
        namespace=rng.choice((None, None, None, "tenant")),
        renew_at=rng.randint(len(prompt) + 1, limit) if rng.random() < 0.2 else None,
        renewed_namespace="renewed",
        read_cache=rng.random() < 0.9,
    )


def drive(rng: random.Random, scheduler: Scheduler, *, steps: int = STEPS, calm: bool = False) -> Shadow:
    """``steps`` passes with arrivals, aborts at every stage and failures (none if ``calm``), then a drain."""
    shadow = Shadow(scheduler)
    load = rng.choice((0.1, 0.3, 0.6))
    everyone: list[Sequence] = []

    def maybe_abort() -> None:
        if not calm and everyone and rng.random() < 0.04:
            scheduler.abort(rng.choice(everyone[-12:]))  # queued, reading, streaming, preempted or long gone

    step = 0
    while step < steps or scheduler.has_work:
        if step < steps:
            while rng.random() < load and scheduler.num_waiting < 8:
                shadow.add(random_sequence(rng, scheduler))
                everyone.append(next(reversed(shadow.alive.values())))
        maybe_abort()
        plan = shadow.plan()
        maybe_abort()
        tokens = shadow.sample(plan)
        if not calm and rng.random() < 0.01:
            tokens = [None if rng.random() < 0.5 else token for token in tokens]
        if not calm and rng.random() < 0.003:
            shadow.fail(plan)
        else:
            shadow.commit(plan, tokens)
        maybe_abort()
        if step % 32 == 0:
            shadow.check_tree()
        step += 1
        # 14 waiting and running sequences of at most 32 tokens, each computed anew a bounded number of times
        assert step < steps + 14 * 32 * 32, "it does not drain"
    shadow.check_tree()
    stats = scheduler.stats
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks, "blocks leaked"
    assert not shadow.alive
    assert shadow.ended.keys() == {seq.id for seq in everyone}
    check_preemptions(scheduler, everyone)
    return shadow


def check_preemptions(scheduler: Scheduler, everyone: list[Sequence]) -> None:
    """The bound that the scheduler's text proves, for each sequence."""
    for seq in everyone:
        # One that is computed anew enters a second time.
        higher = sum((1 + bool(other.renewed)) * (other.priority > seq.priority) for other in everyone)
        bound = math.log2(scheduler.num_blocks) + 2 + higher
        if not scheduler._takes_over:
            assert seq.preemptions <= bound, "the same victim again and again"


SETUPS = [{"queue_order": order} for order in QUEUE_ORDERS] + [{"policy": policy} for policy in POLICIES[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("options", SETUPS, ids=str)
def test_random_driving(options):
    passes = preemptions = hits = renewals = 0
    for episode in range(EPISODES):
        rng = random.Random(f"{list(options.values())} {episode}")
        scheduler = random_scheduler(rng, **options)
        shadow = drive(rng, scheduler)
        passes += shadow.passes
        preemptions += scheduler.stats.preemptions
        hits += scheduler.stats.prefix_hit_tokens
        renewals += shadow.renewals
    print(f"{options}: {passes} passes, {preemptions} preemptions, {hits} prefix hit tokens")
    assert passes >= 45_000
    assert preemptions > 300  # the pools were small enough to matter
    assert hits > 5000
    assert renewals > 300


@pytest.mark.parametrize("options", SETUPS, ids=str)
def test_same_arrivals_same_plans(options):
    def logs() -> list[object]:
        found = []
        for episode in range(10):
            rng = random.Random(episode)
            found.append(drive(rng, random_scheduler(rng, **options)).log)
        return found

    assert logs() == logs()


@pytest.mark.parametrize("episode", range(60))
def test_every_policy_gives_the_same_answers(episode):
    """Equal arrivals, in caches that are short for some: equal tokens, equal ends."""

    def answers(policy: str) -> list[tuple[list[int], str]]:
        rng = random.Random(episode)
        sizes = {"num_blocks": rng.randint(9, 16), "block_size": rng.randint(2, 4), "max_sequences": rng.randint(1, 6)}
        limits = Scheduler(max_batch_tokens=80, **sizes)
        scheduler = Scheduler(
            max_batch_tokens=80 if policy != "splitfuse" else rng.randint(1, 20), policy=policy, **sizes
        )
        rng = random.Random(episode)
        sequences = [random_sequence(rng, limits) for _ in range(25)]
        shadow, coming = Shadow(scheduler), iter(sequences)
        arrivals = random.Random(episode)
        while len(shadow.ended) < len(sequences):
            for _ in range(arrivals.randint(0, 2)):
                if (seq := next(coming, None)) is not None:
                    shadow.add(seq)
            plan = shadow.plan()
            shadow.commit(plan, shadow.sample(plan))
        return [(seq.tokens, seq.finish_reason) for seq in sequences]

    first, *others = [answers(policy) for policy in POLICIES]
    assert all(other == first for other in others)


def test_random_order_depends_on_its_seed():
    def log(seed: int) -> list[object]:
        rng = random.Random(1)
        return drive(rng, random_scheduler(rng, queue_order="random", seed=seed, max_sequences=2), calm=True).log

    assert log(1) != log(2)


# Negative controls: break the scheduler, see it caught


def leak(monkeypatch):
    release = BlockAllocator.release
    monkeypatch.setattr(BlockAllocator, "release", lambda self, block: block == 2 or release(self, block))


def release_twice(monkeypatch):
    release = BlockAllocator.release_table
    monkeypatch.setattr(
        BlockAllocator, "release_table", lambda self, blocks: (release(self, blocks), release(self, blocks[:1]))
    )


def forget_evictions(monkeypatch):
    monkeypatch.setattr(PrefixCache, "_forget", lambda self, block: None)


def match_everything(monkeypatch):
    init = PrefixMatch.__init__

    def broken(self, cache, namespace, tokens):
        init(self, cache, namespace, tokens)
        self._limit = len(tokens) // cache.block_size

    monkeypatch.setattr(PrefixMatch, "__init__", broken)


def share_between_namespaces(monkeypatch):
    insert, init = PrefixCache.insert, PrefixMatch.__init__
    monkeypatch.setattr(PrefixCache, "insert", lambda self, namespace, *rest: insert(self, 0, *rest))
    monkeypatch.setattr(PrefixMatch, "__init__", lambda self, cache, namespace, tokens: init(self, cache, 0, tokens))


def weak_keys(monkeypatch):
    """A key that forgets the order of a block's tokens."""
    monkeypatch.setattr(prefix_cache_module, "tuple", lambda tokens: tuple(sorted(tokens)), raising=False)
    monkeypatch.setattr(pool_module, "tuple", lambda tokens: tuple(sorted(tokens)), raising=False)


def trust_stale_matches(monkeypatch):
    refresh = PrefixMatch.refresh
    monkeypatch.setattr(PrefixMatch, "refresh", lambda self: self._nodes or refresh(self))


def allocate_before_holding_hits(monkeypatch):
    """Hits that are still cached, not held, while the rest is allocated."""
    take = Pool.take

    def broken(self, seq):
        hits = list(self.hits(seq))
        rest = self.blocks_for(len(seq.tokens)) - len(hits)
        for block in [self.allocator.allocate() for _ in range(rest)]:
            self.allocator.release(block)
        seq.match = type("Kept", (), {"refresh": lambda _: hits})()
        take(self, seq)

    monkeypatch.setattr(Pool, "take", broken)


def parents_first(monkeypatch):
    def broken(self, blocks):
        for block in blocks:
            self.release(block)

    monkeypatch.setattr(BlockAllocator, "release_table", broken)


def keep_unfilled_blocks(monkeypatch):
    """Enter the block after the last full one too."""
    keep = Pool.keep_full_blocks

    def broken(self, seq, first):
        computed = seq.num_computed
        if len(seq.blocks) * self.block_size >= computed + self.block_size <= len(seq.tokens):
            seq.num_computed += self.block_size
        changed = keep(self, seq, first)
        seq.num_computed = computed
        return changed

    monkeypatch.setattr(Pool, "keep_full_blocks", broken)


def silent_adoption(monkeypatch):
    keep = Pool.keep_full_blocks

    def broken(self, seq, first):
        keep(self, seq, first)
        return []

    monkeypatch.setattr(Pool, "keep_full_blocks", broken)


def late_streams(monkeypatch):
    """Prompts before streams."""
    grow = Residents.grow_streams

    def broken(self, plan):
        short = grow(self, plan)
        self.streams = self.streams[: len(self.streams) // 2 or 1]
        return short

    monkeypatch.setattr(Residents, "grow_streams", broken)


def one_prompt_at_a_time(monkeypatch):
    monkeypatch.setattr(Pool, "fits", lambda self, seq, staying, released=0: not staying)


def oldest_victim(monkeypatch):
    monkeypatch.setattr(residents_module, "rank", lambda seq: (seq.priority, -seq.seniority))


def abort_without_word(monkeypatch):
    end = Scheduler._end_of_pass

    def broken(self, regroup):
        self._aborted.clear()
        return end(self, regroup)

    monkeypatch.setattr(Scheduler, "_end_of_pass", broken)


FAULTS = {
    leak: "number of its owners",
    release_twice: "released twice|number of its owners|others hold",
    forget_evictions: "stale|does not hold|is free|orphan",
    match_everything: "nothing left to compute|division",
    share_between_namespaces: "does not hold|stale",
    weak_keys: "does not hold|stale",
    trust_stale_matches: "is free|does not hold|others hold|list index|number of its owners",
    allocate_before_holding_hits: "is free|does not hold|others hold|list index|number of its owners",
    parents_first: "before the blocks that continue it",
    keep_unfilled_blocks: "stale|evicted before|does not hold|others hold",
    silent_adoption: "block table is stale",
    late_streams: "left out|num_running|runs though|len",
    one_prompt_at_a_time: "that fits waits",
    oldest_victim: "wrong victim",
    abort_without_word: "not reported",
}


def drive_many(**options) -> None:
    for episode in range(200):
        rng = random.Random(episode)
        drive(rng, random_scheduler(rng, **options))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_shadow_catches(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, BlockError, RuntimeError, IndexError, ZeroDivisionError), match=FAULTS[fault]):
        drive_many()


MIXED_UP = [
    ("prefill-first", WholePrompt, "something else runs beside the prompts"),
    ("whole-prompt", SplitFuse, "a prompt was cut"),
    ("whole-prompt", PrefillFirst, "left out of the pass"),
]


@pytest.mark.parametrize(("policy", "really", "complaint"), MIXED_UP)
def test_the_shadow_tells_policies_apart(policy, really, complaint, monkeypatch):
    named = type(Scheduler(num_blocks=4, block_size=1, max_batch_tokens=4, max_sequences=2, policy=policy)._policy)
    other = really()
    monkeypatch.setattr(named, "compose", lambda self, *args: other.compose(*args))
    with pytest.raises(AssertionError, match=complaint):
        drive_many(policy=policy)
