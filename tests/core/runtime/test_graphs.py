"""Recorded passes against the same engine without them: every family, and what must not be recorded."""

from __future__ import annotations

import ctypes
import logging
import random

import pytest
import torch
from transformers import (
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from fastgen.core.engine import Engine
from fastgen.core.layers import Attention, Linear
from fastgen.core.runtime import graphs
from fastgen.core.runtime.graphs import RecordedPasses
from fastgen.testing.checkpoints import TINY, tiny_checkpoint, tiny_llama
from fastgen.types import SamplingParams

ROPE = {"rope_theta": 10000.0, "factor": 8.0}
FAMILIES = {
    "llama": LlamaConfig(**TINY),
    "tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "norms of queries and keys": Qwen3Config(**TINY, head_dim=16),
    "biases": Qwen2Config(**TINY),
    "scaled embedding, caps, windows": Gemma2Config(**TINY, head_dim=16, sliding_window=8),
    "multipliers": GraniteConfig(
        **TINY, embedding_multiplier=3.0, residual_multiplier=0.3, logits_scaling=4.0, attention_multiplier=0.2
    ),
    "learned positions": OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    ),
    "transposed weights": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
    "two branches": GPTNeoXConfig(**{k: v for k, v in TINY.items() if k != "num_key_value_heads"}),
    "one norm": PhiConfig(**TINY),
    "fused": Phi3Config(**TINY, pad_token_id=0),
    "partial rotary": StableLmConfig(**TINY),
    "alibi": FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
}


def load(directory, **options) -> Engine:
    return Engine.load(directory, **{"device": "cpu", "block_size": 4, "num_blocks": 256, "seed": 0, **options})


def answers(engine: Engine, *, seed: int = 0) -> dict[str, list]:
    """Requests that come and go, so that passes of many shapes are run."""
    rng = random.Random(seed)
    waiting = [[rng.randrange(3, 64) for _ in range(rng.choice((1, 2, 5, 9, 30)))] for _ in range(10)]
    found: dict[str, list] = {}
    for step in range(10_000):
        if waiting and step % 3 == 0:
            params = SamplingParams(max_new_tokens=25, temperature=0.0, ignore_eos=True, logprobs=2)
            engine.add(waiting.pop(), params, request_id=f"{seed}, {len(waiting)}")
        if not waiting and not engine.has_work:
            return found
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.request_id, []).append((output.token_id, output.logprob))
    raise AssertionError("the engine does not come to an end")


def passes_of(engine: Engine) -> RecordedPasses:
    passes = engine.runner.model
    assert isinstance(passes, RecordedPasses)
    return passes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same(family, dtype, tmp_path):
    directory = tiny_checkpoint(tmp_path, FAMILIES[family], tokenizer=False)
    engine, plain = load(directory, dtype=dtype), load(directory, dtype=dtype, record_passes=False)
    for seed in range(2):
        assert answers(engine, seed=seed) == answers(plain, seed=seed)
    assert passes_of(engine).reason is None
    assert passes_of(engine).replays > 40


def test_without_it_the_model_runs_itself(tmp_path):
    engine = load(tiny_llama(tmp_path, tokenizer=False), record_passes=False)
    assert engine.runner.model is engine._model


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MixtralConfig(**TINY, num_local_experts=4), "the kernel 'torch' for experts does not say"),
        (
            LlamaConfig(**{**TINY, "max_position_embeddings": 16}, rope_parameters={**ROPE, "rope_type": "dynamic"}),
            "values in Python",
        ),
    ],
)
def test_models_that_read_values_run_as_they_are(config, reason, tmp_path):
    directory = tiny_checkpoint(tmp_path, config, tokenizer=False)
    engine = load(directory)
    assert answers(engine) == answers(load(directory, record_passes=False))
    assert reason in (passes_of(engine).reason or "")
    assert passes_of(engine).replays == 0


class ReadsLists(Attention):
    """As a plugin's might: from the layout's lists."""

    def forward(self, x, batch):
        return super().forward(x, batch) * (1 + max(batch.layout.contexts) % 3)


class ReadsValues(Attention):
    def forward(self, x, batch):
        return super().forward(x, batch) * (1 + batch.positions.numpy().max() % 3)


class Secret(Linear):
    """Computes where neither torch nor the library sees it."""

    def forward(self, x):
        y = super().forward(x)
        out = torch.empty_like(y)
        ctypes.memmove(out.data_ptr(), y.data_ptr(), y.nbytes)
        return out


