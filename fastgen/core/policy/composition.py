"""Which tokens a pass carries, and who enters for it: the policies that can be compared on one engine.

Whatever the policy, sequences enter, share prefixes, grow and are preempted in the same way (`Residents`), and give the
same tokens. A policy says in which order that is tried and how many tokens of a prompt run.

``splitfuse``
    Dynamic SplitFuse, DeepSpeed-FastGen (Holmes et al. 2024, arXiv:2401.08671, section 3.3). A pass carries
    ``max_batch_tokens`` tokens whenever there is that much to do: first every running generation, then pieces of
    prompts. No generation ever waits for somebody's long prompt.
``prefill-first``
    The first scheduler of vLLM (Kwon et al. 2023, SOSP'23, section 4.5, and its releases up to the default of chunked
    prefill). Prompts run whole. While one waits and fits, a pass carries prompts only, and all generations stall.
``whole-prompt``
    Iteration-level scheduling, Orca (Yu et al. 2022, OSDI'22, section 3.1). Prompts run whole, in the same pass as the
    running generations, which therefore takes as long as its prompts are long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from fastgen.core.policy.plan import Plan
from fastgen.core.policy.residents import Residents
from fastgen.core.policy.sequence import Sequence
from fastgen.errors import ConfigError, did_you_mean

__all__ = ["POLICIES", "Policy", "PolicyName", "policy_named"]

PolicyName = Literal["splitfuse", "prefill-first", "whole-prompt"]


class Policy(Protocol):
    """How a pass is composed. It keeps nothing between passes."""

    whole_prompts: bool
    """Whether a sequence must run all that it is behind in one pass, and so fit the budget."""

    def budget(self, max_batch_tokens: int, longest: int, max_sequences: int) -> int:
        """Tokens that a pass must have room for.

        Args:
            max_batch_tokens: as asked for.
            longest: most tokens that one sequence can have to compute at once.
            max_sequences: most sequences running at once.
        """

    def compose(self, plan: Plan, residents: Residents, budget: int) -> None:
        """Fill an empty plan with rows, for at most ``budget`` tokens."""


class SplitFuse:
    """Running generations first, then pieces of prompts that fill the budget exactly."""

    whole_prompts = False

    def budget(self, max_batch_tokens: int, longest: int, max_sequences: int) -> int:
        return max_batch_tokens

    def compose(self, plan: Plan, residents: Residents, budget: int) -> None:
        short = residents.grow_streams(plan)
        plan.run_streams(residents.streams)
        left = budget - plan.num_tokens
        if left:
            self._read(plan, residents, left, may_admit=not short)

    def _read(self, plan: Plan, residents: Residents, budget: int, *, may_admit: bool) -> None:
        """Pieces of prompts, by rank; newcomers enter once those in the pass leave budget, or before those of lower
        priority.

        A prompt that needs F passes of this size is cut into F even pieces (throughput is concave in the tokens of a
        pass, so even ones are best); what that leaves goes to the next prompts, then back to these.
        """
        left = budget
        rows: list[Sequence] = []
        pieces: list[int] = []
        reading = iter(residents.reading)
        seq = next(reading, None)
        while left:
            head = residents.head() if may_admit else None
            if head is not None and (seq is None or head.priority > seq.priority):
                may_admit = residents.may_enter(head, plan)
                if not may_admit:
                    continue
                residents.admit(head, plan)
                row = head
            elif seq is not None:
                row, seq = seq, next(reading, None)
            else:
                break
            passes = -(-row.behind // budget)
            piece = min(left, -(-row.behind // passes))
            rows.append(row)
            pieces.append(piece)
            left -= piece
        for i, row in enumerate(rows):
            if not left:
                break
            more = min(left, row.behind - pieces[i])
            pieces[i] += more
            left -= more
        for row, piece in zip(rows, pieces, strict=True):
            plan.run(row, piece)


class PrefillFirst:
    """Whole prompts alone while any fits; else the running generations."""

    whole_prompts = True

    def budget(self, max_batch_tokens: int, longest: int, max_sequences: int) -> int:
        return max(max_batch_tokens, longest)

    def compose(self, plan: Plan, residents: Residents, budget: int) -> None:
        _admit_whole(plan, residents, budget)
        if not plan.admitted:
            residents.grow_streams(plan)
            plan.run_streams(residents.streams)


class WholePrompt:
    """The running generations, and whole prompts that join them."""

    whole_prompts = True

    def budget(self, max_batch_tokens: int, longest: int, max_sequences: int) -> int:
        return max(max_batch_tokens, longest + max_sequences - 1)  # so that the longest may join all others

    def compose(self, plan: Plan, residents: Residents, budget: int) -> None:
        short = residents.grow_streams(plan)
        plan.run_streams(residents.streams)
        if not short:
            _admit_whole(plan, residents, budget)


def _admit_whole(plan: Plan, residents: Residents, budget: int) -> None:
    """Heads of the queue, with all they are behind, as long as they fit."""
    while (head := residents.head()) is not None:
        behind = len(head.tokens) - residents.pool.block_size * len(residents.pool.hits(head))
        if behind > budget - plan.num_tokens or not residents.may_enter(head, plan):
            return
        residents.admit(head, plan)
        plan.run(head, head.behind)


_POLICIES: dict[PolicyName, Callable[[], Policy]] = {
    "splitfuse": SplitFuse,
    "prefill-first": PrefillFirst,
    "whole-prompt": WholePrompt,
}
POLICIES: tuple[PolicyName, ...] = tuple(_POLICIES)


def policy_named(name: PolicyName) -> Policy:
    """
    Raises:
        ConfigError: there is none of this name.
    """
    if name not in _POLICIES:
        raise ConfigError(f"policy: {name!r} is none of {', '.join(POLICIES)}.{did_you_mean(name, POLICIES)}")
    return _POLICIES[name]()
