"""What the runtime keeps for one running choice of a request, carried as the sequence's payload."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.core.policy import Sequence
from fastgen.core.request import Sampling
from fastgen.core.runtime.sampler import SequenceSampler
from fastgen.types import TokenLogprob

__all__ = ["Choice", "choice_of"]


@dataclass(slots=True)
class Choice:
    """One of a request's ``n`` answers."""

    request_id: str
    index: int
    sampling: Sampling
    sampler: SequenceSampler
    prompt_scores: list[TokenLogprob | None] | None = None
    """By position, filled as the prompt is read; ``None`` when they were not asked for, or are delivered."""
    delivered: bool = False
    """Whether its first token has gone out."""


def choice_of(sequence: Sequence) -> Choice:
    """The payload, typed."""
    return sequence.payload  # type: ignore[return-value]  # even a `cast` would count among the costs of a decode step
