"""`fastgen bench offline`: the same work for every engine, turn and turn about, and honest arithmetic."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from click.testing import Result as CliResult
from transformers import AutoModelForCausalLM

from fastgen.bench import offline
from fastgen.bench.cli import bench
from fastgen.bench.engines import FastgenEngine, Run, Settings, Tick, TransformersEngine
from fastgen.bench.workloads import Request, Workload
from fastgen.errors import ConfigError, InvalidRequestError
from fastgen.testing.checkpoints import tiny_llama

pytestmark = pytest.mark.slow


END = 8  # the tiny model's end-of-sequence id: one that greedy answers hold


def make_workload(count: int = 18) -> Workload:
    """More requests than one padded group holds, of different lengths."""
    draw = random.Random(0)
    requests = [
        Request([draw.randrange(3, 64) for _ in range(draw.randrange(1, 40))], draw.randrange(1, 12))
        for _ in range(count)
    ]
    return Workload("mine", "Mine", requests)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False, eos_token_id=END)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    """Every request alone, by the argmax of transformers' logits: no padding, no cache, no generate."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    answers = []
    for request in make_workload().requests:
        ids = list(request.prompt)
        for _ in range(request.out):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(request.prompt) :])
    return answers


@pytest.mark.parametrize("engine_class", [FastgenEngine, TransformersEngine])
def test_engine_does_exactly_the_work(
    tiny: Path, expected: list[list[int]], engine_class: type[FastgenEngine] | type[TransformersEngine]
) -> None:
    work, ticks = make_workload(), []
    engine = engine_class(Settings(tiny, threads=1))
    first, second = engine.run(work, ticks.append), engine.run(work, lambda _: None)
    engine.close()
    assert first.tokens == second.tokens == expected
    assert sum(ticks) == work.output_tokens
    assert 0 < first.first_token <= first.wall


def test_end_tokens_are_among_the_expected(expected: list[list[int]]) -> None:
    """Else the test above would not show that end tokens are ignored."""
    assert any(END in answer[:-1] for answer in expected)


def test_no_run_finds_another_s_prefixes(tiny: Path) -> None:
    prompt = list(range(3, 60)) * 2
    work = Workload("one", "One", [Request(prompt, 2)])
    engine = FastgenEngine(Settings(tiny, threads=1))
    for _ in range(2):
        engine.run(work, lambda _: None)
    assert engine._engine.stats().prefix_hit_tokens == 0
    engine.close()


class Turn:
    """An engine that only says when it ran."""

    log: list[str]
    name = "turn"
    note = "a note"
    wall = 1.0

    def __init__(self, settings: Settings) -> None:
        self.log.append(f"{self.name} load")

    def run(self, workload: Workload, tick: Tick) -> Run:
        self.log.append(f"{self.name} {len(workload.requests)}")
        tick(workload.output_tokens)
        return Run(self.wall, self.wall / 2, [[1]] * len(workload.requests))

    def close(self) -> None:
        self.log.append(f"{self.name} close")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    quick = type("Quick", (Turn,), {"name": "fastgen", "log": log, "wall": 1.0})
    slow = type("Slow", (Turn,), {"name": "transformers", "log": log, "wall": 3.0})
    monkeypatch.setattr(offline, "gc", SimpleNamespace(collect=int))
    monkeypatch.setattr(offline, "ENGINES", {"fastgen": quick, "transformers": slow})
    return log


def test_engines_take_turns_after_a_warm_up(turns: list[str]) -> None:
    offline.compare([make_workload(5)], ["fastgen", "transformers"], Settings(Path()), rounds=2)
    assert turns == [
        *("fastgen load", "transformers load"),
        *("fastgen 2", "transformers 2"),
        *("fastgen 5", "transformers 5") * 2,
        *("fastgen close", "transformers close"),
    ]


def test_engines_are_closed_when_one_fails(turns: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline.ENGINES["transformers"], "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        offline.compare([make_workload(5)], ["fastgen", "transformers"], Settings(Path()))
    assert turns[-2:] == ["fastgen close", "transformers close"]


def test_progress_adds_up(turns: list[str]) -> None:
    seen: list[tuple[str, str, int]] = []
    ticked: list[int] = []

    def watch(*run: object) -> Tick:
        seen.append(run)
        return ticked.append

    work = make_workload(5)
    offline.compare([work], ["fastgen"], Settings(Path()), rounds=2, watch=watch)
    assert seen == [("mine", "fastgen", 1), ("mine", "fastgen", 2)]
    assert sum(ticked) == 2 * work.output_tokens


def test_arithmetic() -> None:
    work = Workload("w", "W", [Request([1, 2, 3], 4), Request([1], 6)])
    one = offline.Result(work, "a", [Run(wall, 0.5, [[1, 2], [3]]) for wall in (2.0, 1.0, 4.0)])
    other = offline.Result(work, "b", [Run(wall, 0.5, [[1, 2], [4]]) for wall in (4.0, 4.0, 4.0)])
    assert one.wall == offline.Spread(2.0, 1.0, 4.0)
    assert one.output_rate == offline.Spread(5.0, 2.5, 10.0)
    assert one.total_rate == offline.Spread(7.0, 3.5, 14.0)
    assert offline.ratios(one, other) == offline.Spread(2.0, 1.0, 4.0)
    assert offline.same_tokens(one, other) == 1


def test_unknown_engine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown engine 'fastgem'.*Did you mean 'fastgen'"):
        offline.select_engines(["transformers", "fastgem"])


def test_a_prompt_beyond_the_vocabulary_is_refused(tiny: Path) -> None:
    engine = FastgenEngine(Settings(tiny, threads=1))
    with pytest.raises(InvalidRequestError, match="40000"):
        engine.run(Workload("w", "W", [Request([40000], 1)]), lambda _: None)
    engine.close()


def run_cli(*arguments: str | Path) -> CliResult:
    return CliRunner(env={"COLUMNS": "160"}).invoke(bench, ["offline", *map(str, arguments)])


def test_command_prints_a_table_and_writes_json(tiny: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "mine.json", tmp_path / "out.json"
    requests = [{"prompt": r.prompt, "out": r.out} for r in make_workload(3).requests]
    file.write_text(json.dumps({"name": "Three", "requests": requests}))
    options = ("--rounds", "2", "--threads", "1", "-o", "max_batch_tokens=32", "--json", out)
    result = run_cli(tiny, "--workload", file, *options)
    assert result.exit_code == 0, result.output
    assert "Three: 3 requests" in result.output
    assert "times as fast as transformers; same tokens in 3 of 3 requests" in result.output.replace("\n", " ")
    assert "1 threads" in result.output
    record = json.loads(out.read_text())
    assert [row["engine"] for row in record["results"]] == ["fastgen", "transformers"]
    assert all(len(row["wall_s"]) == 2 for row in record["results"])
    assert record["options"] == {"max_batch_tokens": 32}
    assert record["machine"]["threads"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "w7"), "no workload 'w7'"),
        (("--engines", "fastgen,vlm"), "unknown engine 'vlm'"),
        (("--engines", ","), "no engine to run"),
        (("-o", "max_batch_token=1"), "unknown engine option 'max_batch_token'. Did you mean 'max_batch_tokens'"),
        (("-o", "max_batch_tokens"), "write NAME=VALUE"),
        (("-o", "threads=2"), "use --threads"),
        (("--json", "no/such/out.json"), "the folder no/such does not exist"),
    ],
)
def test_bad_arguments_are_refused_before_anything_loads(arguments: tuple[str, ...], message: str) -> None:
    result = run_cli("no-such-model", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
