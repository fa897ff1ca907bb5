"""docs/Performance.md says what the code does: its commands parse, its fields and workloads are those there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from fastgen.bench import measures, synthetic
from fastgen.bench.cli import bench
from fastgen.bench.engines import POLICIES
from fastgen.bench.record import Record, Round, Row, WorkloadRecord
from fastgen.bench.workloads import BUILT_IN
from fastgen.cli import main
from fastgen.core import calibration, measuring


@pytest.fixture(scope="module")
def text() -> str:
    return (Path(__file__).parents[2] / "docs" / "Performance.md").read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"^\$ fastgen bench (.*)$", joined, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_every_command_parses(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("peers").mkdir()
    for file in ("out.json", "peers.toml", "peers/peers.toml"):  # the reader's own
        Path(file).touch()
    found = commands(text)
    assert {words[0] for words in found} == set(bench.commands)
    for name, *arguments in found:
        bench.commands[name].make_context(name, arguments)


def test_commands_beside_the_benchmarks_parse(text: str) -> None:
    lines = re.findall(r"^\$ fastgen (calibrate|explain) (.*)$", text, re.MULTILINE)
    assert {name for name, _ in lines} == {"calibrate", "explain"}
    for name, arguments in lines:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        command.make_context(name, shlex.split(arguments, comments=True))


def test_a_misspelt_option_would_be_noticed() -> None:
    with pytest.raises(click.NoSuchOption):
        bench.commands["serving"].make_context("serving", ["MODEL", "--client", "8"])


def test_every_field_of_the_json_is_named(text: str) -> None:
    section = text.partition("## The JSON")[2]
    named = set(re.findall(r"`([a-z_]+)`", section))
    parts = {name for part in (Record, Row, Round, WorkloadRecord) for name in part.model_fields}
    assert parts - named <= {"format", "rows", "workload"}, "named by their place"


def test_constants(text: str) -> None:
    assert f"span {measures.EMA_SPAN}" in text
    assert f"{synthetic.FASTGEN_REQUESTS} requests" in text
    assert f"cut at {synthetic.LONGEST_PROMPT:,} tokens" in text
    assert f"*prompt tokens / {measures.Sla().prompt_rate:g}* seconds" in text
    assert f"reaches {calibration.SATURATED:.0%}".replace("%", " %") in text
    assert f"where even {calibration.SMALLEST_BUDGET} tokens take longer, it is {calibration.SMALLEST_BUDGET}" in text
    assert f"it is never less than {calibration.SMALLEST_UNASKED};" in text
    assert f"that it is flat, it is {calibration.DEFAULT_BUDGET} or the last size" in text
    assert f"after {measuring.CONTEXT} others" in text
    assert f"at {calibration.LARGEST_BUDGET:,} tokens" in text
    assert f"some {measuring.SECONDS:.0f} seconds" in text
    assert f"up to {measuring.SECONDS_AT_START:.0f} seconds more" in text
    for name in (*BUILT_IN, *POLICIES):
        assert f"`{name}`" in text
    for share in measures.PERCENTILES:
        assert f"`p{share}`" in text
