"""`fastgen calibrate`: measures, shows, remembers; engines and `explain` take it from there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from fastgen.cli import main
from fastgen.core import calibration
from fastgen.core.calibration import SMALLEST_BUDGET
from fastgen.core.engine import Engine


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "calibration"


def invoke(command: str, *arguments: str):
    return CliRunner().invoke(main, [command, *arguments, "--device", "cpu"])


def budget_in(model: str, *options: str) -> str:
    shown = invoke("explain", model, "--json", *options)
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)["passes"]["token_budget"]


def test_from_a_curve_to_an_engine(tiny, tmp_path, cache):
    assert budget_in(tiny) == "512 (default: not calibrated; fastgen calibrate MODEL)"
    file, plot = tmp_path / "curve.json", tmp_path / "curve.svg"
    shown = invoke("calibrate", tiny, "--num-blocks", "40", "--json", str(file), "--plot", str(plot))
    assert shown.exit_code == 0, shown.output

    facts = json.loads(file.read_text())
    points = facts["calibration"]["points"]
    table = re.findall(r"^ *(\d+) +([\d.,]+) +([\d,]+) +(\d+) %$", shown.stdout, re.MULTILINE)
    assert [int(row[0]) for row in table] == [point["tokens"] for point in points]
    for row, point in zip(table, points, strict=True):
        assert float(row[1].replace(",", "")) == pytest.approx(1000 * point["seconds"], rel=0.06)
        assert float(row[2].replace(",", "")) == pytest.approx(point["tokens"] / point["seconds"], rel=0.01, abs=1)
        assert int(row[3]) <= 100
    assert f"Token budget: {facts['budget']} (calibrated 20" in shown.stdout
    assert "TOKENS  MS A PASS  TOKENS/S  OF THE BEST" in shown.stdout
    (kept,) = cache.iterdir()
    assert f"Remembered in {kept}." in shown.stdout
    assert json.loads(kept.read_text()) == facts["calibration"]
    text = plot.read_text()
    assert "tokens in a pass" in text
    assert f"budget, {facts['budget']}" in text

    assert budget_in(tiny) == f"{facts['budget']} ({facts['reason']})"
    assert budget_in(tiny, "--target-latency", "0.000001").startswith(f"{SMALLEST_BUDGET} (calibrated")
    assert budget_in(tiny, "--max-batch-tokens", "33") == "33 (max_batch_tokens as asked)"
    assert "not calibrated" in budget_in(tiny, "--dtype", "bfloat16")
    with Engine.load(tiny, device="cpu", num_blocks=40) as engine:
        assert engine.max_batch_tokens == engine.scheduler.max_batch_tokens == facts["budget"]


def test_a_target_is_read_off_the_curve(tiny, tmp_path):
    file = tmp_path / "curve.json"
    shown = invoke("calibrate", tiny, "--num-blocks", "20", "--target-latency", "0.000001", "--json", str(file))
    assert shown.exit_code == 0, shown.output
    assert f"Token budget: {SMALLEST_BUDGET} (calibrated" in shown.stdout
    assert "1e-06 ms cannot be kept" in shown.stdout
    facts = json.loads(file.read_text())
    assert (facts["budget"], facts["target_latency"]) == (SMALLEST_BUDGET, 1e-6)
    assert "chosen at start (not calibrated" in budget_in(tiny, "--threads", "7", "--target-latency", "5")


def test_an_explicit_number_is_said_to_win(tiny):
    shown = invoke("calibrate", tiny, "--num-blocks", "4", "--max-batch-tokens", "7")
    assert shown.exit_code == 0, shown.output
    assert "max_batch_tokens is set to 7" in shown.stdout
    assert budget_in(tiny, "--max-batch-tokens", "7").startswith("7 ")


def test_a_busy_machine_is_said(tiny, monkeypatch):
    for busy in (0.0, 1.25):
        monkeypatch.setattr("fastgen.bench.machine.Meter.read", lambda _, busy=busy: busy)
        shown = invoke("calibrate", tiny, "--num-blocks", "4")
        assert ("Other processes kept 1.25 cores busy" in shown.stdout) == (busy > 1)


def test_a_cache_that_cannot_be_written_is_a_warning(tiny, cache):
    cache.parent.write_text("a file where the folder should be")
    shown = invoke("calibrate", tiny, "--num-blocks", "4")
    assert shown.exit_code == 0, shown.output
    assert "Token budget: " in shown.stdout
    assert shown.stderr.startswith("warning: the calibration cannot be kept in ")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--target-latency", "0"), 2, "target_latency: "),
        (("--target-latency", "-3"), 2, "target_latency: "),
        (("--target-latency", "nan"), 2, "target_latency: "),
        (("--target-latency", "inf"), 2, "target_latency: "),
        (("--target-latency", "soon"), 2, "not a valid float"),
        (("--plot", "curve.pdf"), 1, "must end in .png or .svg"),
        (("--plot", "/no/such/folder/curve.png"), 1, "the folder /no/such/folder does not exist"),
        (("--json", "/no/such/folder/curve.json"), 1, "the folder /no/such/folder does not exist"),
    ],
)
def test_bad_arguments_are_refused_before_anything_loads(tiny, monkeypatch, arguments, code, message):
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("loaded"))
    shown = invoke("calibrate", tiny, *arguments)
    assert shown.exit_code == code
    assert message in shown.stderr


def test_a_model_that_is_not_there(tmp_path):
    shown = invoke("calibrate", str(tmp_path / "missing"))
    assert (shown.exit_code, shown.stderr.count("\n")) == (1, 1)


def test_a_result_that_cannot_be_written_is_named(tiny, tmp_path):
    folder = tmp_path / "readonly.json"
    folder.symlink_to(Path("/dev/full"))
    shown = invoke("calibrate", tiny, "--num-blocks", "4", "--json", str(folder))
    assert shown.exit_code == 1
    assert "No space left on device" in shown.stderr
