"""What follows from a throughput curve, and how curves are remembered."""

from __future__ import annotations

import json
import logging
import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen.config import EngineConfig
from fastgen.core import calibration as module
from fastgen.core.calibration import (
    DEFAULT_BUDGET,
    SATURATED,
    SMALLEST_BUDGET,
    SMALLEST_UNASKED,
    Calibration,
    Point,
    Setting,
    plan_budget,
)
from fastgen.errors import ConfigError

SETTING = Setting(
    model="m",
    shape="s",
    dtype="float32",
    device="A processor",
    kernels={"linear": "cpu"},
    threads=2,
    options={"block_size": 16, "quantization": None},
    adapters=False,
    fastgen="0.1.0",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "cache_directory", lambda: tmp_path)
    return tmp_path / "calibration"


def curve(times: dict[int, float], *, complete: bool = True) -> Calibration:
    """Milliseconds by size."""
    return Calibration(
        date=datetime(2026, 5, 17, 12, tzinfo=UTC),
        setting=SETTING,
        context=256,
        complete=complete,
        points=tuple(Point(tokens=size, seconds=ms / 1000, passes=5) for size, ms in times.items()),
    )


def saturating(largest: int = 1024, *, base: float = 16.0, per_token: float = 1.0) -> Calibration:
    """A pass costs a constant (reading the weights), or its multiplications where these take longer."""
    return curve({2**i: max(base, per_token * 2**i) for i in range(int(math.log2(largest)) + 1)})


# ---- what is chosen ------------------------------------------------------------------------------------------------


def test_the_smallest_budget_that_saturates():
    assert saturating(base=100).budget().tokens == 128
    assert saturating(base=200).budget().tokens == 256
    assert "calibrated 2026-05-17: 256 tokens reach 100 % of 1,000 tok/s" in saturating(base=200).budget().reason


def test_95_percent_are_enough_and_94_are_not():
    assert curve({64: 64 / 0.96, 128: 128 / 0.999, 256: 256}).budget().tokens == 64
    assert curve({64: 64 / 0.94, 128: 128 / 0.96, 256: 256}).budget().tokens == 128


def test_a_curve_that_still_grows_gives_its_largest_size():
    assert curve({16: 10, 32: 10, 64: 10, 128: 10}).budget().tokens == 128


def test_only_a_target_asks_for_so_few_tokens_that_sequences_have_to_wait():
    early = saturating()
    assert early.saturated == 16
    assert early.budget().tokens == SMALLEST_UNASKED
    assert "16 tokens reach 100 % of 1,000 tok/s; 64 is the smallest budget unless a target" in early.budget().reason
    assert early.budget(42).tokens == 40
    assert early.budget(1000).tokens == SMALLEST_UNASKED


def test_a_curve_that_was_cut_off_says_nothing_of_where_it_flattens():
    growing = {1: 10, 2: 10, 4: 10, 8: 10, 16: 10, 32: 10}
    cut = curve(growing, complete=False)
    assert cut.budget().tokens == DEFAULT_BUDGET
    assert "as far as 32 tokens, which does not show" in cut.budget().reason
    assert cut.budget(100).tokens == 320, "as many tokens a second as the last point had"
    assert cut.budget(1e9).tokens == DEFAULT_BUDGET
    assert curve(growing | {64: 20}, complete=False).budget().tokens == DEFAULT_BUDGET, "one size may be chance"
    flat = curve(growing | {64: 20, 128: 40}, complete=False)
    assert flat.saturated == 32
    assert flat.budget().tokens == SMALLEST_UNASKED, "it had flattened before it was cut off"


def test_a_flat_curve_and_a_single_point_give_the_smallest_budget_there_is():
    assert curve({2**i: 10 * 2**i for i in range(8)}).budget().tokens == SMALLEST_UNASKED
    for size in (1, 8, 64):
        assert curve({size: 3}).budget().tokens == SMALLEST_UNASKED
    assert curve({256: 3}).budget().tokens == 256


