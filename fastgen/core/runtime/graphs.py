"""Small passes without Python: recorded when their shape comes up again, and replayed from then on.

A decoding pass of a small model spends a third of its time between operations. As CUDA graphs do on a GPU (and vLLM and
SGLang with them), a pass is recorded once for its numbers of tokens, sequences and rows of logits; the tensors of a
batch stay where they are (``ragged.py``), so replaying the record computes the next pass of that shape.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from typing import Any, NoReturn

import torch

from fastgen.core.containers import Decoder
from fastgen.core.runtime.ragged import RaggedBatch
from fastgen.kernels.cpu.tape import Arena, NotRepeatable, Tape, cannot_record, recording
from fastgen.kernels.ops import KernelTable

__all__ = ["RecordedPasses"]

logger = logging.getLogger("fastgen")

MOST_TOKENS = 64
"""Larger passes spend little of their time in Python."""
_MOST_TAPES = 64
_ARENA_BYTES = 2**27

Shape = tuple[int, int, int]


class RecordedPasses:
    """A decoder's forward, to be called in its place.

    A model is recorded only if that is safe: every kernel says that it may be, no value of a tensor and none of the
    layout's lists is looked at by Python on the way, and the first replay, over memory full of NaN, gives the logits
    that the pass itself gave. Else ``reason`` says why not, and all passes run as they are.

    Args:
        model: its kernels bound.
        kernels: what they were chosen from.
    """

    def __init__(self, model: Decoder, kernels: KernelTable) -> None:
        self._model = model
        self._arena: Arena | None = None
        self._seen: set[Shape] = set()
        self._tapes: OrderedDict[Shape, tuple[Tape, torch.Tensor] | None] = OrderedDict()
        self.replays = 0
        """Passes that were replayed so far."""
        self.reason = (
            f"they run on {kernels.device}"
            if kernels.device != "cpu"
            else cannot_record() or next(iter(kernels.unrepeatable()), None)
        )

    def __call__(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits ``[len(batch.rows), vocab]``; they hold until the next pass."""
        shape = (len(batch.ids), batch.layout.spans.shape[1], len(batch.rows))
        if self.reason is not None or shape[0] > MOST_TOKENS:
            return self._eager(batch)
        if shape not in self._tapes:
            if shape not in self._seen:  # many shapes come up once
                self._seen.add(shape)
                return self._eager(batch)
            return self._record(shape, batch)
        self._tapes.move_to_end(shape)
        recorded = self._tapes[shape]
        if recorded is None:
            return self._eager(batch)
        tape, logits = recorded
        tape.replay()
        self.replays += 1
        return logits

    def _eager(self, batch: RaggedBatch) -> torch.Tensor:
        logits: torch.Tensor = self._model(batch)
        return logits

    def _record(self, shape: Shape, batch: RaggedBatch) -> torch.Tensor:
        if self._arena is None:
            self._arena = Arena(_ARENA_BYTES)
        try:
            with recording(self._arena) as tape:
                logits = self._eager(_guarded(batch))
            expected = logits.clone()
            tape.poison()
            tape.replay()
            if not _same(logits, expected):
                raise NotRepeatable("a part of the model computes by ways that cannot be seen")
            self._tapes[shape] = tape, logits
        except Exception as error:  # a fault of the pass itself comes up again, where it belongs
            if isinstance(error, MemoryError):
                self._tapes[shape] = None
            else:
                self.reason = str(error)
                self._tapes.clear()
                logger.info("passes of few tokens are not recorded: %s", error)
            return self._eager(batch)
        if len(self._tapes) > _MOST_TAPES:
            self._tapes.popitem(last=False)
        return logits


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((got == expected) | (got.isnan() & expected.isnan())).all())


class _Unread:
    """Stands for a list whose values change between passes of one shape."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotRepeatable("a part of the model reads the layout's lists")

    __iter__ = __len__ = __getitem__ = __bool__ = __eq__ = __getattr__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _guarded(batch: RaggedBatch) -> RaggedBatch:
    """The batch as a recorded pass may see it: its tensors only."""
    unread: Any = _Unread()
    layout = replace(batch.layout, starts=unread, counts=unread, contexts=unread, memo={})
    return replace(batch, layout=layout, memo={}, sampling=unread, scoring=unread)
