"""Who enters next: the waiting queue and its orders.

Higher ``priority`` goes first in any order; among equals those that were preempted, in order of first admission;
then the order decides. Its choice stands until it was admitted (or aborted): a sequence that must wait for blocks is
never overtaken by its equals, so nobody starves behind smaller ones.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Literal, Protocol

from fastgen.core.policy.sequence import Sequence
from fastgen.errors import ConfigError, did_you_mean

__all__ = ["QUEUE_ORDERS", "QueueOrder", "WaitingQueue"]

QueueOrder = Literal["fcfs", "lpm", "random", "priority"]
QUEUE_ORDERS: tuple[QueueOrder, ...] = ("fcfs", "lpm", "random", "priority")

LPM_WINDOW = 64
"""Order lpm compares this many of the oldest; it bounds the work of one admission."""
LPM_OVERTAKES = 64
"""Order lpm lets the oldest be overtaken this often, then it goes first."""


class _Order(Protocol):
    def choose(self, fresh: OrderedDict[int, Sequence], overtaken: int) -> Sequence: ...


class _FirstCome:
    """Orders fcfs and priority."""

    def choose(self, fresh: OrderedDict[int, Sequence], overtaken: int) -> Sequence:
        return next(iter(fresh.values()))


class _LongestPrefix:
    """Order lpm: the longest cached prefix, the older of equals. What ran lately is reused before it is evicted."""

    def __init__(self, cached_blocks: Callable[[Sequence], int]) -> None:
        self._cached_blocks = cached_blocks

    def choose(self, fresh: OrderedDict[int, Sequence], overtaken: int) -> Sequence:
        if overtaken >= LPM_OVERTAKES:
            return next(iter(fresh.values()))
        return max(islice(fresh.values(), LPM_WINDOW), key=self._cached_blocks)  # max keeps the first of equals


class _Random:
    """Order random, repeatable by its seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, fresh: OrderedDict[int, Sequence], overtaken: int) -> Sequence:
        return next(islice(fresh.values(), self._random.randrange(len(fresh)), None))


class _Bucket:
    """The waiting sequences of one priority."""

    __slots__ = ("chosen", "fresh", "overtaken", "returned")

    def __init__(self) -> None:
        self.fresh: OrderedDict[int, Sequence] = OrderedDict()  # by id, which is by arrival
        self.returned: list[Sequence] = []  # preempted, by seniority
        self.chosen: Sequence | None = None  # the order's standing choice
        self.overtaken = 0  # how often the oldest fresh one was


class WaitingQueue:
    """See the module's text. ``cached_blocks``: how many blocks of a sequence the prefix cache holds (order lpm)."""

    def __init__(self, order: QueueOrder, *, cached_blocks: Callable[[Sequence], int], seed: int) -> None:
        if order not in QUEUE_ORDERS:
            known = ", ".join(QUEUE_ORDERS)
            raise ConfigError(f"queue_order: {order!r} is none of {known}.{did_you_mean(order, QUEUE_ORDERS)}")
        self._order: _Order = _FirstCome()
        if order == "lpm":
            self._order = _LongestPrefix(cached_blocks)
        elif order == "random":
            self._order = _Random(seed)
        self._buckets: dict[int, _Bucket] = {}
        self._priorities: list[int] = []  # of the buckets, ascending
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, seq: Sequence) -> None:
        """Queue a new or a preempted sequence."""
        bucket = self._buckets.get(seq.priority)
        if bucket is None:
            bucket = self._buckets[seq.priority] = _Bucket()
            insort(self._priorities, seq.priority)
        if seq.seniority >= 0:
            insort(bucket.returned, seq, key=_seniority)
        else:
            bucket.fresh[seq.id] = seq
        self._length += 1

    def head(self) -> Sequence | None:
        """Who enters next; the same one until the queue changes in its favour or it is removed."""
        if not self._priorities:
            return None
        bucket = self._buckets[self._priorities[-1]]
        if bucket.returned:
            return bucket.returned[0]
        if bucket.chosen is None:
            bucket.chosen = self._order.choose(bucket.fresh, bucket.overtaken)
        return bucket.chosen

    def remove(self, seq: Sequence) -> None:
        """Take out a waiting sequence, admitted or aborted."""
        bucket = self._buckets[seq.priority]
        if seq.seniority >= 0:
            del bucket.returned[bisect_left(bucket.returned, seq.seniority, key=_seniority)]
        else:
            oldest = next(iter(bucket.fresh)) == seq.id
            del bucket.fresh[seq.id]
            if oldest:
                bucket.overtaken = 0
            elif bucket.chosen is seq:
                bucket.overtaken += 1
            if bucket.chosen is seq:
                bucket.chosen = None
        self._length -= 1
        if not bucket.fresh and not bucket.returned:
            del self._buckets[seq.priority]
            del self._priorities[bisect_left(self._priorities, seq.priority)]


def _seniority(seq: Sequence) -> int:
    return seq.seniority
