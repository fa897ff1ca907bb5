"""The JSON of a benchmark: one layout, checked both ways; and the plots that are drawn from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread
from pydantic import ValidationError

from fastgen.bench import plots
from fastgen.bench.drive import Request, Timeline
from fastgen.bench.measures import Sla
from fastgen.bench.protocol import Pass, Run, Workload
from fastgen.bench.record import Record, SlaRecord, make_rows, read, write
from fastgen.bench.rounds import Result
from fastgen.errors import ConfigError

SLAS = [Sla(512, rate) for rate in (2, 4, 6)]


def run(gap: float) -> Run:
    """Two requests of three tokens, in four passes."""
    lines = [Timeline(at, [at + 0.1 + gap * token for token in range(3)], [5, 6, 7]) for at in (0.0, 0.5)]
    passes = [Pass(0.1 * number, 0.08, 6 - number, number, 2, 1) for number in range(4)]
    return Run(lines, passes, budget=8)


def result(engine: str, gap: float, *, clients: int | None = None, rate: float | None = None) -> Result:
    work = Workload("w", "The work", [Request([1] * 64, 3), Request([1] * 32, 3, group="b")], clients, rate)
    runs = [run(gap), run(2 * gap), run(gap)]
    return Result(work, engine, runs, [0.0, 0.5, 0.25], f"{engine}: a note", {"torch": "2"})


def record(results: Sequence[Result], *, timelines: bool = False, slas: Sequence[Sla] = SLAS) -> Record:
    return Record(
        command="serving",
        model="the-model",
        dtype="float32",
        device="cpu",
        seed=7,
        options={"max_batch_tokens": 8},
        machine={"processor": "A Processor", "cores": 2, "threads": 1},
        slas=[SlaRecord(prompt_rate=sla.prompt_rate, rate=sla.rate) for sla in slas],
        scaling="lengths x 0.1",
        rows=make_rows(results, slas, timelines=timelines),
    )


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    made, file = record([result("a", 0.1, clients=2), result("b", 0.3, clients=2)], timelines=True), tmp_path / "r.json"
    write(made, file)
    assert read(file) == made


def test_what_is_in_it() -> None:
    row = json.loads(record([result("a", 0.1, clients=2)]).model_dump_json())["rows"][0]
    assert row["workload"]["clients"] == 2
    assert (row["workload"]["prompt_tokens"], row["workload"]["output_tokens"]) == (96, 6)
    assert row["summary"]["gap_p50"] == pytest.approx({"median": 0.1, "low": 0.1, "high": 0.2})
    assert [one["other_cores"] for one in row["rounds"]] == [0.0, 0.5, 0.25]
    assert row["same_tokens"] == 2
    assert row["rounds"][0]["timelines"] is None
    assert row["rounds"][0]["passes"] is None, "passes are kept of the last round alone"
    assert row["rounds"][2]["passes"]["prompt"] == [6, 5, 4, 3]
    assert row["rounds"][2]["budget"] == 8
    assert set(row["rounds"][0]["figures"]) >= {"wall", "first_token_p95", "gap_p99", "sla_4_effective"}


def test_timelines_on_request() -> None:
    (first, second) = record([result("a", 0.1)], timelines=True).rows[0].rounds[0].timelines
    assert (first.prompt, first.times) == (64, [0.1, 0.2, 0.3])
    assert (second.sent, second.group) == (0.5, "b")


def test_every_field_is_in_the_schema_and_nothing_else_is_taken() -> None:
    schema = Record.model_json_schema()
    assert set(schema["required"]) == set(schema["properties"]) - {"format"}
    raw = json.loads(record([result("a", 0.1)]).model_dump_json())
    for part in (raw, raw["rows"][0], raw["rows"][0]["rounds"][0], raw["rows"][0]["workload"]):
        part["surprise"] = 1
        with pytest.raises(ValidationError, match="surprise"):
            Record.model_validate(raw)
        del part["surprise"]
    Record.model_validate(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "fastgen-bench/9"}, "format"),
        ({"command": None}, "command"),
        ({"rounds": 3}, "unknown field 'rounds'"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(json.loads(record([result("a", 0.1)]).model_dump_json()) | change))
    with pytest.raises(ConfigError, match=rf"is not a benchmark's fastgen-bench/1: .*{message}"):
        read(file)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.json"):
        read(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match=r"cannot write .*r\.json"):
        write(record([result("a", 0.1)]), tmp_path / "no" / "r.json")


def drawn(made: Record, path: Path) -> dict[str, str]:
    """The texts of each plot, by its name."""
    files = plots.draw(made, path)
    return {file.stem.removeprefix("out-"): " ".join(ElementTree.parse(file).getroot().itertext()) for file in files}


def test_plots_of_a_sweep(tmp_path: Path) -> None:
    results = [result(engine, gap, clients=count) for count in (1, 4, 16) for engine, gap in (("a", 0.1), ("b", 0.3))]
    texts = drawn(record(results), tmp_path / "out.svg")
    assert list(texts) == ["throughput-latency", "effective-throughput", "token-latency", "passes"]
    for text in texts.values():
        assert "the-model, float32; A Processor" in text
        assert "scaled: lengths x 0.1" in text
    for name in ("throughput-latency", "effective-throughput", "token-latency"):
        assert "clients" in texts[name]
        assert {"a", "b", "16"} <= set(texts[name].split())
    assert "tokens at 6/s" in texts["effective-throughput"]
    assert "P99" in texts["token-latency"]
    assert "budget, 8" in texts["passes"]
    assert "a: The work, 16 clients" in texts["passes"], "the heaviest load"
    assert "a: The work, 4 clients" not in texts["passes"]


def test_plots_of_one_load(tmp_path: Path) -> None:
    texts = drawn(record([result("a", 0.1, rate=2.0), result("b", 0.3, rate=2.0)]), tmp_path / "out.svg")
    assert list(texts) == ["effective-throughput", "token-latency", "passes"]
    assert "The work, 2 arrivals/s" in texts["token-latency"]
    assert "greatest" in texts["token-latency"]


def test_one_stream_of_several_workloads_is_no_curve(tmp_path: Path) -> None:
    one, other = result("a", 0.1, clients=1), result("a", 0.3, clients=1)
    other = Result(replace(other.workload, name="v", title="More work"), "a", other.runs, other.others)
    texts = drawn(record([one, other], slas=()), tmp_path / "out.svg")
    assert list(texts) == ["token-latency", "passes"]
    assert "The work, 1 client" in texts["token-latency"]
    assert "More work, 1 client" in texts["token-latency"]


def test_plots_without_service_level_or_passes(tmp_path: Path) -> None:
    bare = result("a", 0.1)
    bare.runs[:] = [Run(one.lines) for one in bare.runs]
    assert list(drawn(record([bare], slas=()), tmp_path / "out.svg")) == ["token-latency"]


def test_png(tmp_path: Path) -> None:
    for file in plots.draw(record([result("a", 0.1, clients=2)]), tmp_path / "out.png"):
        pixels = imread(file)
        assert min(pixels.shape[:2]) > 300
        assert pixels[..., :3].std() > 0.05, "an empty picture"


def test_bad_endings() -> None:
    with pytest.raises(ConfigError, match=r"cannot draw to out\.gif: the file must end in \.png or \.svg"):
        plots.check(Path("out.gif"))


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[bench\]'"):
        plots.check(Path("out.png"))


def test_a_plot_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*token-latency\.png"):
        plots.draw(record([result("a", 0.1)], slas=()), tmp_path / "no" / "out.png")
