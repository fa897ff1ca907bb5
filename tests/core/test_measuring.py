"""How the curve is measured: which sizes, what a pass carries, and when an engine does it by itself."""

from __future__ import annotations

import logging

import pytest

from fastgen.config import EngineConfig
from fastgen.core import calibration, measuring
from fastgen.core.calibration import DEFAULT_BUDGET, SMALLEST_BUDGET, Calibration
from fastgen.core.engine import Engine
from fastgen.core.measuring import measure
from fastgen.core.runtime.runner import Runner
from fastgen.errors import ConfigError, EngineClosedError, FastgenError, RequestFailedError
from fastgen.testing.adapters import random_lora
from fastgen.testing.checkpoints import tiny_llama
from fastgen.types import SamplingParams


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "cache_directory", lambda: tmp_path)
    return tmp_path / "calibration"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


class Machine:
    """Passes that take as long as ``seconds_of`` says, by a clock of their own."""

    def __init__(self, seconds_of):
        self.seconds_of, self.now, self.ran = seconds_of, 0.0, []

    def __call__(self, tokens: int) -> float:
        seconds = self.seconds_of(tokens)
        self.now += seconds
        self.ran.append(tokens)
        return seconds

    def measure(self, largest=2048, seconds=20.0, **options):
        return measure(self, largest, seconds=seconds, clock=lambda: self.now, **options)


# ---- which sizes ---------------------------------------------------------------------------------------------------


def test_a_curve_that_grows_is_measured_to_its_end():
    points, complete = Machine(lambda tokens: 0.01).measure()
    assert [point.tokens for point in points] == [2**i for i in range(12)]
    assert complete
    assert points[-1].rate == pytest.approx(204_800)
    points, complete = Machine(lambda tokens: 0.01).measure(largest=1000)
    assert [point.tokens for point in points] == [2**i for i in range(10)]
    assert not complete, "there was no room for more"


def test_sizes_beyond_where_it_flattened_are_left_out():
    points, complete = Machine(lambda tokens: max(0.1, tokens / 1000)).measure()
    assert [point.tokens for point in points][-3:] == [128, 256, 512], "two that gain nothing, to be sure"
    assert complete


def test_a_dip_is_no_end():
    """Kernels for few rows give way to those for many: 32 and 64 tokens are slower than 16, 128 far quicker."""
    rates = {16: 400, 32: 350, 64: 380, 128: 900}
    points, _ = Machine(lambda tokens: tokens / rates.get(tokens, 900 if tokens > 64 else 25 * tokens)).measure()
    assert points[-1].tokens >= 128


def test_time_is_kept_and_so_is_the_smallest_budget():
    machine = Machine(lambda tokens: 0.5 + tokens / 4)
    points, complete = machine.measure(seconds=60)
    assert not complete
    assert 60 / 2 < machine.now <= 60
    assert points[-1].tokens >= SMALLEST_BUDGET
    slow = Machine(lambda tokens: 100.0)
    points, complete = slow.measure(seconds=10)
    assert ([point.tokens for point in points], complete) == ([1, 2, 4, SMALLEST_BUDGET], False)


def test_the_median_counts_and_the_first_pass_does_not():
    times = iter([9.0, 1.0, 3.0, 2.0])
    points, _ = Machine(lambda tokens: next(times)).measure(largest=1)
    assert [(point.tokens, point.seconds, point.passes) for point in points] == [(1, 2.0, 3)]


def test_quick_passes_are_run_more_often():
    points, _ = Machine(lambda tokens: 0.001 * tokens).measure(largest=256)
    counts = [point.passes for point in points]
    assert counts[0] > counts[-1] >= 3


def test_progress_is_told():
    told = []
    Machine(lambda tokens: 0.2).measure(largest=4, seconds=2, tick=lambda size, used: told.append((size, used)))
    assert [size for size, _ in told] == [1, 2, 4]
    assert all(0 <= used <= 1 for _, used in told)


# ---- what a pass carries -------------------------------------------------------------------------------------------


