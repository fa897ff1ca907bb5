"""The life of a sequence: added, planned into passes, committed, ended.

There is no prefill or decode phase. A sequence has tokens *known* and tokens *computed*; a pass lets the second catch
up with the first. Which tokens it carries is the policy's part (``composition.py``), who holds slots and blocks the
residents' (``residents.py``), who waits and in which order the queue's (``queue.py``).

Everything is plain Python on integers: no clock, no hash order, no randomness but the seeded queue order. The same
calls give the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly
from dataclasses import asdict

from fastgen.core.policy.composition import PolicyName, policy_named
from fastgen.core.policy.plan import Outcome, Plan, Stats, Totals
from fastgen.core.policy.pool import Pool
from fastgen.core.policy.queue import QueueOrder, WaitingQueue
from fastgen.core.policy.residents import Residents
from fastgen.core.policy.sequence import Sequence, State
from fastgen.errors import ConfigError, FastgenError
from fastgen.types import FinishReason

__all__ = ["NeverFits", "Scheduler"]


class NeverFits(FastgenError):
    """A sequence could need more blocks than the whole cache has, or more tokens in one pass than it may carry."""


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
        policy: PolicyName = "splitfuse",
        queue_order: QueueOrder = "fcfs",
        prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        """
        Args:
            num_blocks: blocks in the K/V cache.
            block_size: tokens in one block.
            max_batch_tokens: the budget, tokens in one pass.
            max_sequences: most sequences running at once; ``max_running`` is this or the budget, whichever is less.
            policy: which tokens a pass carries, see ``composition.py``.
            queue_order: who enters from the waiting queue, see ``queue.py``. ``"priority"`` also takes slots and blocks
                away from running sequences of lower priority, for at most one waiting sequence in each pass.
            prefix_caching: keep and reuse computed blocks.
            seed: of queue order ``"random"``.

        Raises:
            ConfigError: a number below 1, an unknown policy or order.
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

        self._policy = policy_named(policy)
        self._waiting = WaitingQueue(queue_order, cached_blocks=lambda seq: len(self.pool.hits(seq)), seed=seed)
        self._takes_over = queue_order == "priority"
        self._totals = Totals()
        self._residents = Residents(self.pool, self._waiting, self._totals, self.max_running)
        self._in_flight: Plan | None = None
        self._aborting: list[Sequence] = []  # at the next commit
        self._aborted: list[Sequence] = []  # ended already, outcome not reported yet

        self._num_added = 0

    # Looking at it

    @property
    def num_running(self) -> int:
        return len(self._residents)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether another ``plan`` and ``commit`` would do or report anything."""
        return bool(self._residents or self._waiting or self._aborted or self._in_flight)

    @property
    def max_sequence_tokens(self) -> int:
        """The largest ``max_tokens`` that fits: the last token needs no K/V."""
        tokens = self.num_blocks * self.block_size
        return 1 + (min(tokens, self.max_batch_tokens) if self._policy.whole_prompts else tokens)

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
            NeverFits: even alone it could run out of blocks before ``max_tokens``, or, where prompts run whole, be more
                than one pass may carry once it was preempted.
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
        if seq.max_tokens > self.max_sequence_tokens:
            raise NeverFits(
                f"{seq.max_tokens} tokens of prompt and answer can need a pass of {seq.max_tokens - 1}, but "
                f"max_batch_tokens is {self.max_batch_tokens} and this policy runs prompts whole; ask for at most "
                f"{self.max_sequence_tokens} tokens in all, or raise max_batch_tokens"
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
            self._residents.regroup()

    # One pass

    def plan(self) -> Plan:
        """The next pass. It is empty (no rows) only if nothing waits or runs.

        Raises:
            RuntimeError: the last plan was not committed.
        """
        if self._in_flight is not None:
            raise RuntimeError("the last plan was not committed; plan and commit must alternate")
        plan = Plan()
        residents = self._residents
        if self._takes_over:
            residents.make_room(plan)
        self._policy.compose(plan, residents, self.max_batch_tokens)
        residents.settle(plan)
        self._in_flight = plan
        return plan

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
        residents, size = self._residents, self.block_size
        residents.announced()
        sampled = iter(tokens)
        outcomes: list[Outcome] = []
        renewing: list[Sequence] = []
        regroup = bool(residents.reading or self._aborting)
        for seq, count in zip(plan.sequences, plan.counts, strict=True):
            known, length = seq.tokens, len(seq.tokens)
            seq.num_computed = computed = seq.num_computed + count
            reason: FinishReason | None = None
            failed = False
            if computed == length:
                token = next(sampled)
                failed = token is None
                if seq.aborted:
                    token, reason = None, "abort"
                elif token is None:
                    reason = "error"
                else:
                    known.append(token)
                    length += 1
                    if token in seq.stop_ids and length - seq.num_prompt > seq.min_tokens:
                        seq.stop, reason = token, "stop"
                    elif length >= seq.max_tokens:
                        reason = "length"
                    elif length == seq.renew_at:
                        renewing.append(seq)
                outcomes.append(Outcome(seq, token, reason))
            # What a failed row computed is not to be trusted (NaN), so the cache never sees it.
            if computed % size < count and not failed:
                residents.keep_full_blocks(seq, computed - count)
            if reason is not None:
                self._finish(seq, reason)
                regroup = True
        for seq in renewing:  # what they know has to be computed anew, for the length they have now
            seq.renew_at, seq.renewed, seq.namespace = None, len(seq.tokens), seq.renewed_namespace
            residents.set_back(seq)
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
        self._residents.not_announced()
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
            self._residents.regroup()
        return outcomes

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.state = State.FINISHED
        seq.finish_reason = reason
        seq.match = None
        if seq.slot >= 0:
            self._residents.let_go(seq)
