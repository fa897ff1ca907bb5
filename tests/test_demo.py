"""`examples/demo.py`, the script behind `make demo`, on a tiny chat model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastgen.testing.checkpoints import tiny_llama

pytestmark = pytest.mark.slow


def run_demo(repository: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "examples" / "demo.py"), *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONUTF8": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def output(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    result = run_demo(repository, model)
    assert result.returncode == 0, result.stderr
    return result.stdout


def number(output: str, label: str) -> float:
    (found,) = re.findall(rf"│ {re.escape(label)}[^│]*│ +([\d,.]+) │", output)
    return float(found.replace(",", ""))


def test_sixteen_answers_of_prompts_of_many_lengths(output: str) -> None:
    rows = [tuple(map(int, row)) for row in re.findall(r"^│ +(\d+) │ +(\d+) │ +(\d+) │", output, re.MULTILINE)]
    assert len(rows) == 16
    assert len({tokens_in for tokens_in, _, _ in rows}) > 8
    assert sum(tokens_in for tokens_in, _, _ in rows) == number(output, "tokens in")
    assert sum(cached for _, cached, _ in rows) == number(output, "of them found in the prefix cache") > 0
    assert sum(tokens_out for _, _, tokens_out in rows) == number(output, "tokens out")


def test_numbers_fit_each_other(output: str) -> None:
    computed = number(output, "tokens per pass") * number(output, "passes")
    # Every token was run once, but for those found in the cache and the last one of each answer.
    expected = number(output, "tokens in") - number(output, "of them found") + number(output, "tokens out") - 16
    assert computed == pytest.approx(expected, rel=0.02)
    assert number(output, "cache blocks in use at most") > 0


def test_no_such_model_is_one_line(repository: Path) -> None:
    result = run_demo(repository, "./no-such-model")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
