"""The plot of a calibration."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from fastgen.bench.curve import draw_curve
from fastgen.core.calibration import Calibration, Point, Setting
from fastgen.errors import ConfigError


@pytest.fixture
def found() -> Calibration:
    setting = Setting(
        model="mine",
        shape="s",
        dtype="bfloat16",
        device="CPU",
        kernels={},
        threads=2,
        options={},
        adapters=False,
        fastgen="1",
    )
    points = tuple(Point(tokens=2**i, seconds=max(0.02, 2**i / 1000), passes=3) for i in range(9))
    date = datetime(2026, 5, 17, tzinfo=UTC)
    return Calibration(date=date, setting=setting, context=0, complete=True, points=points)


def test_what_it_shows(found, tmp_path):
    draw_curve(found, found.budget(), tmp_path / "curve.svg")
    text = (tmp_path / "curve.svg").read_text()
    for piece in ("tokens/s", "milliseconds", "budget, 64", "mine, bfloat16; CPU, threads: 2", "reach 100 % of 1,000"):
        assert piece in text


def test_png(found, tmp_path):
    draw_curve(found, found.budget(), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_named(found, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*missing"):
        draw_curve(found, found.budget(), tmp_path / "missing" / "curve.png")
