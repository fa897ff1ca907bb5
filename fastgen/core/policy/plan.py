"""What passes between scheduler and engine: the plan of a pass, its outcomes, and figures to look at."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastgen.core.policy.sequence import Sequence
from fastgen.types import FinishReason

__all__ = ["Outcome", "Plan", "Stats"]


@dataclass(slots=True, eq=False)
class Plan:
    """One forward pass. Row ``i`` runs ``counts[i]`` tokens of ``sequences[i]``, starting at its ``num_computed``; it
    samples a token iff that brings it to the end of its known tokens (``sampling`` lists those rows, ascending).
    """

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sampling: list[int] = field(default_factory=list)
    num_tokens: int = 0
    admitted: list[Sequence] = field(default_factory=list)
    """Got a slot in this plan: their whole block-table row must be written."""
    block_writes: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, index, block): entries of other rows that changed since the last plan."""
    preempted: list[Sequence] = field(default_factory=list)
    """Lost their blocks and slot in this plan and wait again; never also in ``sequences``."""

    def run_streams(self, streams: list[Sequence]) -> None:
        """The first rows: sequences one token behind, each its token."""
        n = len(streams)
        self.sequences, self.counts, self.sampling, self.num_tokens = streams.copy(), [1] * n, list(range(n)), n

    def run(self, seq: Sequence, count: int) -> None:
        """One more row: the next ``count`` tokens of ``seq``."""
        if count == seq.behind:
            self.sampling.append(len(self.sequences))
        self.sequences.append(seq)
        self.counts.append(count)
        self.num_tokens += count


@dataclass(slots=True)  # neither frozen nor a tuple, which take longer to make: there is one for each token
class Outcome:
    """What a pass meant for one sequence: a token, the end, or both."""

    sequence: Sequence
    token: int | None
    """Already appended to ``sequence.tokens``. None when it was aborted or failed."""
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    passes: int = 0
    tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Computed again after a preemption, prefix hits already taken off."""
    prefix_queried_tokens: int = 0
    """Prompt tokens of first admissions that were looked up in the prefix cache ..."""
    prefix_hit_tokens: int = 0
    """... and those of them that were found."""


@dataclass(slots=True, kw_only=True)
class Stats(Totals):
    """A snapshot: what is now, and the totals. ``free + cached + used == num_blocks``."""

    num_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    running: int
    waiting: int
