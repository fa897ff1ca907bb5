"""Who runs: which sequences hold a slot and blocks, how one enters, grows, loses them and leaves.

A sequence enters with blocks for all its known tokens, so a half-read prompt never waits for blocks; only streams
grow, by one block at a time. Where none is left, the running sequence of lowest priority, and of these the latest first
admitted, loses its blocks and is computed again later. This cannot go on for ever:

- The victim's equals do not overtake it, and it enters again only when all it knows fits with one block to spare for
  every running sequence that can still grow. Only somebody's end gives it that (or two sequences that turn out to
  share a block), so it cannot bounce in and out while the others grow.
- The spare it needs doubles each time; once that exceeds the pool, it enters only when nothing else runs, and then it
  outranks all its equals. So the cache runs out on one sequence at most ``log2(num_blocks) + 2`` times, and once more
  for each sequence of higher priority that entered while it ran.
- The highest-ranking running sequence is never the victim, so some sequence always advances.
"""

from __future__ import annotations

from fastgen.core.policy.plan import Plan, Totals
from fastgen.core.policy.pool import Pool
from fastgen.core.policy.queue import WaitingQueue
from fastgen.core.policy.sequence import Sequence, State

__all__ = ["Residents"]


class Residents:
    """The running sequences.

    Attributes:
        streams: those one token behind.
        reading: those more than one token behind, by rank. A sequence stays in its list until ``regroup``.
    """

    def __init__(self, pool: Pool, waiting: WaitingQueue, totals: Totals, max_running: int) -> None:
        self.pool = pool
        self.streams: list[Sequence] = []
        self.reading: list[Sequence] = []
        self._waiting = waiting
        self._totals = totals
        self._slots = list(range(max_running - 1, -1, -1))  # free ones, a stack
        self._changed: list[tuple[Sequence, int]] = []  # block-table entries the runtime has not heard of
        self._num_admitted = 0

    def __len__(self) -> int:
        return len(self.streams) + len(self.reading)

    def all(self) -> list[Sequence]:
        return self.streams + self.reading

    # In

    def head(self) -> Sequence | None:
        """Who would enter next, if there is a slot for anybody."""
        return self._waiting.head() if self._slots else None

    def may_enter(self, head: Sequence, plan: Plan) -> bool:
        """Whether the head of the queue can have its blocks. A victim of this plan has to wait for the next."""
        return head not in plan.preempted and self.pool.fits(head, self.all() + plan.admitted)

    def admit(self, seq: Sequence, plan: Plan) -> None:
        """Give the head of the queue its slot and blocks for all its known tokens. It is among the ``reading`` from
        ``settle`` on."""
        self._waiting.remove(seq)
        self.pool.take(seq)
        seq.slot = self._slots.pop()
        seq.state = State.RUNNING
        if seq.seniority < 0:
            seq.seniority = self._num_admitted
            self._num_admitted += 1
            seq.num_cached = seq.num_computed
            if self.pool.cache is not None and seq.read_cache:
                self._totals.prefix_queried_tokens += seq.num_prompt
                self._totals.prefix_hit_tokens += seq.num_computed
        self._totals.recomputed_tokens += max(0, seq.num_lost - seq.num_computed)
        seq.num_lost = 0
        plan.admitted.append(seq)

    def settle(self, plan: Plan) -> None:
        """The end of a plan: who was admitted counts as reading, and the plan says what changed in the block tables."""
        if plan.admitted:
            self.reading.extend(plan.admitted)
            self.reading.sort(key=rank)
        if self._changed:
            whole_row = set(plan.admitted)
            plan.block_writes = [
                (seq.slot, index, seq.blocks[index])
                for seq, index in self._changed
                if seq.state is State.RUNNING and seq not in whole_row
            ]

    # Growing

    def grow_streams(self, plan: Plan) -> bool:
        """A block for every stream that needs one; True if somebody had to be preempted for it."""
        size = self.pool.block_size
        growing = [seq for seq in self.streams if seq.num_computed == len(seq.blocks) * size]
        if not growing:
            return False
        allocator = self.pool.allocator
        short = len(growing) > allocator.available
        if short:
            growing.sort(key=rank)  # the last blocks go to those that would win them anyway
        for seq in growing:
            while seq.state is State.RUNNING and not allocator.available:
                victim = max(self.all(), key=rank)
                victim.headroom = max(1, 2 * victim.headroom)
                self._preempt(victim, plan)
            if seq.state is State.RUNNING:
                self._changed.append((seq, len(seq.blocks)))
                seq.blocks.append(allocator.allocate())
        return short

    def keep_full_blocks(self, seq: Sequence, computed_before: int) -> None:
        """Enter the blocks that have become full since into the prefix cache."""
        if self.pool.cache is not None:
            first = computed_before // self.pool.block_size
            self._changed += [(seq, index) for index in self.pool.keep_full_blocks(seq, first)]

    def announced(self) -> None:
        """The runtime has heard of every change of a block table."""
        self._changed.clear()

    def not_announced(self) -> None:
        """The runtime may not have got as far as its tables: changes of those that still run go out again."""
        self._changed = [(seq, index) for seq, index in self._changed if seq.state is State.RUNNING]

    # Out

    def make_room(self, plan: Plan) -> None:
        """Preempt lower-ranking sequences, as many as needed, for the head of the queue.

        Nobody is preempted if that could not be enough. Those who are cannot come back before the head has entered.
        """
        head = self._waiting.head()
        running = self.all()
        lower = [] if head is None else [seq for seq in running if seq.priority < head.priority]
        if head is None or not lower:
            return
        staying = [seq for seq in running if seq.priority >= head.priority]
        if not self.pool.fits(head, staying, released=sum(len(seq.blocks) for seq in lower)):
            return
        lower.sort(key=rank)
        while lower and not (self._slots and self.pool.fits(head, staying + lower)):
            self._preempt(lower.pop(), plan)

    def set_back(self, seq: Sequence) -> None:
        """It waits again, with nothing computed; its full computed blocks stay in the prefix cache."""
        seq.num_lost = seq.num_computed
        seq.num_computed = 0
        self.let_go(seq)
        seq.state = State.WAITING
        self.regroup()
        self._waiting.push(seq)

    def let_go(self, seq: Sequence) -> None:
        """Release blocks and slot."""
        self.pool.let_go(seq)
        self._slots.append(seq.slot)
        seq.slot = -1

    def regroup(self) -> None:
        """Drop from the lists who does not run, and move finished readers to the streams."""
        self.streams = [seq for seq in self.streams if seq.state is State.RUNNING]
        reading: list[Sequence] = []
        for seq in self.reading:
            if seq.state is State.RUNNING:
                (self.streams if len(seq.tokens) - seq.num_computed == 1 else reading).append(seq)
        self.reading = reading

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        seq.preemptions += 1
        self._totals.preemptions += 1
        self.set_back(seq)
        plan.preempted.append(seq)


def rank(seq: Sequence) -> tuple[int, int]:
    """Highest priority, then first admitted, sorts first."""
    return (-seq.priority, seq.seniority)