def test_a_pass_that_was_disturbed_misleads_nobody():
    """A pass cannot take longer than one with more tokens, so the disturbed size is as good as the next."""
    quiet = {16: 8.0, 32: 8, 64: 8, 128: 9, 256: 17, 512: 33, 1024: 66}
    disturbed = quiet | {16: 30, 64: 70.0}
    assert curve(disturbed).budget() == curve(quiet).budget()
    assert curve(disturbed).budget(9.5).tokens == curve(quiet).budget(9.5).tokens == 136
    assert curve(quiet).budget().tokens == 256


def test_the_largest_budget_within_the_target():
    grows = saturating(2048, base=400)
    assert grows.budget().tokens == 512
    assert grows.budget(1000).tokens == 512, "more would gain nothing"
    assert grows.budget(400).tokens == 256, "the last size that takes as long as the smallest"
    assert grows.budget(450).tokens == 368, "between two sizes, in steps of 8"
    reason = grows.budget(450).reason
    assert "368 tokens take about 449 ms, within 450 ms, and reach 82 % of 1,000 tok/s" in reason


def test_a_target_that_cannot_be_kept_is_said_and_the_smallest_budget_taken():
    budget = saturating(base=300).budget(100)
    assert budget.tokens == SMALLEST_BUDGET
    assert "100 ms cannot be kept" in budget.reason
    assert "take about 300 ms" in budget.reason
    assert "max_batch_tokens" in budget.reason


CURVES = st.builds(
    lambda times, complete: curve({2**place: ms for place, ms in enumerate(times)}, complete=complete),
    st.lists(st.floats(0.01, 1e5), min_size=1, max_size=12),
    st.booleans(),
)
TARGETS = st.floats(0.001, 1e300)


@given(CURVES, TARGETS)
def test_what_is_chosen_keeps_what_it_promises(found, target):
    """Whatever the curve: noisy, falling, growing."""
    sizes = [point.tokens for point in found.points]
    enough = found.budget().tokens
    if found.cut_short:
        assert enough == max(DEFAULT_BUDGET, sizes[-1])
    else:
        assert enough == SMALLEST_UNASKED or (enough > SMALLEST_UNASKED and enough in sizes)
    if enough > SMALLEST_UNASKED and not found.cut_short:
        assert enough / found.seconds(enough) >= SATURATED * found.best * (1 - 1e-9)
        smaller = [size for size in sizes if size < enough]
        assert all(size / found.seconds(size) < SATURATED * found.best for size in smaller)
    chosen = found.budget(target)
    assert SMALLEST_BUDGET <= chosen.tokens <= enough
    if "cannot be kept" in chosen.reason:
        assert chosen.tokens == SMALLEST_BUDGET
        assert sizes[-1] < SMALLEST_BUDGET or found.seconds(SMALLEST_BUDGET) > target / 1000 * (1 - 1e-9)
    else:
        assert found.seconds(chosen.tokens) <= target / 1000 * (1 + 1e-9)


@given(CURVES, TARGETS, TARGETS)
def test_more_time_never_means_fewer_tokens(found, one, other):
    low, high = sorted((one, other))
    assert found.budget(low).tokens <= found.budget(high).tokens <= found.budget().tokens


@given(CURVES, st.integers(1, 5000), st.integers(1, 5000))
def test_time_grows_with_tokens(found, one, other):
    low, high = sorted((one, other))
    assert found.seconds(low) <= found.seconds(high) * (1 + 1e-9)


@given(CURVES)
def test_no_point_is_read_as_slower_than_it_was_measured(found):
    for point in found.points:
        assert found.seconds(point.tokens) <= point.seconds * (1 + 1e-9)


# ---- which one an engine takes -------------------------------------------------------------------------------------


