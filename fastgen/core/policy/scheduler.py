"""Which tokens run in the next pass: Dynamic SplitFuse over known and computed tokens.

A pass carries ``max_batch_tokens`` tokens whenever there is that much to do: first every running sequence that is one
token behind (a stream), then pieces of prompts. Streams are therefore capped at the budget, and no stream ever waits
for somebody's long prompt.

Blocks. A sequence enters with blocks for all its known tokens, so a half-read prompt never waits for blocks; only
streams grow, by one block at a time. Where none is left, the running sequence of lowest priority, and of these the
latest first admitted, loses its blocks and is computed again later. This cannot go on for ever:

- The victim's equals do not overtake it, and it enters again only when all it knows fits with one block to spare for
  every running sequence that can still grow. Only somebody's end gives it that (or two sequences that turn out to
  share a block), so it cannot bounce in and out while the others grow.
- The spare it needs doubles each time; once that exceeds the pool, it enters only when nothing else runs, and then it
  outranks all its equals. So the cache runs out on one sequence at most ``log2(num_blocks) + 2`` times, and once more
  for each sequence of higher priority that entered while it ran.
- The highest-ranking running sequence is never the victim, so some sequence always advances.

Everything is plain Python on integers: no clock, no hash order, no randomness but the seeded policy. The same calls
give the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly
from dataclasses import asdict

from fastgen.core.policy.plan import Outcome, Plan, Stats, Totals
from fastgen.core.policy.pool import Pool
from fastgen.core.policy.queue import PolicyName, WaitingQueue
from fastgen.core.policy.sequence import Sequence, State
from fastgen.errors import ConfigError, FastgenError
from fastgen.types import FinishReason

__all__ = ["NeverFits", "Scheduler"]


class NeverFits(FastgenError):
    """A sequence could need more blocks than the whole cache has."""


class Scheduler:
    """``plan`` and ``commit`` alternate. Not thread-safe; one engine loop drives it.

    Every sequence that ``add`` accepted gets exactly one outcome with a ``finish_reason``, always from ``commit`` (or
    ``fail``), whatever ended it.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_batch_tokens: int,
        max_sequences: int,
        policy: PolicyName = "fcfs",
        prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        """
        Args:
            num_blocks: blocks in the K/V cache.
            block_size: tokens in one block.
            max_batch_tokens: the budget, tokens in one pass.
            max_sequences: most sequences running at once; ``max_running`` is this or the budget, whichever is less.
            policy: who enters from the waiting queue, see ``queue.py``. ``"priority"`` also takes slots and blocks
                away from running sequences of lower priority, for at most one waiting sequence in each pass.
            prefix_caching: keep and reuse computed blocks.
            seed: of policy ``"random"``.

        Raises:
            ConfigError: a number below 1, or an unknown policy.
        """
        numbers = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_batch_tokens": max_batch_tokens,
            "max_sequences": max_sequences,
        }
        for name, value in numbers.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_batch_tokens = max_batch_tokens
        self.max_running = min(max_sequences, max_batch_tokens)
        self.pool = Pool(num_blocks, block_size, prefix_caching=prefix_caching)

        self._waiting = WaitingQueue(policy, cached_blocks=lambda seq: len(self.pool.hits(seq)), seed=seed)
        self._takes_over = policy == "priority"
        self._streams: list[Sequence] = []  # running, one token behind
        self._reading: list[Sequence] = []  # running, more than one token behind; by rank
        self._slots = list(range(self.max_running - 1, -1, -1))  # free ones, a stack
        self._changed: list[tuple[Sequence, int]] = []  # block-table entries the runtime has not heard of
        self._in_flight: Plan | None = None
        self._aborting: list[Sequence] = []  # at the next commit
        self._aborted: list[Sequence] = []  # ended already, outcome not reported yet

        self._num_added = 0
        self._num_admitted = 0
        self._totals = Totals()

    # Looking at it

    @property
    def num_running(self) -> int:
        return len(self._streams) + len(self._reading)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether another ``plan`` and ``commit`` would do or report anything."""
        return bool(self._streams or self._reading or self._waiting or self._aborted or self._in_flight)

    @property
    def max_sequence_tokens(self) -> int:
        """The largest ``max_tokens`` that fits: the last token needs no K/V."""
        return self.num_blocks * self.block_size + 1

    @property
    def stats(self) -> Stats:
        allocator = self.pool.allocator
        return Stats(
            num_blocks=self.num_blocks,
            free_blocks=allocator.num_free,
            cached_blocks=allocator.num_cached,
            used_blocks=allocator.num_used,
            running=self.num_running,
            waiting=self.num_waiting,
            **asdict(self._totals),
        )

    # In and out

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            NeverFits: even alone it could run out of blocks before ``max_tokens``.
            ValueError: it was added before.
        """
        if seq.id >= 0:
            raise ValueError(f"{seq!r} was added before; make a new one")
        needed = self.pool.blocks_for(seq.max_tokens - 1)
        if needed > self.num_blocks:
            raise NeverFits(
                f"{seq.max_tokens} tokens of prompt and answer can need {needed} cache blocks of {self.block_size} "
                f"tokens, but the cache has {self.num_blocks}; ask for at most {self.max_sequence_tokens} tokens in "
                "all, or give the engine more num_blocks or cache_memory"
            )
        seq.id = self._num_added
        self._num_added += 1
        seq.max_blocks = needed
        self._waiting.push(seq)

    def abort(self, seq: Sequence) -> None:
        """End a sequence with ``"abort"``; nothing happens if it has ended already.

        While a pass is in flight a running sequence ends at its commit, when the pass no longer writes to its blocks;
        a token sampled for it there is dropped. Either way the next ``commit`` reports it (``has_work`` stays true
        until then).
        """
        if seq.id < 0:
            raise ValueError(f"{seq!r} was never added")
        if seq.state is State.FINISHED or seq.aborted:
            return
        seq.aborted = True
        if seq.state is State.WAITING:
            self._waiting.remove(seq)
            self._finish(seq, "abort")
            self._aborted.append(seq)
        elif self._in_flight is not None:
            self._aborting.append(seq)
        else:
            self._finish(seq, "abort")
            self._aborted.append(seq)
            self._regroup()

    # One pass: plan

    def plan(self) -> Plan:
        """The next pass. It is empty (no rows) only if nothing waits or runs.

        Raises:
            RuntimeError: the last plan was not committed.
        """
        if self._in_flight is not None:
            raise RuntimeError("the last plan was not committed; plan and commit must alternate")
        plan = Plan()
        if self._takes_over:
            self._make_room(plan)
        short = self._grow_streams(plan)
        num_streams = len(self._streams)
        plan.sequences = self._streams.copy()
        plan.counts = [1] * num_streams
        plan.sampling = list(range(num_streams))
        plan.num_tokens = num_streams
        if num_streams < self.max_batch_tokens and (self._reading or self._waiting):
            self._read_prompts(plan, may_admit=not short)
        whole_row = set(plan.admitted)
        plan.block_writes = [
            (seq.slot, index, seq.blocks[index])
            for seq, index in self._changed
            if seq.state is State.RUNNING and seq not in whole_row
        ]
        self._in_flight = plan
        return plan

    def _grow_streams(self, plan: Plan) -> bool:
        """A block for every stream that needs one; True if somebody had to be preempted for it."""
        size = self.block_size
        growing = [seq for seq in self._streams if seq.num_computed == len(seq.blocks) * size]
        if not growing:
            return False
        allocator = self.pool.allocator
        short = len(growing) > allocator.available
        if short:
            growing.sort(key=_rank)  # the last blocks go to those that would win them anyway
        for seq in growing:
            while seq.state is State.RUNNING and not allocator.available:
                victim = max(self._running(), key=_rank)
                victim.headroom = max(1, 2 * victim.headroom)
                self._preempt(victim, plan)
            if seq.state is State.RUNNING:
                self._changed.append((seq, len(seq.blocks)))
                seq.blocks.append(allocator.allocate())
        return short

    def _read_prompts(self, plan: Plan, *, may_admit: bool) -> None:
        """Fill the rest of the budget with pieces of prompts.

        A prompt that needs F passes of this size is cut into F even pieces (throughput is concave in the tokens of a
        pass, so even ones are best); what that leaves goes to the next prompts, then back to these.
        """
        budget = left = self.max_batch_tokens - plan.num_tokens
        rows: list[Sequence] = []
        pieces: list[int] = []
        reading = iter(self._reading)
        seq = next(reading, None)
        while left:
            head = self._waiting.head() if may_admit and self._slots else None
            if head is not None and (seq is None or head.priority > seq.priority):
                may_admit = head not in plan.preempted and self.pool.fits(head, self._running() + plan.admitted)
                if not may_admit:
                    continue
                self._admit(head, plan)
                row = head
            elif seq is not None:
                row, seq = seq, next(reading, None)
            else:
                break
            behind = len(row.tokens) - row.num_computed
            passes = -(-behind // budget)
            piece = min(left, -(-behind // passes))
            rows.append(row)
            pieces.append(piece)
            left -= piece
        for i, row in enumerate(rows):
            if not left:
                break
            more = min(left, len(row.tokens) - row.num_computed - pieces[i])
            pieces[i] += more
            left -= more
        for row, piece in zip(rows, pieces, strict=True):
            if row.num_computed + piece == len(row.tokens):
                plan.sampling.append(len(plan.sequences))
            plan.sequences.append(row)
            plan.counts.append(piece)
        plan.num_tokens += budget - left
        if plan.admitted:
            self._reading.extend(plan.admitted)
            self._reading.sort(key=_rank)

    # Admission and preemption

    def _admit(self, seq: Sequence, plan: Plan) -> None:
        """Give the head of the queue its slot and blocks for all its known tokens."""
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

    def _make_room(self, plan: Plan) -> None:
        """Policy priority: preempt lower-ranking running sequences, as many as needed, for the head of the queue.

        Nobody is preempted if that could not be enough. Those who are cannot come back before the head has entered.
        """
        head = self._waiting.head()
        running = self._running()
        lower = [] if head is None else [seq for seq in running if seq.priority < head.priority]
        if head is None or not lower:
            return
        staying = [seq for seq in running if seq.priority >= head.priority]
        if not self.pool.fits(head, staying, released=sum(len(seq.blocks) for seq in lower)):
            return
        lower.sort(key=_rank)
        while lower and not (self._slots and self.pool.fits(head, staying + lower)):
            self._preempt(lower.pop(), plan)

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        """Take a running sequence's blocks and slot; its full computed blocks stay in the prefix cache."""
        seq.preemptions += 1
        self._totals.preemptions += 1
        self._set_back(seq)
        plan.preempted.append(seq)

    def _renew(self, seq: Sequence) -> None:
        """Have all that a running sequence knows computed anew, for the length it has now."""
        seq.renew_at, seq.renewed, seq.namespace = None, len(seq.tokens), seq.renewed_namespace
        self._set_back(seq)

    def _set_back(self, seq: Sequence) -> None:
        seq.num_lost = seq.num_computed
        seq.num_computed = 0
        self._let_go(seq)
        seq.state = State.WAITING
        self._regroup()
        self._waiting.push(seq)

    # One pass: commit

    def commit(self, plan: Plan, tokens: ReadOnly[int | None]) -> list[Outcome]:
        """What the pass computed and sampled.

        Args:
            plan: the last plan.
            tokens: one token for each row in ``plan.sampling``; None if the row failed, which ends its sequence
                with ``"error"``.

        Returns:
            An outcome for each row in ``plan.sampling``, in that order, then one for each other sequence aborted
            since the last commit. Sequences that ended have released their blocks and slot.

        Raises:
            RuntimeError: not the plan in flight.
            ValueError: the wrong number of tokens.
        """
        self._check_in_flight(plan)
        if len(tokens) != len(plan.sampling):
            raise ValueError(f"{len(tokens)} tokens given for {len(plan.sampling)} sampling rows")
        self._in_flight = None
        self._changed.clear()
        size = self.block_size
        caching = self.pool.cache is not None
        sampled = iter(tokens)
        outcomes: list[Outcome] = []
        renewing: list[Sequence] = []
        regroup = len(plan.sequences) > len(self._streams) or bool(self._aborting)
        for seq, count in zip(plan.sequences, plan.counts, strict=True):
            known = seq.tokens
            before = seq.num_computed
            seq.num_computed = computed = before + count
            reason: FinishReason | None = None
            failed = False
            if computed == len(known):
                token = next(sampled)
                failed = token is None
                if seq.aborted:
                    token, reason = None, "abort"
                elif token is None:
                    reason = "error"
                else:
                    known.append(token)
                    if token in seq.stop_ids and len(known) - seq.num_prompt > seq.min_tokens:
                        seq.stop, reason = token, "stop"
                    elif len(known) >= seq.max_tokens:
                        reason = "length"
                    elif len(known) == seq.renew_at:
                        renewing.append(seq)
                outcomes.append(Outcome(seq, token, reason))
            # What a failed row computed is not to be trusted (NaN), so the cache never sees it.
            if caching and computed // size > before // size and not failed:
                self._changed += [(seq, index) for index in self.pool.keep_full_blocks(seq, before // size)]
            if reason is not None:
                self._finish(seq, reason)
                regroup = True
        for seq in renewing:
            self._renew(seq)
        self._totals.passes += bool(plan.sequences)
        self._totals.tokens += plan.num_tokens
        return outcomes + self._end_of_pass(regroup)

    def fail(self, plan: Plan) -> list[Outcome]:
        """The pass itself failed: its sequences end with ``"error"`` and nothing of it counts as computed.

        Returns:
            An outcome for each row of the plan, then those of sequences aborted since the last commit.

        Raises:
            RuntimeError: not the plan in flight.
        """
        self._check_in_flight(plan)
        self._in_flight = None
        outcomes = []
        for seq in plan.sequences:
            reason: FinishReason = "abort" if seq.aborted else "error"
            self._finish(seq, reason)
            outcomes.append(Outcome(seq, None, reason))
        # The runtime may not have got as far as its tables: changes of the others go out again.
        self._changed = [(seq, index) for seq, index in self._changed if seq.state is State.RUNNING]
        return outcomes + self._end_of_pass(regroup=True)

    def _check_in_flight(self, plan: Plan) -> None:
        if plan is not self._in_flight:
            raise RuntimeError("this is not the plan in flight; commit each plan once, before the next one")

    def _end_of_pass(self, regroup: bool) -> list[Outcome]:
        """End what was aborted during the pass, and report every abort not reported yet."""
        for seq in self._aborting:
            if seq.state is State.RUNNING:
                self._finish(seq, "abort")
                self._aborted.append(seq)
        self._aborting.clear()
        outcomes = [Outcome(seq, None, "abort") for seq in self._aborted]
        self._aborted.clear()
        if regroup:
            self._regroup()
        return outcomes

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.state = State.FINISHED
        seq.finish_reason = reason
        seq.match = None
        if seq.slot >= 0:
            self._let_go(seq)

    # Small things

    def _let_go(self, seq: Sequence) -> None:
        """Release blocks and slot."""
        self.pool.let_go(seq)
        self._slots.append(seq.slot)
        seq.slot = -1

    def _regroup(self) -> None:
        """Drop from the running lists who does not run, and move finished readers to the streams."""
        self._streams = [seq for seq in self._streams if seq.state is State.RUNNING]
        reading: list[Sequence] = []
        for seq in self._reading:
            if seq.state is State.RUNNING:
                (self._streams if len(seq.tokens) - seq.num_computed == 1 else reading).append(seq)
        self._reading = reading

    def _running(self) -> list[Sequence]:
        return self._streams + self._reading


def _rank(seq: Sequence) -> tuple[int, int]:
    """Highest priority, then first admitted, sorts first."""
    return (-seq.priority, seq.seniority)
