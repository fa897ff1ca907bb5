"""What layers read of a pass: right, whatever ran before, and always at the same addresses."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch

from fastgen.core.policy import Scheduler, Sequence
from fastgen.core.runtime.ragged import RaggedBatch, RaggedBatchBuilder

BLOCK, BUDGET, ROWS = 4, 24, 8


def builder() -> RaggedBatchBuilder:
    return RaggedBatchBuilder(
        max_tokens=BUDGET,
        max_sequences=ROWS,
        max_blocks=16,
        block_size=BLOCK,
        device=torch.device("cpu"),
        caches=[],
    )


def drive(seed: int, steps: int, watch, *, on_batch=lambda batch: None) -> None:
    """Random arrivals in a cache that is too small, so that sequences enter, end, are preempted and change rows."""
    random_ = random.Random(seed)
    scheduler = Scheduler(num_blocks=24, block_size=BLOCK, max_batch_tokens=BUDGET, max_sequences=ROWS)
    build = builder()
    for _ in range(steps):
        if random_.random() < 0.4:
            prompt = [random_.randrange(50) for _ in range(random_.randint(1, 30))]
            scheduler.add(Sequence(prompt, max_tokens=len(prompt) + random_.randint(1, 30)))
        plan = scheduler.plan()
        if plan.sequences:
            batch = build.build(plan, lambda sequence: sequence.id % 3 == 0)
            on_batch(batch)
            watch(plan, batch)
        scheduler.commit(plan, [random_.randrange(50) for _ in plan.sampling])
    assert scheduler.stats.preemptions > 3, "the cache was never short: nothing was shown"


def tensors(batch: RaggedBatch) -> dict[str, torch.Tensor]:
    found = {f.name: getattr(batch, f.name) for f in fields(batch)}
    found |= {f"layout.{f.name}": getattr(batch.layout, f.name) for f in fields(batch.layout)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def check(plan, batch) -> None:
    """Every tensor, from the sequences themselves, one token after another."""
    ids, positions, of, slots, rows = [], [], [], [], []
    for row, (sequence, count) in enumerate(zip(plan.sequences, plan.counts, strict=True)):
        first = sequence.num_computed
        if row in plan.sampling:
            rows.append(len(ids) + count - 1)
        assert batch.layout.starts[row] == len(ids)
        for position in range(first, first + count):
            ids.append(sequence.tokens[position])
            positions.append(position)
            of.append(row)
            slots.append(sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK)
        held = -(-(first + count) // BLOCK)
        assert batch.layout.block_table[row, :held].tolist() == sequence.blocks[:held]
    contexts = [s.num_computed + count for s, count in zip(plan.sequences, plan.counts, strict=True)]
    assert batch.ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.sequence_of.tolist() == of
    assert batch.layout.slots.tolist() == slots
    assert batch.rows[: len(rows)].tolist() == rows
    assert batch.lengths.tolist() == [s.regime_length for s in plan.sequences]
    assert batch.layout.spans.tolist() == [batch.layout.starts, plan.counts, contexts]
    assert batch.layout.contexts == contexts
    assert batch.layout.block_table.max() < 24
    assert batch.layout.block_table.min() >= 0


@pytest.mark.parametrize("seed", range(4))
def test_every_pass_says_what_its_sequences_hold(seed):
    drive(seed, 300, check)


def test_tensors_stay_where_they_are():
    addresses: dict[str, set] = {}
    shapes: set = set()

    def note(plan, batch) -> None:
        found = tensors(batch)
        shapes.add(tuple(batch.layout.block_table.shape))
        for name, tensor in found.items():
            strides = tensor.stride()[:-1]
            addresses.setdefault(name, set()).add((tensor.data_ptr(), strides, tensor.stride(-1)))

    drive(0, 100, note)
    assert len(shapes) > 5
    assert set(addresses) == {
        *("ids", "positions", "rows", "sequence_of", "lengths"),
        *("layout.block_table", "layout.slots", "layout.spans"),
    }
    assert {name for name, places in addresses.items() if len(places) > 1} == set()


def test_a_changed_table_row_that_goes_unnoticed_is_found():
    """Negative control of ``check``."""

    def forget(batch: RaggedBatch) -> None:
        batch.layout.block_table[-1, -1] += 1

    with pytest.raises(AssertionError):
        drive(0, 300, check, on_batch=forget)
