"""The commands: a real run of each on a tiny model, and bad arguments refused before anything loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from click.testing import Result as CliResult

from fastgen.bench.cli import bench
from fastgen.bench.protocol import Workload
from fastgen.bench.record import Record, read
from fastgen.bench.rows import select_rows, words
from fastgen.errors import ConfigError


def run_cli(*arguments: str | Path) -> CliResult:
    return CliRunner(env={"COLUMNS": "160"}).invoke(bench, list(map(str, arguments)))


def run_json(folder: Path, *arguments: str | Path) -> tuple[str, Record]:
    out = folder / "out.json"
    result = run_cli(*arguments, "--threads", "1", "--json", out)
    assert result.exit_code == 0, result.output or result.exception
    return " ".join(result.output.split()), read(out)


@pytest.fixture
def file(tmp_path: Path, eighteen: Workload) -> Path:
    path = tmp_path / "mine.json"
    requests = [{"prompt": r.prompt, "out": max(r.out, 3)} for r in eighteen.requests[:3]]
    path.write_text(json.dumps({"name": "Three", "requests": requests}))
    return path


@pytest.mark.slow
def test_offline(tiny: Path, tmp_path: Path, file: Path) -> None:
    text, record = run_json(tmp_path, "offline", tiny, "--workload", file, "--rounds", "2", "-o", "max_batch_tokens=32")
    assert "Three: 3 requests" in text
    assert "times as fast as transformers; same tokens in 3 of 3 requests" in text
    assert "1 thread." in text
    assert [row.engine for row in record.rows] == ["fastgen", "transformers"]
    assert [len(row.rounds) for row in record.rows] == [2, 2]
    assert record.options == {"max_batch_tokens": 32}
    assert record.machine["threads"] == 1
    assert record.slas == []


@pytest.mark.slow
def test_latency(tiny: Path, tmp_path: Path, file: Path) -> None:
    text, record = run_json(tmp_path, "latency", tiny, "--workload", file, "--rounds", "1", "--timelines")
    assert "first token s" in text
    for row in record.rows:
        assert row.workload.clients == 1
        lines = row.rounds[0].timelines
        assert lines is not None
        assert all(a.times[-1] <= b.sent for a, b in pairwise(lines))
        assert {"gap_p50", "gap_p99", "gap_max", "first_token_p50"} <= set(row.summary)


@pytest.mark.slow
def test_serving_compares_policies_and_draws(tiny: Path, tmp_path: Path) -> None:
    text, record = run_json(
        tmp_path,
        *("serving", tiny, "--workload", "fastgen-1200-60", "--scale", "0.1", "--requests", "12", "--clients", "4"),
        *("--policy", "splitfuse,prefill-first,whole-prompt", "-o", "max_batch_tokens=64", "--rounds", "1"),
        *("--seed", "5", "--sla-scale", "2", "--plot", tmp_path / "out.png"),
    )
    names = [f"fastgen ({policy})" for policy in ("splitfuse", "prefill-first", "whole-prompt")]
    assert [row.engine for row in record.rows] == names
    assert [row.same_tokens for row in record.rows] == [12, 12, 12]
    assert record.scaling == "lengths x 0.1, 12 of 512 requests, SLA rates x 2"
    assert f"Not DeepSpeed-FastGen's own setting: {record.scaling}." in text
    assert [(sla.prompt_rate, sla.rate) for sla in record.slas] == [(1024, 4), (1024, 8), (1024, 12)]
    assert (record.seed, record.rows[0].workload.about["seed"]) == (5, 5)
    splitfuse, prefill, whole = (row.rounds[0].passes for row in record.rows)
    assert max(a + b for a, b in zip(splitfuse.prompt, splitfuse.decode, strict=True)) == 64
    assert not any(a and b for a, b in zip(prefill.prompt, prefill.decode, strict=True)), "prompts before answers"
    assert any(a and b for a, b in zip(whole.prompt, whole.decode, strict=True))
    assert max(whole.prompt) > 64, "prompts are not cut"
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "out-effective-throughput.png",
        "out-token-latency.png",
        "out-passes.png",
    }


@pytest.mark.slow
def test_serving_by_the_workload_s_own_rule(tiny: Path, tmp_path: Path) -> None:
    requests = [{"prompt": [5, 6, 7], "out": 9, "group": "streams"} for _ in range(2)]
    requests.append({"prompt": [8] * 40, "out": 1, "group": "long", "after": [[0, 3], [1, 3]]})
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "Mine", "requests": requests}))
    text, record = run_json(tmp_path, "serving", tiny, "--workload", file, "--rounds", "1", "--timelines")
    assert "while the long prompts are read" in text
    assert {"reading_gap_p50", "long_first_token_p50"} <= set(record.rows[0].summary)
    one, other, long = record.rows[0].rounds[0].timelines
    assert long.sent == max(one.times[2], other.times[2])


@pytest.mark.slow
@pytest.mark.parametrize(("option", "loads"), [("--clients", [1, 4]), ("--rates", [50, 200])])
def test_sweep(tiny: Path, tmp_path: Path, file: Path, option: str, loads: list[int]) -> None:
    series = ",".join(map(str, loads))
    text, record = run_json(
        tmp_path, "sweep", tiny, "--workload", file, option, series, "--rounds", "2", "--plot", tmp_path / "out.svg"
    )
    assert "mean latency s" in text
    assert [row.workload.clients or row.workload.rate for row in record.rows] == loads
    assert (tmp_path / "out-throughput-latency.svg").is_file()
    again = run_cli("plot", tmp_path / "out.json", tmp_path / "again.png")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again-throughput-latency.png").is_file()


def test_a_server_alone(tiny: Path, tmp_path: Path, serve: Callable[..., Any]) -> None:
    """Nothing is loaded here but the config, which says what token ids to draw from."""

    def stream(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number in range(body["max_tokens"]):
            yield {"choices": [{"text": "a", "token_ids": [number], "finish_reason": None}]}

    server, folder = serve(stream), tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny / name).read_bytes() if name == "config.json" else b"not weights")
    text, record = run_json(
        tmp_path,
        *("serving", folder, "--url", f"mine={server.url}", "--rate", "500", "--rounds", "1"),
        *("--workload", "fastgen-20-5", "--requests", "9"),
    )
    (row,) = record.rows
    assert (row.engine, row.workload.rate, row.workload.requests) == ("mine", 500.0, 9)
    assert row.same_tokens == 9
    assert server.url in row.note
    assert "effective throughput" in text
    assert len(server.bodies) == 11  # two to warm up


@pytest.mark.parametrize("command", ["offline", "latency", "serving", "sweep"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "w7"), "no workload 'w7'"),
        (("--engines", "fastgen,vlm"), "unknown engine 'vlm'"),
        (("--engines", ","), "no engine to run"),
        (
            ("--policy", "splitfuze"),
            "unknown policy 'splitfuze': choose from splitfuse, prefill-first, whole-prompt. Did you mean 'splitfuse'",
        ),
        (("--engines", "transformers", "--policy", "splitfuse"), "--policy splitfuse is fastgen's"),
        (("--url", "localhost:1"), "--url localhost:1: give a server's address"),
        (("-o", "max_batch_token=1"), "unknown engine option 'max_batch_token'. Did you mean 'max_batch_tokens'"),
        (("-o", "max_batch_tokens"), "write NAME=VALUE"),
        (("-o", "threads=2"), "use --threads"),
        (("--json", "no/such/out.json"), "the folder no/such does not exist"),
        (("--plot", "no/such/out.png"), "the folder no/such does not exist"),
        (("--plot", "out.pdf"), "must end in .png or .svg"),
        (("--workload", "fastgen-1200-60", "--scale", "0.001"), "use a greater --scale"),
        (("--workload", "w1", "--scale", "2"), "--scale is for workloads fastgen-PROMPT-OUTPUT, not for w1"),
    ],
)
def test_bad_arguments_are_refused_before_anything_loads(
    command: str, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        raise_error(run_cli(command, "no-such-model", *arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serving", "--clients", "2", "--rate", "1"), "give --clients or --rate, not both"),
        (("serving", "--rate", "-1"), "--rate -1 must be above 0"),
        (("serving", "--clients", "2", "--sla-rates", "2,x"), "--sla-rates 2,x: give numbers above 0"),
        (("serving", "--clients", "2", "--sla-scale", "0"), "must be above 0"),
        (("serving", "--clients", "2", "--engines", "transformers"), "takes no requests in while others run"),
        (("sweep", "--clients", "1", "--rates", "1"), "give --clients or --rates, not both"),
        (("sweep", "--clients", "1,1.5"), "--clients 1,1.5: give whole numbers"),
        (("sweep", "--clients", "0"), "give numbers above 0"),
        (("sweep", "--rates", ""), "give numbers above 0"),
    ],
)
def test_bad_loads(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raise_error(run_cli(*arguments, "no-such-model"))


def test_a_workload_that_does_not_say_when(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"w2 does not say when requests arrive: give --clients or --rate"):
        raise_error(run_cli("serving", tiny, "--workload", "w2"))
    with pytest.raises(ConfigError, match=r"--clients 4: the workload w3 says itself when its requests arrive"):
        raise_error(run_cli("serving", tiny, "--workload", "w3", "--clients", "4"))


def raise_error(result: CliResult) -> None:
    assert result.exception is not None, result.output
    raise result.exception


def test_rows() -> None:
    rows = select_rows(
        ["transformers", "fastgen"], policies=["whole-prompt", "splitfuse"], urls=["http://a:1/v1", "b=http://a:1/v1"]
    )
    assert list(rows) == ["transformers", "fastgen (whole-prompt)", "fastgen (splitfuse)", "a:1", "b"]
    with pytest.raises(ConfigError, match="there is a row 'b' already"):
        select_rows([], urls=["b=http://a:1/v1", "b=http://a:2/v1"])


def test_peers_are_rows() -> None:
    peer = select_rows(["vllm"], peers={"vllm": lambda _: None})
    assert list(peer) == ["vllm"]
    with pytest.raises(ConfigError, match=r"choose from fastgen, transformers, vllm-w8a8\..*Did you mean 'vllm-w8a8'"):
        select_rows(["vllm-w8a"], peers={"vllm-w8a8": lambda _: None})


def test_words() -> None:
    assert words(" a,b ,,a") == ["a", "b"]
