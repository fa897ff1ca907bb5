"""Drive a scheduler by hand, with a scripted model whose next token depends on the prefix alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fastgen.core.policy import Scheduler, Sequence


def next_token(tokens: list[int]) -> int:
    return (sum((i + 1) * token for i, token in enumerate(tokens)) * 31 + len(tokens)) % 97


@dataclass
class Pass:
    """A plan as it was: what each sequence ran, from where."""

    counts: dict[int, int]
    starts: dict[int, int]
    num_tokens: int
    preempted: list[int]
    admitted: list[int]


@dataclass
class Loop:
    scheduler: Scheduler
    passes: list[Pass] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, tokens, max_tokens, **options) -> Sequence:
        seq = Sequence(list(tokens), max_tokens=max_tokens, **options)
        self.scheduler.add(seq)
        return seq

    def plan(self):
        plan = self.scheduler.plan()
        rows = list(zip(plan.sequences, plan.counts, strict=True))
        self.passes.append(
            Pass(
                counts={seq.id: count for seq, count in rows},
                starts={seq.id: seq.num_computed for seq, _ in rows},
                num_tokens=plan.num_tokens,
                preempted=[seq.id for seq in plan.preempted],
                admitted=[seq.id for seq in plan.admitted],
            )
        )
        return plan

    def commit(self, plan):
        outcomes = self.scheduler.commit(plan, [next_token(plan.sequences[row].tokens) for row in plan.sampling])
        for outcome in outcomes:
            if outcome.finish_reason is not None:
                assert outcome.sequence.id not in self.reasons, "a second terminal outcome"
                self.reasons[outcome.sequence.id] = outcome.finish_reason
        return outcomes

    def step(self) -> Pass:
        self.commit(self.plan())
        return self.passes[-1]

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        stats = self.scheduler.stats
        assert not self.scheduler.has_work
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
        assert stats.used_blocks == 0


def solo(prompt, max_tokens) -> list[int]:
    """What a sequence must come to, whoever shares its batch."""
    tokens = list(prompt)
    while len(tokens) < max_tokens:
        tokens.append(next_token(tokens))
    return tokens


@pytest.fixture
def make_loop():
    def make(**options) -> Loop:
        defaults = {"num_blocks": 64, "block_size": 4, "max_batch_tokens": 16, "max_sequences": 8}
        return Loop(Scheduler(**{**defaults, **options}))

    return make


@pytest.fixture(name="solo")
def solo_fixture():
    return solo
