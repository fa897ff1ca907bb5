"""From a plan to the tensors of one forward pass.

Everything that grows with tokens or sequences is written by vectorised numpy operations into buffers that live as long
as the engine, and what layers read are views of these: a tensor of one name starts at one address in every pass, so a
kernel may keep pointers and a pass may be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
    """An int64 tensor on the device, at one address for good, and the numpy array on the host it is filled from: the
    same memory if the device is the CPU."""

    def __init__(self, *shape: int, device: torch.device) -> None:
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._tensor = self._host if device.type == "cpu" else torch.zeros(shape, dtype=torch.int64, device=device)
        self.array = self._host.numpy()
        self._taken = self._tensor  # as often as not, a pass takes as many as the one before

    def take(self, count: int) -> torch.Tensor:
        """The first ``count`` along the last dimension, as they are in the array now."""
        if self._taken.shape[-1] != count:
            self._taken = self._tensor[..., :count]
        if self._tensor is not self._host:
            self._taken.copy_(self._host[..., :count], non_blocking=True)
        return self._taken


class _BlockTables:
    """The block table of every running sequence, by slot; and those of a pass's sequences, by row, as kernels read
    them. Passes mostly run the same sequences in the same order, so only rows that changed are copied from the first
    to the second."""

    def __init__(self, max_sequences: int, max_blocks: int, device: torch.device) -> None:
        self.by_slot = np.zeros((max_sequences, max_blocks), dtype=np.int64)
        self._by_row = torch.zeros((max_sequences, max_blocks), dtype=torch.int64, device=device)
        self._version = np.zeros(max_sequences, dtype=np.int64)  # by slot: counts its changes
        self._row_slots = np.full(max_sequences, -1, dtype=np.int64)  # by row: whose blocks it holds ...
        self._row_versions = np.zeros(max_sequences, dtype=np.int64)  # ... as of which version
        self._used = 0  # columns that ever held a block

    def update(self, plan: Plan) -> None:
        """What has changed since the last plan."""
        for sequence in plan.admitted:
            self.by_slot[sequence.slot, : len(sequence.blocks)] = sequence.blocks
            self._version[sequence.slot] += 1
            self._used = max(self._used, len(sequence.blocks))
        if plan.block_writes:
            slots, places, blocks = np.array(plan.block_writes, dtype=np.int64).T
            self.by_slot[slots, places] = blocks
            self._version[slots] += 1
            self._used = max(self._used, int(places.max()) + 1)

    def take(self, slots: NDArray[np.int64], width: int) -> torch.Tensor:
        """The first ``width`` blocks of these slots, ``[len(slots), width]``."""
        count = len(slots)
        versions = self._version[slots]
        stale = (self._row_slots[:count] != slots) | (self._row_versions[:count] != versions)
        if stale.any():
            rows = stale.nonzero()[0]
            self._row_slots[rows], self._row_versions[rows] = slots[rows], versions[rows]
            new = torch.from_numpy(self.by_slot[slots[rows], : self._used]).to(self._by_row.device)
            self._by_row[:, : self._used].index_copy_(0, torch.from_numpy(rows).to(new.device), new)
        return self._by_row[:count, :width]


@dataclass(eq=False, slots=True)
class _Composition:
    """Who runs in a pass, and how many tokens of each: what follows from that alone."""

    slots: list[int]
    """Of each sequence: until another one is admitted, they tell who it is."""
    counts: list[int]
    starts: list[int]
    slot_array: NDArray[np.int64]
    slot_of: NDArray[np.int64]
    """Of each token's sequence."""
    prompts: NDArray[np.int64]
    """``num_prompt`` of each sequence."""


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
        self._tables = _BlockTables(max_sequences, max_blocks, device)
        self._prompts = np.zeros((max_sequences, 2), dtype=np.int64)  # by slot: num_prompt, regime_length
        self._arange = np.arange(max(max_tokens, max_sequences), dtype=np.int64)
        self._ids = _Buffer(max_tokens, device=device)
        self._positions = _Buffer(max_tokens, device=device)
        self._sequence_of = _Buffer(max_tokens, device=device)
        self._slots = _Buffer(max_tokens, device=device)
        self._rows = _Buffer(max_tokens + max_sequences, device=device)
        self._lengths = _Buffer(max_sequences, device=device)
        self._spans = _Buffer(3, max_sequences, device=device)
        self._last = self._compose(Plan(), [])

    def build(self, plan: Plan, scores: Callable[[Sequence], bool]) -> RaggedBatch:
        """The tensors of ``plan``, whose sequences all have a slot and the blocks they need.

        Args:
            scores: ``(sequence) -> bool``: whether its prompt's log-probabilities are wanted.
        """
        self._tables.update(plan)
        sequences, n, tokens = plan.sequences, len(plan.sequences), plan.num_tokens
        slots = [sequence.slot for sequence in sequences]
        same = not plan.admitted and slots == self._last.slots and plan.counts == self._last.counts
        composition = self._last if same else self._compose(plan, slots)
        self._last = composition

        starts, counts, contexts = self._spans.array[:, :n]
        computed = np.array([sequence.num_computed for sequence in sequences], dtype=np.int64)
        np.add(computed, counts, out=contexts)
        positions = self._positions.array[:tokens]
        np.add(self._arange[:tokens], (computed - starts)[self._sequence_of.array[:tokens]], out=positions)
        self._fill_ids(sequences, starts, counts)

        place = positions // self.block_size
        blocks = self._tables.by_slot[composition.slot_of, place]
        np.add(blocks * self.block_size, positions - place * self.block_size, out=self._slots.array[:tokens])

        unread = np.flatnonzero(computed < composition.prompts - 1).tolist()
        sampling, scoring, rows = self._rows_wanted(plan, starts + counts - 1, unread, scores)
        layout = PagedLayout(
            block_size=self.block_size,
            starts=composition.starts,
            counts=plan.counts,
            contexts=contexts.tolist(),
            block_table=self._tables.take(composition.slot_array, -(-int(contexts.max()) // self.block_size)),
            slots=self._slots.take(tokens),
            spans=self._spans.take(n),
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

    def _compose(self, plan: Plan, slots: list[int]) -> _Composition:
        """Passes mostly run the same sequences as the one before, one token each: then none of this changes."""
        n, tokens = len(plan.sequences), plan.num_tokens
        for sequence in plan.admitted:
            self._prompts[sequence.slot] = sequence.num_prompt, sequence.regime_length
        slot_array = np.array(slots, dtype=np.int64)
        starts, counts, _ = self._spans.array[:, :n]
        counts[:] = plan.counts
        np.subtract(counts.cumsum(), counts, out=starts)
        of = self._sequence_of.array[:tokens]
        of[:] = np.repeat(self._arange[:n], counts)
        prompts, self._lengths.array[:n] = self._prompts[slot_array].T
        return _Composition(slots, plan.counts, starts.tolist(), slot_array, slot_array[of], prompts)

    def _fill_ids(self, sequences: list[Sequence], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        ids = self._ids.array
        ids[starts] = [sequence.tokens[sequence.num_computed] for sequence in sequences]
        for row in np.flatnonzero(counts > 1).tolist():
            sequence, start, count = sequences[row], int(starts[row]), int(counts[row])
            ids[start : start + count] = sequence.tokens[sequence.num_computed : sequence.num_computed + count]

    def _rows_wanted(
        self, plan: Plan, last: NDArray[np.int64], unread: list[int], scores: Callable[[Sequence], bool]
    ) -> tuple[list[Sequence], list[tuple[Sequence, int, int]], int]:
        """
        Args:
            last: the last token of each of the plan's sequences, as a row of the batch.
            unread: those of them, by number, that run prompt tokens which another one follows.
        """
        rows = len(plan.sampling)
        if rows == len(plan.sequences):
            sampling = plan.sequences
            self._rows.array[:rows] = last
        else:
            sampling = [plan.sequences[row] for row in plan.sampling]
            self._rows.array[:rows] = last[plan.sampling]
        scoring: list[tuple[Sequence, int, int]] = []
        for number in unread:
            sequence, count = plan.sequences[number], plan.counts[number]
            if scores(sequence):
                first, start = sequence.num_computed, last[number] - count + 1
                scored = min(count, sequence.num_prompt - 1 - first)  # the row at p scores the token at p + 1
                scoring.append((sequence, first, scored))
                self._rows.array[rows : rows + scored] = start + self._arange[:scored]
                rows += scored
        return sampling, scoring, rows