class Keeps(Attention):
    """Remembers what it computed for the next pass, for a while."""

    kept: torch.Tensor | None = None
    calls = 0

    def forward(self, x, batch):
        self.calls += 1
        if self.kept is None or self.kept.shape != x.shape or self.calls % 2 == 0:
            self.kept = torch.ones_like(x)
        return super().forward(x, batch) * self.kept


class Changes(Attention):
    """Moves its tokens, in the batch itself."""

    def forward(self, x, batch):
        batch.positions.add_(1)
        return super().forward(x, batch)


class Faulty(Attention):
    """Fails when it is recorded, with something unforeseen."""

    def forward(self, x, batch):
        if type(batch.layout.counts) is not list:
            raise RuntimeError("this cannot be")
        return super().forward(x, batch)


@pytest.mark.parametrize(
    ("part", "of", "reason"),
    [
        (ReadsLists, Attention, "lists"),
        (ReadsValues, Attention, "values"),
        (Secret, Linear, "cannot be seen"),
        (Keeps, Attention, "keeps what a pass computed"),
        (Changes, Attention, "changes the batch"),
        (Faulty, Attention, "this cannot be"),
    ],
)
def test_parts_that_cannot_be_repeated(part, of, reason, tmp_path, caplog):
    directory = tiny_llama(tmp_path, tokenizer=False)
    engines = [load(directory), load(directory, record_passes=False)]
    for engine in engines:
        for module in list(engine._model.modules()):
            if type(module) is of:
                module.__class__ = part
    with caplog.at_level(logging.INFO, "fastgen"):
        got, expected = map(answers, engines)
    assert got == expected
    assert reason in (passes_of(engines[0]).reason or "")
    assert passes_of(engines[0]).replays == 0
    assert sum("not recorded" in record.message for record in caplog.records) == 1


def test_few_records_are_kept_and_made(tmp_path, monkeypatch):
    """Shapes that take turns do not throw each other out for good."""
    monkeypatch.setattr(graphs, "_MOST_TAPES", 2)
    made = []
    check = RecordedPasses._check
    monkeypatch.setattr(RecordedPasses, "_check", lambda self, *args: made.append(1) or check(self, *args))
    directory = tiny_llama(tmp_path, tokenizer=False)
    engine, plain = load(directory), load(directory, record_passes=False)
    for seed in range(6):
        assert answers(engine, seed=seed) == answers(plain, seed=seed)
    passes = passes_of(engine)
    assert len(passes._tapes) == 2
    assert passes.replays > 0
    assert len(made) < engine.stats().passes / 8


def test_shapes_that_need_too_much_memory_run_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "_ARENA_BYTES", 4096)
    directory = tiny_llama(tmp_path, tokenizer=False)
    engine = load(directory)
    assert answers(engine) == answers(load(directory, record_passes=False))
    assert passes_of(engine).reason is None
    passes = passes_of(engine)
    assert passes._tapes
    assert max(passes._shapes._wanted.values()) > 1000


def test_large_passes_are_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_TOKENS", 2)
    engine = load(tiny_llama(tmp_path, tokenizer=False))
    answers(engine)
    assert passes_of(engine)._tapes
    assert all(tokens <= 2 for tokens, _, _ in passes_of(engine)._tapes)


def test_a_failed_pass_fails_as_it_would(tmp_path):
    """A replayed pass still refuses an id that is no row, and the engine goes on."""
    engine = load(tiny_llama(tmp_path, tokenizer=False))
    answers(engine)
    passes = passes_of(engine)
    name = engine.add([5, 6, 7], SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True))
    engine.step()
    engine._requests[name][0].tokens[-1] = 64
    before = passes.replays
    outputs = engine.step()
    assert [output.finish_reason for output in outputs] == ["error"]
    assert "id 64" in (outputs[0].error or "")
    assert passes.replays == before
    assert passes.reason is None
    engine.add([5, 6, 7], SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        assert all(output.error is None for output in engine.step())


def test_a_recorded_pass_sees_block_tables_of_one_width(tmp_path):
    """Contexts grow between passes of one shape, and what is recorded must not depend on how wide the table was."""
    engine = load(tiny_llama(tmp_path, tokenizer=False), num_blocks=64, max_model_len=256)
    widths = []

    class Watching(Attention):
        def forward(self, x, batch):
            widths.append(batch.layout.block_table.shape[1])
            return super().forward(x, batch)

    for module in list(engine._model.modules()):
        if type(module) is Attention:
            module.__class__ = Watching
    engine.add([3, 4, 5], SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert passes_of(engine).replays > 50
    assert set(widths) == {1, 2, 64}  # run as they are, and recorded
