"""From a plan to the tensors of one forward pass.

Everything that grows with tokens or sequences is written by vectorised numpy operations into buffers that live as long
as the engine; the block table keeps a row for every running sequence and only its changes are written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fastgen.core.policy import Plan, Sequence
from fastgen.kernels.paging import LayerCache, PagedLayout

__all__ = ["RaggedBatch", "RaggedBatchBuilder"]


@dataclass
class RaggedBatch:
    """One pass, as layers see it (``fastgen.core.layers.Batch``). Its tensors are overwritten by the next build."""

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    sequence_of: torch.Tensor
    lengths: torch.Tensor
    layout: PagedLayout
    caches: list[LayerCache]
    sampling: list[Sequence]
    """The sequences that get a token; the first rows of the logits are theirs, in this order."""
    scoring: list[tuple[Sequence, int, int]]
    """Prompts to score: ``(sequence, first position, rows)``; their rows follow, in this order."""
    memo: dict[Hashable, Any] = field(default_factory=dict)


class _Buffer:
    """A tensor and its numpy view, sharing memory on the host; sent over when the device is another."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        self.host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.array = self.host.numpy()

    def take(self, count: int) -> torch.Tensor:
        return self.host[:count].to(self.device, non_blocking=True)


class RaggedBatchBuilder:
    """Builds a batch from each plan.

    Args:
        max_tokens: most tokens in a pass.
        max_sequences: sequences that run at once (rows of the block table).
        max_blocks: blocks of the longest sequence.
        block_size: tokens in a block.
        device: where the model is.
        caches: of the attention layers, by index.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        caches: list[LayerCache],
    ) -> None:
        self.block_size, self.device, self.caches = block_size, device, caches
        self._table = np.zeros((max_sequences, max_blocks), dtype=np.int64)
        self._arange = np.arange(max(max_tokens, max_sequences), dtype=np.int64)
        self._ids = _Buffer(max_tokens, device)
        self._positions = _Buffer(max_tokens, device)
        self._sequence_of = _Buffer(max_tokens, device)
        self._slots = _Buffer(max_tokens, device)
        self._rows = _Buffer(max_tokens + max_sequences, device)
        self._lengths = _Buffer(max_sequences, device)

    def build(self, plan: Plan, scores: Callable[[Sequence], bool]) -> RaggedBatch:
        """The tensors of ``plan``, whose sequences all have a slot and the blocks they need.

        Args:
            scores: ``(sequence) -> bool``: whether its prompt's log-probabilities are wanted.
        """
        self._update_table(plan)
        sequences, n, tokens = plan.sequences, len(plan.sequences), plan.num_tokens
        counts = np.array(plan.counts, dtype=np.int64)
        computed = np.fromiter((s.num_computed for s in sequences), np.int64, n)
        slots = np.fromiter((s.slot for s in sequences), np.int64, n)
        contexts = computed + counts
        ends = np.cumsum(counts)
        starts = ends - counts

        of = self._sequence_of.array[:tokens]
        of[:] = np.repeat(self._arange[:n], counts)
        positions = self._positions.array[:tokens]
        np.add(self._arange[:tokens], (computed - starts)[of], out=positions)
        self._fill_ids(sequences, plan.counts)
        self._lengths.array[:n] = np.fromiter((s.regime_length for s in sequences), np.int64, n)

        table = self._table[slots, : -(-int(contexts.max()) // self.block_size)]
        place = positions // self.block_size
        np.add(table[of, place] * self.block_size, positions - place * self.block_size, out=self._slots.array[:tokens])

        sampling, scoring, rows = self._rows_wanted(plan, starts.tolist(), scores)
        layout = PagedLayout(
            block_size=self.block_size,
            starts=starts.tolist(),
            counts=plan.counts,
            contexts=contexts.tolist(),
            block_table=torch.from_numpy(table).to(self.device, non_blocking=True),
            slots=self._slots.take(tokens),
        )
        return RaggedBatch(
            ids=self._ids.take(tokens),
            positions=self._positions.take(tokens),
            rows=self._rows.take(rows),
            sequence_of=self._sequence_of.take(tokens),
            lengths=self._lengths.take(n),
            layout=layout,
            caches=self.caches,
            sampling=sampling,
            scoring=scoring,
        )

    def _update_table(self, plan: Plan) -> None:
        for sequence in plan.admitted:
            self._table[sequence.slot, : len(sequence.blocks)] = sequence.blocks
        if plan.block_writes:
            slots, places, blocks = np.array(plan.block_writes, dtype=np.int64).T
            self._table[slots, places] = blocks

    def _fill_ids(self, sequences: list[Sequence], counts: list[int]) -> None:
        ids: list[int] = []
        for sequence, count in zip(sequences, counts, strict=True):
            first = sequence.num_computed
            if count == 1:
                ids.append(sequence.tokens[first])
            else:
                ids += sequence.tokens[first : first + count]
        self._ids.array[: len(ids)] = ids

    def _rows_wanted(
        self, plan: Plan, starts: list[int], scores: Callable[[Sequence], bool]
    ) -> tuple[list[Sequence], list[tuple[Sequence, int, int]], int]:
        sampling = [plan.sequences[row] for row in plan.sampling]
        rows = [starts[row] + plan.counts[row] - 1 for row in plan.sampling]
        scoring: list[tuple[Sequence, int, int]] = []
        for sequence, start, count in zip(plan.sequences, starts, plan.counts, strict=True):
            first = sequence.num_computed
            if first < sequence.num_prompt - 1 and scores(sequence):
                scored = min(count, sequence.num_prompt - 1 - first)  # the row at p scores the token at p + 1
                scoring.append((sequence, first, scored))
                rows += range(start, start + scored)
        self._rows.array[: len(rows)] = rows
        return sampling, scoring, len(rows)
