"""The radix tree: hits are the tokens themselves, ancestors outlive descendants, matches follow cheaply."""

from __future__ import annotations

import pytest

from fastgen.core.policy import BlockAllocator, PrefixCache, Sequence
from fastgen.core.policy.prefix_cache import Node


def store(cache: PrefixCache, tokens, namespace=None) -> list[int]:
    """Compute and keep the full blocks of ``tokens``, as a sequence would; then let go of them."""
    size, node, blocks = cache.block_size, None, []
    for i in range(0, len(tokens) - size + 1, size):
        node = cache.insert(namespace, node, tuple(tokens[i : i + size]), cache.allocator.allocate())
        blocks.append(node.block)
    cache.allocator.release_table(blocks)
    return blocks


def found(cache: PrefixCache, tokens, namespace=None) -> list[int]:
    return [node.block for node in cache.match(namespace, list(tokens)).refresh()]


@pytest.fixture
def cache():
    return PrefixCache(BlockAllocator(8), 4)


@pytest.mark.parametrize(("length", "hits"), [(4, 0), (5, 1), (7, 1), (8, 1), (9, 2)])
def test_d4_a_hit_leaves_a_token_to_compute(cache, length, hits):
    blocks = store(cache, range(12))
    assert found(cache, range(length)) == blocks[:hits]


def test_the_first_miss_ends_the_match(cache):
    store(cache, range(12))
    assert len(found(cache, [0, 1, 2, 3, 9, 9, 9, 9, 8, 9, 10, 11, 12])) == 1


def test_d5_tokens_that_collide_under_a_rolling_hash(cache):
    store(cache, [5, 40, 7, 9])
    assert found(cache, [5, 39, 38, 9, 0]) == []
    assert len(found(cache, [5, 40, 7, 9, 0])) == 1


class SameHash(int):
    def __hash__(self) -> int:
        return 1


def test_d5_a_constant_hash_changes_nothing(cache):
    a, b = [SameHash(i) for i in (1, 2, 3, 4)], [SameHash(i) for i in (4, 3, 2, 1)]
    first, second = store(cache, a), store(cache, b)
    end = [SameHash(0)]
    assert found(cache, a + end) == first
    assert found(cache, b + end) == second
    assert found(cache, [SameHash(i) for i in (1, 2, 4, 3)] + end) == []


def test_d5_after_eviction_of_the_first_block_nothing_after_it_is_a_hit(cache):
    blocks = store(cache, range(12))
    for _ in range(8):  # five free ones, then the three cached, deepest first
        cache.allocator.allocate()
    assert found(cache, range(13)) == []
    assert len(cache) == 0
    assert sorted(blocks) == [0, 1, 2]


def test_d5_eviction_takes_the_end_of_a_prefix_first(cache):
    blocks = store(cache, range(12))
    for _ in range(6):
        cache.allocator.allocate()
    assert found(cache, range(13)) == blocks[:2]


def test_d5_namespaces_share_nothing(cache):
    store(cache, range(8), namespace=("model", "float32", "adapter a"))
    assert found(cache, range(9), namespace=("model", "float32", None)) == []
    assert len(found(cache, range(9), namespace=("model", "float32", "adapter a"))) == 2


def test_forgotten_namespaces_leave_nothing_behind(cache):
    for salt in range(100):
        store(cache, range(8), namespace=salt)
    assert len(cache._roots) <= 4  # 8 blocks, 2 each


def test_a_block_computed_twice_is_shared(cache):
    allocator = cache.allocator
    first, second = allocator.allocate(), allocator.allocate()
    a = cache.insert(None, None, (1, 2, 3, 4), first)
    b = cache.insert(None, None, (1, 2, 3, 4), second)
    assert a is b
    assert (allocator.counts[first], allocator.counts[second]) == (2, 0)
    assert allocator.num_free == 7


def test_d4_a_match_follows_eviction_and_insertion(cache):
    match = cache.match(None, list(range(13)))
    assert match.refresh() == []
    store(cache, range(8))
    assert len(match.refresh()) == 2
    for _ in range(7):
        cache.allocator.allocate()
    assert len(match.refresh()) == 1


def test_num_held_counts_the_held_beginning(cache):
    blocks = store(cache, range(12))
    match = cache.match(None, list(range(13)))
    match.refresh()
    assert match.num_held() == 0
    for block in blocks[:2]:
        cache.allocator.acquire(block)
    assert match.num_held() == 2


class CountingList(list):
    reads = 0

    def __getitem__(self, index):
        type(self).reads += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)


def test_asking_again_does_not_read_the_prompt_again():
    cache = PrefixCache(BlockAllocator(300), 4)
    store(cache, range(800))
    match = cache.match(None, CountingList(range(1000)))
    CountingList.reads = 0
    match.refresh()
    assert CountingList.reads >= 800
    CountingList.reads = 0
    for _ in range(10):
        match.refresh()
    assert CountingList.reads == 10 * cache.block_size


def test_evicting_a_parent_first_is_noticed(cache):
    allocator = cache.allocator
    blocks = [allocator.allocate(), allocator.allocate()]
    node = cache.insert(None, None, (0, 1, 2, 3), blocks[0])
    assert isinstance(cache.insert(None, node, (4, 5, 6, 7), blocks[1]), Node)
    for block in blocks:  # the wrong order
        allocator.release(block)
    for _ in range(6):
        allocator.allocate()
    with pytest.raises(RuntimeError, match="evicted before"):
        allocator.allocate()


def test_a_sequence_needs_a_prompt_and_room_for_an_answer():
    with pytest.raises(ValueError, match="at least one"):
        Sequence([], max_tokens=4)
    with pytest.raises(ValueError, match="max_tokens is 3"):
        Sequence([1, 2, 3], max_tokens=3)