def test_an_explicit_number_wins():
    for target in (None, 50.0):
        config = EngineConfig(max_batch_tokens=77, target_latency=target)
        for known in (None, saturating()):
            budget = plan_budget(config, known)
            assert (budget.tokens, budget.pending) == (77, False)
            assert "as asked" in budget.reason


def test_what_is_remembered_comes_before_the_default():
    known = saturating(base=200)
    assert plan_budget(EngineConfig(), known) == known.budget()
    assert plan_budget(EngineConfig(target_latency=210), known) == known.budget(210)
    unknown = plan_budget(EngineConfig(), None)
    assert (unknown.tokens, unknown.pending) == (DEFAULT_BUDGET, False)
    assert "not calibrated" in unknown.reason
    assert "fastgen calibrate MODEL" in unknown.reason


def test_a_target_without_a_curve_asks_for_one():
    budget = plan_budget(EngineConfig(target_latency=50), None)
    assert budget.pending
    assert "measured at start, for passes of 50 ms" in budget.reason


# ---- remembering ---------------------------------------------------------------------------------------------------


def test_what_was_remembered_is_found_again(cache):
    assert Calibration.remembered(SETTING) is None
    found = saturating()
    path = found.remember()
    assert path.parent == cache
    assert Calibration.remembered(SETTING) == found
    again = saturating(base=100)
    assert again.remember() == path
    assert Calibration.remembered(SETTING) == again
    assert [entry.name for entry in cache.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": "t"},
        {"dtype": "bfloat16"},
        {"device": "Another processor"},
        {"kernels": {"linear": "torch"}},
        {"threads": 1},
        {"adapters": True},
        {"fastgen": "0.2.0"},
        {"options": {"block_size": 16, "quantization": "int8"}},
    ],
    ids=str,
)
def test_another_setting_shares_nothing(changed):
    saturating().remember()
    assert Calibration.remembered(SETTING.model_copy(update=changed)) is None


def test_models_of_one_shape_share_a_curve():
    saturating().remember()
    assert Calibration.remembered(SETTING.model_copy(update={"model": "other"})) == saturating()


def _change(**fields):
    return lambda text: json.dumps({**json.loads(text), **fields})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: "\x00" + text,
        _change(format=1),
        _change(points=[]),
        _change(points=[{"tokens": 8, "seconds": -1, "passes": 3}]),
        _change(points=[{"tokens": 8, "seconds": 0, "passes": 3}]),
        _change(points=[{"tokens": 8, "seconds": 1e999, "passes": 3}]),
        _change(points=[{"tokens": 0, "seconds": 1, "passes": 3}]),
        _change(points=[{"tokens": 8, "seconds": 1, "passes": 3}, {"tokens": 4, "seconds": 1, "passes": 3}]),
        _change(surprise=1),
        _change(date="yesterday"),
        lambda text: " " * 2**21 + text,
        _change(setting=SETTING.model_copy(update={"threads": 64}).model_dump()),
    ],
)
def test_damaged_ones_are_left_unread_and_replaced(damage, caplog):
    path = saturating().remember()
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.DEBUG, "fastgen"):
        assert Calibration.remembered(SETTING) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    assert "\n" not in record.getMessage()
    saturating().remember()
    assert Calibration.remembered(SETTING) == saturating()


def test_one_that_may_not_be_read_is_named(cache, monkeypatch, caplog):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.Path, "is_file", refuse)
    assert Calibration.remembered(SETTING) is None
    assert f"{cache}" in caplog.text
    assert "Permission denied" in caplog.text


def test_a_cache_that_cannot_be_written_is_named(cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*FASTGEN_CACHE"):
        saturating().remember()
    assert Calibration.remembered(SETTING) is None


def test_a_write_that_fails_leaves_what_was_there(cache, monkeypatch):
    saturating().remember()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        saturating(base=100).remember()
    assert Calibration.remembered(SETTING) == saturating()
    assert len(list(cache.iterdir())) == 1
