"""`fastgen explain` says what would happen, and does none of it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fastgen.cli import main
from fastgen.testing.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(tiny_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False))


def explain(*arguments: str):
    return CliRunner().invoke(main, ["explain", *arguments])


def test_text(directory):
    shown = explain(directory, "--num-blocks", "7", "--dtype", "bfloat16")
    assert shown.exit_code == 0
    for piece in ("LlamaForCausalLM", "llama (fastgen", "kv heads", "bfloat16 (as asked)", "7 blocks", "112"):
        assert piece in shown.stdout
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert any(row[:1] == ["paged_attention"] and "cpu" in row for row in rows)


def test_json(directory):
    facts = json.loads(explain(directory, "--json", "--num-blocks", "7").stdout)
    assert facts["geometry"]["layers"] == 2
    assert facts["memory"]["tokens_that_fit"] == 7 * 16
    assert {kernel["operation"] for kernel in facts["kernels"]} >= {"linear", "paged_attention", "rotary", "argmax"}


def test_a19_the_models_own_defaults_are_reported(tmp_path):
    directory = tiny_llama(tmp_path, tokenizer=False)
    assert "sampling defaults" not in explain(str(directory)).stdout
    (directory / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "eos_token_id": [2, 5]}')
    facts = json.loads(explain(str(directory), "--json").stdout)
    assert facts["sampling defaults (generation_config.json)"]["temperature"] == 0.6


def test_how_many_sequences_run_at_once(directory):
    def sequences(*options: str) -> str:
        return json.loads(explain(directory, "--json", *options).stdout)["passes"]["sequences"]

    assert sequences("--max-batch-tokens", "200") == "128 at once"
    assert sequences("--max-batch-tokens", "20") == "20 at once (max_sequences 128, cut to the tokens of a pass)"
    assert sequences("--max-batch-tokens", "20", "--policy", "whole-prompt") == "128 at once"
    assert sequences("--target-latency", "5", "--threads", "77") == "128 at once, or as many as a pass has tokens"


def test_it_reads_no_weights(directory, monkeypatch):
    from fastgen.core.checkpoint import Checkpoint

    monkeypatch.setattr(Checkpoint, "stream", lambda *_: pytest.fail("read weights"))
    assert explain(directory).exit_code == 0


def test_errors_are_one_line(tmp_path):
    shown = explain(str(tmp_path))
    assert (shown.exit_code, shown.stderr.count("\n")) == (1, 1)
    assert shown.stderr.startswith("error: ")


def test_help_says_what_becomes_of_the_weights():
    assert "Weights are fetched if they are not here, and not read." in " ".join(explain("--help").stdout.split())