def watched(monkeypatch):
    """Every pass of any engine: ``(tokens before it, tokens of it)`` of its only row."""
    passes = []
    step = Engine.step

    def watch(self):
        plan = self.scheduler.plan

        def planned():
            made = plan()
            passes.append([(seq.num_computed, count) for seq, count in zip(made.sequences, made.counts, strict=True)])
            return made

        self.scheduler.plan = planned
        try:
            return step(self)
        finally:
            del self.scheduler.plan

    monkeypatch.setattr(Engine, "step", watch)
    return passes


def load(directory, **options) -> Engine:
    return Engine.load(directory, **{"device": "cpu", "num_blocks": 64, "block_size": 16, **options})


@pytest.mark.parametrize(
    ("options", "context", "largest"),
    [
        ({}, 240, 256),
        ({"block_size": 1, "num_blocks": 600}, 255, 256),
        ({"block_size": 400, "num_blocks": 2}, 0, 256),
        ({"max_model_len": 12, "block_size": 4}, 4, 4),
        ({"num_blocks": 3}, 16, 32),
        ({"prefix_caching": False}, 240, 256),
        ({"policy": "whole-prompt", "max_batch_tokens": 3}, 240, 256),
        ({"policy": "prefill-first", "queue_order": "random"}, 240, 256),
        ({"max_batch_tokens": 5, "max_sequences": 1}, 240, 256),
    ],
    ids=str,
)
def test_each_pass_runs_its_tokens_after_the_context(directory, monkeypatch, options, context, largest):
    monkeypatch.setattr(measuring, "_GAIN", 0.0)  # every size there is room for, however the machine is today
    with load(directory, **options) as engine:
        passes = watched(monkeypatch)
        found = engine.calibrate()
        assert engine.stats().passes == 0, "the engine's own cache and counts are left alone"
    sizes = [point.tokens for point in found.points]
    assert sizes == [2**i for i in range(largest.bit_length())]
    assert (found.context, found.complete, found.setting) == (context, False, engine.blueprint.setting)
    alone = [row for rows in passes for row in rows]
    assert len(alone) == len(passes)
    measured = [count for before, count in alone if before == context]
    for point in found.points:
        assert measured.count(point.tokens) >= point.passes
    if options.get("block_size") != 1:  # where the prefix cache soon holds every beginning of a pass
        assert len(passes) - len(measured) <= 4, "the context is computed once"


def test_adapters_beside_the_model_are_no_obstacle(directory, tmp_path):
    lora = random_lora(tmp_path / "lora", {"model.layers.0.self_attn.q_proj": (32, 32)}, seed=1)
    with load(directory, lora={"one": str(lora)}) as engine:
        assert engine.calibrate().points
        engine.add([5, 6, 7], SamplingParams(max_new_tokens=2, lora="one"))
        while engine.has_work:
            engine.step()
        assert engine.stats().failed == 0


def test_no_room_is_said(directory):
    with load(directory, max_model_len=1) as engine, pytest.raises(ConfigError, match="max_model_len"):
        engine.calibrate()


def test_a_pass_that_fails_is_told(directory, monkeypatch):
    with load(directory) as engine:
        monkeypatch.setattr("fastgen.core.runtime.runner.Runner.run", lambda *_: 1 / 0)
        with pytest.raises(RequestFailedError, match=r"could not be measured.*ZeroDivisionError"):
            engine.calibrate()


def test_only_an_idle_engine_is_measured(directory):
    engine = load(directory)
    engine.add([5, 6], SamplingParams(max_new_tokens=1))
    with pytest.raises(FastgenError, match=r"has work \(1 requests in flight\)"):
        engine.calibrate()
    while engine.has_work:
        engine.step()
    assert engine.stats().failed == 0
    engine.close()
    with pytest.raises(EngineClosedError, match="is closed"):
        engine.calibrate()


# ---- at start ------------------------------------------------------------------------------------------------------


def answer(engine: Engine) -> list[int]:
    engine.add(list(range(3, 60)), SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True))
    tokens = []
    while engine.has_work:
        tokens += [output.token_id for output in engine.step()]
    return tokens


