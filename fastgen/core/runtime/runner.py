"""Runs a plan: batch, forward pass, and a token for each sequence that is due one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from fastgen.core.lora import Loras
from fastgen.core.policy import Plan, Sequence
from fastgen.core.runtime.choice import choice_of
from fastgen.core.runtime.ragged import RaggedBatch, RaggedBatchBuilder
from fastgen.core.runtime.sampler import Sampler, prompt_logprobs
from fastgen.types import TokenLogprob

__all__ = ["PassResult", "Runner"]


@dataclass
class PassResult:
    """What came out of a pass."""

    tokens: list[int | None] = field(default_factory=list)
    """For each row that samples, in the plan's order; ``None`` where it failed."""
    errors: dict[Sequence, str] = field(default_factory=dict)
    logprobs: dict[Sequence, TokenLogprob] = field(default_factory=dict)


class Runner:
    """The model, its cache and the sampler as one step.

    Args:
        model: logits of a batch's rows, valid until it is called again: a `Decoder`, or `RecordedPasses` of one.
    """

    def __init__(
        self,
        model: Callable[[RaggedBatch], torch.Tensor],
        builder: RaggedBatchBuilder,
        sampler: Sampler,
        loras: Loras | None = None,
    ) -> None:
        self.model, self.builder, self.sampler, self.loras = model, builder, sampler, loras

    @torch.inference_mode()
    def run(self, plan: Plan) -> PassResult:
        """One forward pass."""
        batch = self.builder.build(plan, _wants_scores)
        with self._adapters(plan, batch):
            logits = self.model(batch)
        self._score(batch, logits)
        if not batch.sampling:
            return PassResult()
        samplers = [choice_of(sequence).sampler for sequence in batch.sampling]
        picks = self.sampler.pick(logits[: len(samplers)], samplers)
        return PassResult(
            picks.tokens,
            {batch.sampling[row]: error for row, error in picks.errors.items()},
            {batch.sampling[row]: logprob for row, logprob in picks.logprobs.items()},
        )

    def _adapters(self, plan: Plan, batch: RaggedBatch) -> AbstractContextManager[None]:
        """Inside, each row gets the LoRA adapter of its request."""
        if self.loras is None:
            return nullcontext()
        stream = [(_lora(sequence), count) for sequence, count in zip(plan.sequences, plan.counts, strict=True)]
        logits = [(_lora(sequence), 1) for sequence in batch.sampling]
        logits += [(_lora(sequence), count) for sequence, _, count in batch.scoring]
        return self.loras.rows(stream, logits)

    def _score(self, batch: RaggedBatch, logits: torch.Tensor) -> None:
        """Log-probabilities of prompt tokens; the row at position p scores the token at p + 1."""
        row = len(batch.sampling)
        for sequence, first, count in batch.scoring:
            choice = choice_of(sequence)
            following = sequence.tokens[first + 1 : first + 1 + count]
            scores = prompt_logprobs(logits[row : row + count], following, choice.sampling.prompt_logprobs)
            assert choice.prompt_scores is not None
            choice.prompt_scores[first + 1 : first + 1 + count] = scores
            row += count


def _lora(sequence: Sequence) -> str | None:
    return choice_of(sequence).sampling.lora or None


def _wants_scores(sequence: Sequence) -> bool:
    return choice_of(sequence).prompt_scores is not None
