"""Reference counts, eviction order, and a state machine over allocator and prefix cache together."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from fastgen.core.policy import BlockAllocator, BlockError, PrefixCache


def test_d6_freeing_twice_raises():
    allocator = BlockAllocator(4)
    block = allocator.allocate()
    allocator.release(block)
    with pytest.raises(BlockError, match=f"block {block} was released twice"):
        allocator.release(block)


def test_a_shared_block_is_free_after_its_last_holder():
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.acquire(block)
    allocator.release(block)
    assert (allocator.num_free, allocator.num_used) == (1, 1)
    allocator.release(block)
    assert (allocator.num_free, allocator.num_used) == (2, 0)


def test_a_free_block_cannot_be_acquired_or_kept():
    allocator = BlockAllocator(2)
    with pytest.raises(BlockError, match="block 1 is free"):
        allocator.acquire(1)
    with pytest.raises(BlockError, match="block 1 is held by nobody"):
        allocator.keep(1)


def test_nothing_left_raises():
    allocator = BlockAllocator(1)
    allocator.allocate()
    with pytest.raises(BlockError, match="all 1 blocks are held"):
        allocator.allocate()


def test_free_blocks_go_before_cached_ones_and_those_by_age():
    evicted: list[int] = []
    allocator = BlockAllocator(4, on_evict=evicted.append)
    blocks = [allocator.allocate() for _ in range(4)]
    for block in blocks[:3]:
        allocator.keep(block)
    allocator.release_table(blocks[:2])  # 1 before 0
    allocator.release(blocks[2])
    allocator.release(blocks[3])
    assert allocator.allocate() == blocks[3]
    assert evicted == []
    assert [allocator.allocate() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]] == evicted


def test_an_evicted_block_is_not_kept_any_more():
    allocator = BlockAllocator(1)
    block = allocator.allocate()
    allocator.keep(block)
    allocator.release(block)
    assert allocator.allocate() == block
    allocator.release(block)
    assert (allocator.num_free, allocator.num_cached) == (1, 0)


def test_no_blocks_at_all_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockAllocator(0)


class Machine(RuleBasedStateMachine):
    """Tables that are matched, appended to, forked, kept and released, in a pool of 8 blocks of 2 tokens. The model:
    who holds what, and what was last written into each block."""

    POOL = 8
    checks = 0

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(self.POOL)
        self.cache = PrefixCache(self.allocator, 2)
        self.tables: list[dict] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def start(self, tokens: list[int]) -> None:
        match = self.cache.match(None, tokens)
        nodes = list(match.refresh())
        assert len(nodes) * 2 < len(tokens)
        for i, node in enumerate(nodes):
            assert self.content[node.block] == tuple(tokens[: 2 * i + 2]), "a stale hit"
            self.allocator.acquire(node.block)
        blocks, node = [node.block for node in nodes], nodes[-1] if nodes else None
        self.tables.append({"tokens": tokens[: 2 * len(nodes)], "blocks": blocks, "node": node})

    @precondition(lambda self: self.tables and self.allocator.available)
    @rule(which=st.integers(0, 99), key=st.tuples(st.integers(0, 1), st.integers(0, 1)), keep=st.booleans())
    def append(self, which: int, key: tuple[int, int], keep: bool) -> None:
        table = self.tables[which % len(self.tables)]
        if table["node"] is None and table["blocks"]:
            keep = False  # what was not kept cannot be continued in the tree
        block = self.allocator.allocate()
        assert all(block not in other["blocks"] for other in self.tables), "a block in use was handed out"
        table["tokens"] = [*table["tokens"], *key]
        self.content[block] = tuple(table["tokens"])
        if keep:
            table["node"] = self.cache.insert(None, table["node"], key, block)
            block = table["node"].block
            assert self.content[block] == tuple(table["tokens"]), "adopted a stale block"
        else:
            table["node"] = None
        table["blocks"].append(block)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        table = self.tables[which % len(self.tables)]
        for block in table["blocks"]:
            self.allocator.acquire(block)
        self.tables.append({**table, "blocks": table["blocks"].copy()})

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        self.allocator.release_table(self.tables.pop(which % len(self.tables))["blocks"])

    @invariant()
    def counts_are_owners(self) -> None:
        type(self).checks += 1
        owners = [sum(table["blocks"].count(block) for table in self.tables) for block in range(self.POOL)]
        assert owners == self.allocator.counts
        assert self.allocator.num_used == sum(map(bool, owners))
        assert self.allocator.num_free + self.allocator.num_cached + self.allocator.num_used == self.POOL

    @invariant()
    def only_known_blocks_are_cached(self) -> None:
        assert set(self.allocator.cached_blocks()) <= self.cache._nodes.keys()

    def teardown(self) -> None:
        for table in self.tables:
            self.allocator.release_table(table["blocks"])
        assert self.allocator.num_free + self.allocator.num_cached == self.POOL
        for _ in range(self.POOL):  # evicts everything
            self.allocator.allocate()
        assert len(self.cache) == 0
        assert not self.cache._roots


FEW = settings(
    max_examples=130,
    stateful_step_count=50,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
def test_d6_state_machine():
    Machine.checks = 0
    run_state_machine_as_test(Machine, settings=FEW)
    assert Machine.checks >= 5000


def test_d6_state_machine_catches_a_forgotten_eviction(monkeypatch):
    monkeypatch.setattr(PrefixCache, "_forget", lambda self, block: None)
    with pytest.raises((AssertionError, BlockError, KeyError)):
        run_state_machine_as_test(Machine, settings=FEW)


def test_d6_state_machine_catches_a_leak(monkeypatch):
    monkeypatch.setattr(BlockAllocator, "release_table", lambda self, blocks: [self.release(b) for b in blocks[1:]])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=FEW)
