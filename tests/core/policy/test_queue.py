"""Who enters next, in each order."""

from __future__ import annotations

import pytest

from fastgen.core.policy import queue
from fastgen.errors import ConfigError


def entry_order(loop) -> list[int]:
    loop.drain()
    return [i for each in loop.passes for i in each.admitted]


@pytest.mark.parametrize("order", ["fcfs", "priority", "lpm"])
def test_equals_enter_in_order_of_arrival(make_loop, order):
    loop = make_loop(queue_order=order, max_sequences=2)
    for i in range(6):
        loop.add([i] * 5, 9)
    assert entry_order(loop) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("order", ["fcfs", "lpm", "random", "priority"])
def test_higher_priority_enters_first_in_any_order(make_loop, order):
    loop = make_loop(queue_order=order, max_sequences=1)
    for priority in (0, -3, 7, 2):
        loop.add([1] * 5, 9, priority=priority)
    assert entry_order(loop) == [2, 3, 0, 1]


def test_lpm_takes_the_longest_cached_prefix_first(make_loop):
    loop = make_loop(queue_order="lpm", max_sequences=1)
    loop.add(range(16), 18)
    loop.drain()
    loop.add([9] * 12, 14)
    loop.add([*range(4), 9, 9], 14)
    loop.add([*range(12), 9], 14)
    assert entry_order(loop)[1:] == [3, 2, 1]


def test_lpm_lets_nobody_starve(make_loop):
    loop = make_loop(queue_order="lpm", max_sequences=1)
    loop.add(range(9), 10)
    loop.drain()
    loop.add([50] * 9, 10)  # nothing of it is cached
    for _ in range(200):
        loop.add(range(9), 10)
    overtakers = entry_order(loop).index(1) - 1
    assert overtakers == queue.LPM_OVERTAKES


def test_random_is_a_shuffle_that_its_seed_repeats(make_loop):
    def order(seed: int) -> list[int]:
        loop = make_loop(queue_order="random", max_sequences=1, seed=seed)
        for _ in range(20):
            loop.add([1] * 3, 5)
        return entry_order(loop)

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(20)) != order(1)


@pytest.mark.parametrize("order", ["fcfs", "lpm", "random", "priority"])
def test_a_large_one_is_not_overtaken_by_small_equals(make_loop, order):
    loop = make_loop(queue_order=order, num_blocks=8, max_sequences=8)
    loop.add([1] * 20, 24)
    loop.step()
    large = loop.add([2] * 16, 20)
    loop.step()
    for _ in range(5):
        loop.add([3], 6)
    assert entry_order(loop)[:2] == [0, large.id]


def test_priority_takes_a_slot_from_the_lowest(make_loop):
    loop = make_loop(queue_order="priority", max_sequences=2)
    loop.add([1] * 4, 30)
    loop.add([2] * 4, 30, priority=-1)
    loop.step()
    urgent = loop.add([3] * 4, 8, priority=1)
    second = loop.step()
    assert second.preempted == [1]
    assert second.admitted == [urgent.id]
    loop.drain()
    assert loop.scheduler.stats.preemptions == 1


def test_priority_takes_blocks_but_only_where_that_helps(make_loop):
    loop = make_loop(queue_order="priority", num_blocks=8, prefix_caching=False)
    loop.add([1] * 12, 16, priority=5)  # 3 blocks, out of reach
    loop.add([2] * 8, 30)  # 2 blocks
    loop.step()
    huge = loop.add([3] * 24, 25, priority=1)  # 6 blocks: not even with the victim's
    assert loop.step().preempted == []
    loop.scheduler.abort(huge)
    loop.add([4] * 16, 17, priority=1)  # 4 blocks
    assert loop.step().preempted == [1]
    loop.drain()
    assert loop.scheduler.stats.preemptions == 1


@pytest.mark.parametrize("order", ["fcfs", "lpm", "random"])
def test_other_orders_never_preempt_to_admit(make_loop, order):
    loop = make_loop(queue_order=order, max_sequences=1)
    loop.add([1] * 4, 30, priority=-1)
    loop.step()
    loop.add([3] * 4, 8, priority=1)
    loop.drain()
    assert loop.scheduler.stats.preemptions == 0


def test_an_unknown_order_is_refused(make_loop):
    with pytest.raises(ConfigError, match=r"queue_order: 'fcsf' is none of .*Did you mean 'fcfs'"):
        make_loop(queue_order="fcsf")
