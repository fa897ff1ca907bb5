"""`fastgen generate` on a tiny model: the pipeline is the oracle for every form of prompt and output."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastgen import Pipeline, pipeline
from fastgen.cli import main
from fastgen.cli.answers import json_line
from fastgen.cli.prompts import Job
from fastgen.testing.checkpoints import tiny_llama
from fastgen.types import Completion, Response, SamplingParams, TokenLogprob, Usage

SHORT = ["--max-new-tokens", "6", "--num-blocks", "200"]


@pytest.fixture(scope="module")
def pipe(tiny: str) -> Iterator[Pipeline]:
    with pipeline(tiny, num_blocks=200) as pipe:
        yield pipe


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", *arguments], input=stdin)


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line, parse_constant=pytest.fail) for line in result.stdout.splitlines()]


def write(path: Path, name: str, *lines: object) -> str:
    file = path / name
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(file)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    bare = str(tiny_llama(tmp_path / "bare", tokenizer=False))
    result = run(bare, "Hello", *SHORT)
    assert result.exit_code == 1
    assert "no tokenizer, so it cannot read text: give token ids, by --file PROMPTS.jsonl" in result.stderr
    (line,) = re.findall(r"\{.*?\}", result.stderr)
    file = write(tmp_path, "p.jsonl", line)
    (row,) = rows(run(bare, "--file", file, "--json", *SHORT))
    assert len(row["choices"][0]["token_ids"]) == 6
    mixed = write(tmp_path, "m.jsonl", line, {"prompt": "Hello"})
    assert "m.jsonl, line 2: this model has no tokenizer" in run(bare, "--file", mixed, *SHORT).stderr


# ---- prompts -------------------------------------------------------------------------------------------------------


def test_one_prompt_prints_its_text(tiny: str, pipe: Pipeline) -> None:
    result = run(tiny, "Hello", *SHORT)
    assert (result.exit_code, result.stdout) == (0, pipe("Hello", max_new_tokens=6).text + "\n")


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_standard_input_is_the_prompt(tiny: str, pipe: Pipeline, arguments: list[str]) -> None:
    result = run(tiny, *arguments, *SHORT, stdin="Two\nlines\n")
    assert result.stdout == pipe("Two\nlines", max_new_tokens=6).text + "\n"


def test_several_prompts_come_in_their_order_under_headings(tiny: str, pipe: Pipeline) -> None:
    prompts = ["a", "a much longer prompt " * 6, "c"]
    shown = run(tiny, *prompts, *SHORT).stdout
    one, two, three = (response.text for response in pipe(prompts, max_new_tokens=6))
    heading = ("a much longer prompt " * 6)[:67] + "..."
    assert shown == f"--- 1/3: a\n{one}\n--- 2/3: {heading}\n{two}\n--- 3/3: c\n{three}\n"


def test_text_file(tiny: str, pipe: Pipeline, tmp_path: Path) -> None:
    file = write(tmp_path, "p.txt", "one", "", "two")
    answers = [row["choices"][0]["text"] for row in rows(run(tiny, "--file", file, "--json", *SHORT))]
    assert answers == [response.text for response in pipe(["one", "two"], max_new_tokens=6)]


def test_json_lines_in_all_forms_with_their_own_sampling(tiny: str, pipe: Pipeline, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    file = write(
        tmp_path,
        "p.jsonl",
        {"prompt": "one", "max_new_tokens": 3},
        {"prompt_token_ids": [104, 105]},
        {"messages": messages, "temperature": 1.0, "seed": 5},
    )
    one, two, three = rows(run(tiny, "--file", file, "--json", *SHORT))
    expected = [
        pipe("one", max_new_tokens=3),
        pipe(prompt_token_ids=[104, 105], max_new_tokens=6),
        pipe.chat(messages, max_new_tokens=6, temperature=1.0, seed=5),
    ]
    assert [r["choices"][0]["token_ids"] for r in (one, two, three)] == [e.token_ids for e in expected]
    assert [r["choices"][0]["text"] for r in (one, two, three)] == [e.text for e in expected]
    assert (one["prompt"], two["prompt_token_ids"], three["messages"]) == ("one", [104, 105], messages)


def test_chat_wraps_each_prompt(tiny: str, pipe: Pipeline) -> None:
    expected = pipe.chat([{"role": "user", "content": "hi"}], max_new_tokens=6).text
    assert run(tiny, "hi", "--chat", *SHORT).stdout == expected + "\n"
    assert expected != pipe("hi", max_new_tokens=6).text


# ---- output --------------------------------------------------------------------------------------------------------


def test_json_holds_the_whole_response(tiny: str, pipe: Pipeline) -> None:
    flags = ["--n", "2", "--temperature", "1", "--seed", "3", "--logprobs", "2", "--prompt-logprobs", "0"]
    (row,) = rows(run(tiny, "Hello", "--json", *flags, *SHORT))
    assert list(row) == ["index", "prompt", "choices", "usage", "prompt_logprobs"]
    assert [choice["index"] for choice in row["choices"]] == [0, 1]
    assert row["choices"][0]["token_ids"] != row["choices"][1]["token_ids"]
    first = row["choices"][0]
    assert [entry["token_id"] for entry in first["logprobs"]] == first["token_ids"]
    assert len(first["logprobs"][0]["top"]) == 2
    assert first["finish_reason"] == "length"
    assert row["prompt_logprobs"][0] is None
    assert [entry["token_id"] for entry in row["prompt_logprobs"][1:]] == [ord(c) for c in "ello"]
    assert row["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "cached_tokens": 0}


def test_json_has_null_where_python_has_minus_infinity() -> None:
    entry = TokenLogprob(1, float("-inf"), 3, "x", (TokenLogprob(2, float("nan"), 1, "y"),))
    choice = Completion(0, "x", [1], "error", logprobs=[entry], error="logits are NaN")
    response = Response("r", [1], [choice], Usage(1, 1), prompt_logprobs=[None, entry])
    line = json_line(0, Job("prompt 1", SamplingParams(), prompt="p\u2028q"), response)
    assert "\n" not in line
    shown = json.loads(line, parse_constant=pytest.fail)["choices"][0]
    assert shown["logprobs"][0]["logprob"] is shown["logprobs"][0]["top"][0]["logprob"] is None
    assert shown["error"] == "logits are NaN"


def test_seed_makes_a_batch_repeatable(tiny: str) -> None:
    arguments = [tiny, "a", "a", "--temperature", "1", "--json", *SHORT]
    first, again, other = (run(*arguments, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    one, two = (json.loads(line)["choices"][0]["token_ids"] for line in first.splitlines())
    assert one != two


def test_stats_go_to_standard_error(tiny: str) -> None:
    result = run(tiny, "Hello", "Hello", "--stats", *SHORT, "--max-batch-tokens", "4")
    shown = dict(line.rsplit("  ", 1) for line in result.stderr.splitlines())
    shown = {name.strip(): value.strip() for name, value in shown.items()}
    assert (shown["tokens in"], shown["tokens out"], shown["preemptions"]) == ("10", "12", "0")
    assert int(shown["passes"]) >= 5
    assert 1 <= float(shown["tokens per pass"]) <= 4
    assert shown["cache blocks used at most"] == "2 of 200"
    assert "tokens in" not in result.stdout


def test_config_file_under_flags(tiny: str, pipe: Pipeline, tmp_path: Path) -> None:
    file = write(tmp_path, "c.toml", "num_blocks = 200", "[sampling]", "max_new_tokens = 9", "logprobs = 0")
    (row,) = rows(run(tiny, "Hello", "--json", "--config", file, "--max-new-tokens", "2"))
    assert row["choices"][0]["token_ids"] == pipe("Hello", max_new_tokens=2).token_ids
    assert len(row["choices"][0]["logprobs"]) == 2


# ---- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/no/such/model", "Hello"], 1, "error: "),
        (["MODEL", ""], 1, "error: the prompt is empty"),
        (["MODEL", "x" * 600], 1, "error: "),
        (["MODEL", "Hello", "--temperature", "nan"], 2, "temperature"),
        (["MODEL", "Hello", "--temprature", "1"], 2, "--temperature"),
        (["MODEL", "Hello", "--file", "/no/such/file"], 2, "/no/such/file"),
        (["MODEL", "Hello", "--logits-processors", "nobody"], 1, "nobody"),
        (["MODEL", "Hello", "--adapter", "LlamaForCausalLM=nobody"], 1, "no such plugin is installed"),
        ([], 2, "MODEL"),
    ],
)
def test_mistakes_cost_one_line_and_the_right_code(tiny: str, arguments: list[str], code: int, message: str) -> None:
    result = run(*(tiny if a == "MODEL" else a for a in arguments), "--num-blocks", "50")
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    if code == 1:
        assert len(result.stderr.splitlines()) == 1


def test_bad_lines_are_named_before_anything_runs(tiny: str, tmp_path: Path) -> None:
    good = {"prompt": "fine"}
    result = run(tiny, "--json", "--file", write(tmp_path, "p.jsonl", good, {"promt": "x"}, good), *SHORT)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "p.jsonl cannot be used: line 2: give one of prompt" in result.stderr
    long = {"prompt": "x" * 600}
    result = run(tiny, "--json", "--file", write(tmp_path, "p.jsonl", good, long, good, long), *SHORT)
    assert (result.exit_code, result.stdout) == (1, "")
    assert [line[:18] for line in result.stderr.splitlines()[1:]] == ["  p.jsonl, line 2:", "  p.jsonl, line 4:"]


def test_failed_request_leaves_the_others_their_answers(tiny: str, tmp_path: Path) -> None:
    """E8: a logits processor that raises for one prompt."""
    from types import SimpleNamespace

    from fastgen import api as fg

    def make(options: dict[str, Any], **_: Any) -> Any:
        def process(output_ids: list[int], logits: Any) -> Any:
            raise RuntimeError("on purpose")

        return process

    @fg.hookimpl
    def fastgen_logits_processors() -> list[fg.LogitsProcessorSpec]:
        return [fg.LogitsProcessorSpec("broken", make)]

    file = write(
        tmp_path, "p.jsonl", {"prompt": "a"}, {"prompt": "b", "logits_processors": {"broken": {}}}, {"prompt": "c"}
    )
    with fg.registered(SimpleNamespace(fastgen_logits_processors=fastgen_logits_processors), name="breaks"):
        result = run(tiny, "--json", "--file", file, *SHORT)
        alone = run(tiny, "b", "--logits-processors", "broken", *SHORT)
    reasons = [json.loads(line)["choices"][0]["finish_reason"] for line in result.stdout.splitlines()]
    assert reasons == ["length", "error", "length"]
    assert result.exit_code == 1
    assert "error: 1 of 3 prompts failed: p.jsonl, line 2: " in result.stderr
    assert alone.exit_code == 1
    assert "on purpose" in alone.stderr


# ---- terminals and Ctrl-C ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_prompt_streams_on_a_terminal(terminal: Any, endless: str) -> None:
    """The first letters are there while the answer is still long from its end."""
    flags = ["--max-new-tokens", "20000", "--ignore-eos", "--max-batch-tokens", "8"]
    with terminal("generate", endless, "Hello", *flags) as screen:
        screen.expect("[^\\s]{5}")
        assert screen.process.poll() is None
        screen.type("\x03")
        assert screen.end() == 130
        screen.expect("\r\n")
        assert "Traceback" not in screen.shown


@pytest.mark.slow
def test_batch_on_a_terminal_shows_a_bar_then_the_answers(terminal: Any, tiny: str) -> None:
    with terminal("generate", tiny, "one", "two", *SHORT) as screen:
        screen.expect("generating")
        screen.expect("2/2")
        screen.expect("--- 1/2: one")
        screen.expect("--- 2/2: two")
        assert screen.end() == 0


def test_terminal_gets_no_orders_from_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastgen.cli.output import on_terminal

    text = "a\x1b[2Jb\x9bc\td\ne\r\x07é"
    assert on_terminal(text) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert on_terminal(text) == "a\ufffd[2Jb\ufffdc\td\ne\ufffdé"


@pytest.mark.slow
def test_interrupted_batch_keeps_what_there_is(endless: str, tmp_path: Path) -> None:
    """Two of many run at once; Ctrl-C after the first answer prints the other one's part, and says what is missing."""
    lines = [{"prompt": f"prompt {i}", "max_new_tokens": 5 if i == 0 else 50_000} for i in range(8)]
    file = write(tmp_path, "p.jsonl", *lines)
    code = "import sys; sys.argv[0] = 'fastgen'; from fastgen.cli import main; main()"
    flags = ["--json", "--ignore-eos", "--max-sequences", "2", "--max-batch-tokens", "16", "--num-blocks", "8000"]
    command = [sys.executable, "-c", code, "generate", endless, "--file", file, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert first["choices"][0]["finish_reason"] == "length"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    cut = [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 130
    assert 1 <= len(cut) <= 2
    assert all(row["choices"][0]["finish_reason"] == "abort" and row["choices"][0]["token_ids"] for row in cut)
    assert f"interrupted: 1 of 8 prompts answered, {len(cut)} cut short, {7 - len(cut)} not begun" in err
    assert "Traceback" not in err
