"""Runs a decoder on plans written by hand, through the real batch builder, cache and kernels, with block tables in any
order: what the parity tests of a model family stand on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastgen.config import EngineConfig
from fastgen.core.blueprint import Blueprint, draw
from fastgen.core.containers import Decoder
from fastgen.core.layers.layer import building
from fastgen.core.loading import load_model
from fastgen.core.policy import Plan, Sequence
from fastgen.core.runtime.kv_cache import CachePlan, KVCache
from fastgen.core.runtime.ragged import RaggedBatchBuilder

__all__ = ["HandDriver", "draw_model", "load_decoder", "without_memory"]


def draw_model(directory: str | Path, **options: object) -> Blueprint:
    """All that is decided about a model before its weights are read: where it came from, its config, its warnings."""
    return draw(directory, EngineConfig.of({"device": "cpu", "num_blocks": 1, **options}))


def load_decoder(directory: str | Path, **options: object) -> Decoder:
    """The model in a directory, through the same loading as an engine's."""
    return load_model(draw_model(directory, **options))


def without_memory(build: Callable[[Any], Decoder], config: Any) -> Decoder:
    """What ``build`` makes of ``config``, its parameters on torch's meta device: for models of any size."""
    with building(torch.float32, torch.device("meta")):
        return build(config)


class HandDriver:
    """Sequences and passes chosen by the caller; every row's logits come back.

    Args:
        model: a loaded decoder.
        shuffle: seeds the order in which blocks are handed out; ``None`` hands them out in order.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        block_size: int = 4,
        num_blocks: int = 256,
        max_sequences: int = 16,
        shuffle: int | None = 0,
    ) -> None:
        parameter = next(model.parameters())
        cache = KVCache(model, CachePlan(num_blocks, block_size, 0, "by hand"), parameter.dtype, parameter.device)
        self.model, self.block_size = model, block_size
        self.builder = RaggedBatchBuilder(
            max_tokens=num_blocks * block_size,
            max_sequences=max_sequences,
            max_blocks=num_blocks,
            block_size=block_size,
            device=parameter.device,
            caches=cache.layers,
        )
        self._blocks = list(range(num_blocks))
        if shuffle is not None:
            random.Random(shuffle).shuffle(self._blocks)
        self._slots = list(range(max_sequences))
        self._new: list[Sequence] = []
        self._writes: list[tuple[int, int, int]] = []

    def add(self, tokens: list[int], *, num_prompt: int | None = None) -> Sequence:
        """A sequence that knows ``tokens`` and has computed none, with blocks for all of them.

        Args:
            num_prompt: how many of them are the prompt; all, unless given.
        """
        sequence = Sequence(tokens, max_tokens=len(tokens) + 1)
        sequence.num_prompt = len(tokens) if num_prompt is None else num_prompt
        needed = -(-len(tokens) // self.block_size)
        sequence.blocks = [self._blocks.pop() for _ in range(needed)]
        sequence.slot = self._slots.pop()
        self._new.append(sequence)
        return sequence

    @torch.inference_mode()
    def run(self, work: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """One pass: the next ``count`` tokens of each sequence.

        Returns:
            For each, logits ``[count, vocab]``.
        """
        counts = [count for _, count in work]
        sequences = [sequence for sequence, _ in work]
        plan = Plan(sequences, counts, [], sum(counts), admitted=self._new, block_writes=self._writes)
        self._new, self._writes = [], []
        batch = self.builder.build(plan, lambda _: False)
        batch.rows = torch.arange(plan.num_tokens, device=batch.ids.device)
        logits = self.model(batch)
        for sequence, count in work:
            sequence.num_computed += count
        return list(logits.split(counts))

    def read(self, sequence: Sequence, chunk: int) -> torch.Tensor:
        """All of a sequence's remaining tokens in passes of at most ``chunk``; logits ``[tokens, vocab]``."""
        pieces = []
        while sequence.num_computed < len(sequence.tokens):
            count = min(chunk, len(sequence.tokens) - sequence.num_computed)
            pieces += self.run([(sequence, count)])
        return torch.cat(pieces)

    def replace_block(self, sequence: Sequence, place: int) -> None:
        """A mistake on purpose: from now on, ``place`` in a running sequence's block table names an unused block."""
        self._writes.append((sequence.slot, place, self._blocks[0]))
