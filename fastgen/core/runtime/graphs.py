"""Small passes without Python: recorded when their shape comes up again, and replayed from then on.

A decoding pass of a small model spends a third of its time between operations. As CUDA graphs do on a GPU (and vLLM and
SGLang with them), a pass is recorded once for its numbers of tokens, sequences and rows of logits; the tensors of a
batch stay where they are (``ragged.py``), so replaying the record computes the next pass of that shape.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any, NoReturn

import torch

from fastgen.core.containers import Decoder
from fastgen.core.runtime.ragged import RaggedBatch
from fastgen.kernels.cpu.tape import Arena, NotRepeatable, Tape, cannot_record, recording
from fastgen.kernels.ops import KernelTable

__all__ = ["MOST_TOKENS", "RecordedPasses", "why_unrecorded"]

logger = logging.getLogger("fastgen")

MOST_TOKENS = 64
"""Larger passes spend little of their time in Python."""
_MOST_TAPES = 64
_ARENA_BYTES = 2**27

Shape = tuple[int, int, int]


def why_unrecorded(kernels: KernelTable) -> str | None:
    """What is against recording, as far as the machine and the kernels chosen so far tell; ``None``: nothing."""
    if kernels.device != "cpu":
        return f"they run on {kernels.device}"
    return cannot_record() or next(iter(kernels.unrepeatable()), None)


class RecordedPasses:
    """A decoder's forward, to be called in its place.

    A model is recorded only if that is safe: every kernel says that it may be; on the way, no value of a tensor and
    none of the layout's lists is looked at by Python, nothing of the batch is changed and nothing computed is kept; and
    the first replay, over memory full of NaN, gives the logits that the pass itself gave. Else ``reason`` says why not,
    and all passes run as they are.

    Args:
        model: its kernels bound.
        kernels: what they were chosen from.
    """

    def __init__(self, model: Decoder, kernels: KernelTable) -> None:
        self._model = model
        self._arena: Arena | None = None
        self._shapes = _Shapes()
        self._tapes: OrderedDict[Shape, tuple[Tape, torch.Tensor]] = OrderedDict()
        self.replays = 0
        """Passes that were replayed so far."""
        self.reason: str | None = None
        if (reason := why_unrecorded(kernels)) is not None:
            self._give_up(reason)

    def __call__(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits ``[len(batch.rows), vocab]``; they hold until the next pass."""
        shape = (len(batch.ids), batch.layout.spans.shape[1], len(batch.rows))
        if self.reason is not None or shape[0] > MOST_TOKENS:
            return self._eager(batch)
        if shape in self._tapes:
            self._tapes.move_to_end(shape)
            tape, logits = self._tapes[shape]
            tape.replay()
            self.replays += 1
            return logits
        return self._record(shape, batch) if self._shapes.is_due(shape) else self._eager(batch)

    def _eager(self, batch: RaggedBatch) -> torch.Tensor:
        logits: torch.Tensor = self._model(batch)
        return logits

    def _record(self, shape: Shape, batch: RaggedBatch) -> torch.Tensor:
        if self._arena is None:
            self._arena = Arena(_ARENA_BYTES)
        saved = [(tensor, tensor.clone()) for tensor in _tensors(batch)]
        try:
            with recording(self._arena) as tape:
                logits = self._eager(_guarded(batch))
            if any(not torch.equal(tensor, before) for tensor, before in saved):
                raise NotRepeatable("a part of the model changes the batch")
            self._check(tape, logits, batch)
        except Exception as error:
            for tensor, before in saved:
                tensor.copy_(before)
            logits = self._eager(batch)  # a fault of the pass itself comes up again, and changes nothing here
            if isinstance(error, MemoryError):
                self._shapes.leave(shape)
            else:
                self._give_up(str(error))
            return logits
        self._tapes[shape] = tape, logits
        if len(self._tapes) > _MOST_TAPES:
            self._shapes.evicted(self._tapes.popitem(last=False)[0])
        return logits

    def _check(self, tape: Tape, logits: torch.Tensor, batch: RaggedBatch) -> None:
        """Raises NotRepeatable unless the tape computes all by itself, and the model without what was recorded."""
        expected = logits.clone()
        with tape.poisoned():
            if not _same(self._eager(batch), expected):
                raise NotRepeatable("a part of the model keeps what a pass computed")
            tape.replay()
            if not _same(logits, expected):
                raise NotRepeatable("a part of the model computes by ways that cannot be seen")

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._tapes.clear()
        logger.info("passes of few tokens are not recorded: %s", reason)


class _Shapes:
    """Which shapes are worth a recording: those seen before, and the more often the more often they were thrown out."""

    def __init__(self) -> None:
        self._seen: Counter[Shape] = Counter()
        self._wanted: dict[Shape, int] = {}

    def is_due(self, shape: Shape) -> bool:
        """Whether to record it now; counts this time."""
        self._seen[shape] += 1
        return self._seen[shape] >= self._wanted.get(shape, 2)

    def evicted(self, shape: Shape) -> None:
        self._seen[shape] = 0
        self._wanted[shape] = 4 * self._wanted.get(shape, 2)

    def leave(self, shape: Shape) -> None:
        """Never record it."""
        self._wanted[shape] = 2**62


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((got == expected) | (got.isnan() & expected.isnan())).all())


def _tensors(batch: RaggedBatch) -> tuple[torch.Tensor, ...]:
    layout = batch.layout
    tensors = (batch.ids, batch.positions, batch.rows, batch.sequence_of, batch.lengths)
    return (*tensors, layout.block_table, layout.slots, layout.spans)


class _Unread:
    """Stands for a list whose values change between passes of one shape."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotRepeatable("a part of the model reads the layout's lists")

    __iter__ = __len__ = __getitem__ = __bool__ = __eq__ = __getattr__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _guarded(batch: RaggedBatch) -> RaggedBatch:
    """The batch as a recorded pass may see it: its tensors only, and a block table as wide as it can become."""
    unread: Any = _Unread()
    table = batch.layout.block_table
    table = table.as_strided((table.shape[0], table.stride(0)), table.stride())
    layout = replace(batch.layout, starts=unread, counts=unread, contexts=unread, block_table=table, memo={})
    return replace(batch, layout=layout, memo={}, sampling=unread, scoring=unread)