def test_an_engine_measures_only_if_it_is_asked_to(directory, monkeypatch):
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: pytest.fail("measured"))
    for options in ({}, {"max_batch_tokens": 9}, {"max_batch_tokens": 9, "target_latency": 5.0}):
        with load(directory, **options) as engine:
            wanted = options.get("max_batch_tokens", DEFAULT_BUDGET)
            assert engine.max_batch_tokens == engine.scheduler.max_batch_tokens == wanted


def test_a_target_measures_once_and_changes_no_answer(directory, cache, monkeypatch, caplog, capsys):
    with load(directory) as engine:
        expected = answer(engine)
    with caplog.at_level(logging.INFO, "fastgen"):
        engine = load(directory, target_latency=1e-6)
    assert engine.max_batch_tokens == engine.scheduler.max_batch_tokens == SMALLEST_BUDGET
    assert answer(engine) == expected
    assert (engine.stats().total_blocks, engine.stats().peak_blocks) == (64, 5)
    told = [record.getMessage() for record in caplog.records]
    assert any("calibrating the token budget, once" in text for text in told)
    assert any("cannot be kept" in text for text in told)
    assert len(list(cache.iterdir())) == 1
    assert capsys.readouterr() == ("", "")

    monkeypatch.setattr(measuring, "measure", lambda *_, **__: pytest.fail("measured again"))
    known = Calibration.remembered(engine.blueprint.setting)
    assert known is not None
    for options in ({}, {"target_latency": 1e-6}, {"target_latency": 1e6}, {"max_batch_tokens": 9}):
        with load(directory, **options) as other:
            asked = EngineConfig(**options)
            wanted = asked.max_batch_tokens or known.budget(asked.target_latency).tokens
            assert other.max_batch_tokens == other.scheduler.max_batch_tokens == wanted
            assert answer(other) == expected


def test_a_full_disk_costs_the_memory_and_not_the_start(directory, cache, caplog):
    cache.write_text("a file where the folder should be")
    with load(directory, target_latency=1e-6) as engine:
        assert engine.max_batch_tokens == SMALLEST_BUDGET
    assert any("cannot be kept in" in record.getMessage() for record in caplog.records)


def test_a_measurement_that_fails_costs_no_model(directory, cache, monkeypatch, caplog):
    run = Runner.run
    monkeypatch.setattr(Runner, "run", lambda *_: 1 / 0)
    with load(directory, target_latency=5.0) as engine:
        assert engine.max_batch_tokens == DEFAULT_BUDGET
        budget = engine.blueprint.budget
        assert (budget.tokens, budget.pending) == (DEFAULT_BUDGET, False)
        assert "calibrating at start failed: " in budget.reason
        assert "ZeroDivisionError" in budget.reason
        assert "could not be calibrated, and is 512: " in caplog.text
        assert not cache.exists()
        monkeypatch.setattr(Runner, "run", run)
        assert len(answer(engine)) == 20
    with load(directory, target_latency=5.0, max_model_len=1) as engine:
        assert "max_model_len" in engine.blueprint.budget.reason


def test_a_number_of_sequences_that_is_cut_is_said(directory, caplog):
    with load(directory, max_batch_tokens=16, max_sequences=17) as engine:
        assert engine.scheduler.max_running == 16
    assert "max_sequences: 17 were asked for, and no more than 16 can run at once" in caplog.text
    caplog.clear()
    for options in ({}, {"max_sequences": 16}, {"max_sequences": 17, "policy": "whole-prompt"}):
        with load(directory, max_batch_tokens=16, **options):
            assert "max_sequences" not in caplog.text, options


def test_policies_raise_what_was_chosen_as_they_raise_what_was_asked_for(directory):
    with load(directory, target_latency=1e-6, policy="whole-prompt") as engine:
        assert engine.max_batch_tokens == SMALLEST_BUDGET
        assert engine.scheduler.max_batch_tokens > engine.max_model_len
        assert any("policy whole-prompt raises the token budget" in text for text in engine.blueprint.warnings)
    with load(directory, target_latency=1e-6) as engine:
        assert engine.blueprint.warnings == []
