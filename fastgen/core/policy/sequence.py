"""What the scheduler knows of one sequence: its tokens, how many are computed, and what it holds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import Enum

from fastgen.core.policy.prefix_cache import Node, PrefixMatch
from fastgen.types import FinishReason

__all__ = ["Sequence", "State"]


class State(Enum):
    """Where a sequence is. A preempted one is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One choice of one request.

    There is no prefill or decode phase: ``tokens`` are known, the K/V of the first ``num_computed`` of them are in the
    cache, and scheduling lets the second number catch up with the first. ``num_prompt`` is an independent split.

    Attributes set by the caller:
        tokens: known token ids, the prompt and then the output; the scheduler appends to this list.
        max_tokens: prompt and output together; reaching it ends the sequence with ``"length"``.
        stop_ids: token ids that end it with ``"stop"``, but never within its first ``min_tokens`` outputs.
        priority: higher enters first and is preempted last, under any policy.
        namespace: prefixes are shared only inside one namespace: everything besides tokens that changes K/V values
            (model, dtype, adapter, rope regime, a tenant's salt).
        renew_at: once it knows this many tokens, the K/V of all of them have to be computed anew (a rope that changes
            with the length, say); from then on ``renewed_namespace`` holds. None: never.
        read_cache: False never takes a prefix from the cache (prompt logprobs need every row); it still writes.
        payload: the engine's own state; never looked at here.

    Attributes kept by the scheduler:
        id: unique, increasing in order of arrival; -1 before ``Scheduler.add``.
        blocks: block table; the K/V of token ``i`` is in ``blocks[i // block_size]`` at ``i % block_size``.
        slot: row in the runtime's persistent tables while running, else -1.
        renewed: tokens it knew when its K/V were last computed anew; 0: never.
        num_cached: prompt tokens found in the prefix cache when it was first admitted.
        preemptions: how often it lost its blocks.
        finish_reason, stop: why it ended, and the stop id that ended it.
    """

    __slots__ = (
        "aborted",
        "blocks",
        "finish_reason",
        "headroom",
        "id",
        "match",
        "max_blocks",
        "max_tokens",
        "min_tokens",
        "namespace",
        "node",
        "num_cached",
        "num_computed",
        "num_lost",
        "num_prompt",
        "payload",
        "preemptions",
        "priority",
        "read_cache",
        "renew_at",
        "renewed",
        "renewed_namespace",
        "seniority",
        "slot",
        "state",
        "stop",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        tokens: list[int],
        *,
        max_tokens: int,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        priority: int = 0,
        namespace: Hashable = None,
        renew_at: int | None = None,
        renewed_namespace: Hashable = None,
        read_cache: bool = True,
        payload: object = None,
    ) -> None:
        """
        Args:
            tokens: the prompt; copied.

        Raises:
            ValueError: an empty prompt, or no room for one output token.
        """
        if not tokens:
            raise ValueError("a sequence needs at least one prompt token")
        if max_tokens <= len(tokens):
            raise ValueError(f"max_tokens is {max_tokens}, but the prompt alone has {len(tokens)} tokens")
        self.tokens = list(tokens)
        self.num_prompt = len(tokens)
        self.max_tokens = max_tokens
        self.stop_ids = frozenset(stop_ids)
        self.min_tokens = min_tokens
        self.priority = priority
        self.namespace = namespace
        self.renew_at = renew_at
        self.renewed_namespace = renewed_namespace
        self.read_cache = read_cache
        self.payload = payload

        self.id = -1
        self.state = State.WAITING
        self.num_computed = 0
        self.num_cached = 0
        self.renewed = 0
        self.blocks: list[int] = []
        self.slot = -1
        self.preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop: int | None = None

        # The scheduler's private notes.
        self.aborted = False  # while a pass is in flight: ends at its commit
        self.max_blocks = 0  # blocks it can ever hold
        self.seniority = -1  # order of first admission; kept when preempted
        self.headroom = 0  # blocks to leave free when it enters again; doubles each time the cache ran out on it
        self.num_lost = 0  # tokens computed before the last preemption
        self.node: Node | None = None  # of its last full computed block
        self.match: PrefixMatch | None = None  # while waiting

    @property
    def behind(self) -> int:
        """Known tokens not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def regime_length(self) -> int:
        """The length in tokens its K/V are computed for, where they depend on one."""
        return self.renewed or self.num_prompt

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.state.value}, {self.num_computed} of {len(self.tokens)} tokens computed, "
            f"{len(self.blocks)} blocks>"
        )
