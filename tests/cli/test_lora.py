"""A20 on the command line: `--lora NAME=DIRECTORY` loads adapters, `--use-lora NAME` and a line's `lora` choose one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastgen import Pipeline, pipeline
from fastgen.cli import main
from fastgen.testing.adapters import random_lora

MODULES = {f"model.layers.{layer}.mlp.down_proj": (32, 64) for layer in (0, 1)}
SHORT = ["--max-new-tokens", "6", "--num-blocks", "200"]


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("loras")
    return {name: random_lora(top / name, MODULES, alpha=16, seed=seed) for seed, name in enumerate(("sql", "chat"))}


@pytest.fixture(scope="module")
def pipe(tiny: str, loras: dict[str, Path]) -> Iterator[Pipeline]:
    with pipeline(tiny, num_blocks=200, lora=loras) as pipe:
        yield pipe


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments])


def flags(loras: dict[str, Path]) -> list[str]:
    return [part for name, path in loras.items() for part in ("--lora", f"{name}={path}")]


def texts(pipe: Pipeline) -> dict[str | None, str]:
    found = {name: pipe("Hello", max_new_tokens=6, lora=name).text for name in (None, "sql", "chat")}
    assert len(set(found.values())) == 3
    return found


def test_generate_with_the_one_that_is_chosen(tiny: str, loras: dict[str, Path], pipe: Pipeline) -> None:
    for name, text in texts(pipe).items():
        chosen = ["--use-lora", name] if name else []
        result = run("generate", tiny, "Hello", *SHORT, *flags(loras), *chosen)
        assert (result.exit_code, result.stdout) == (0, text + "\n"), result.stderr


def test_the_only_one_is_chosen(tiny: str, loras: dict[str, Path], pipe: Pipeline) -> None:
    result = run("generate", tiny, "Hello", *SHORT, *flags({"sql": loras["sql"]}))
    assert (result.exit_code, result.stdout) == (0, texts(pipe)["sql"] + "\n")


def test_each_line_of_a_file_may_choose(tiny: str, loras: dict[str, Path], pipe: Pipeline, tmp_path: Path) -> None:
    wanted = texts(pipe)
    names: list[str | None] = ["sql", None, "chat", "sql"]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": "Hello", "lora": name}) + "\n" for name in names))
    result = run("generate", tiny, "--file", str(file), "--json", *SHORT, *flags(loras))
    assert result.exit_code == 0, result.stderr
    got = [json.loads(line)["choices"][0]["text"] for line in result.stdout.splitlines()]
    assert got == [wanted[name] for name in names]


def test_what_cannot_be_is_said(tiny: str, loras: dict[str, Path], tmp_path: Path) -> None:
    result = run("generate", tiny, "Hello", *SHORT, *flags(loras), "--use-lora", "sq")
    assert result.exit_code != 0
    assert "lora names the adapter 'sq'; loaded are 'sql', 'chat'. Did you mean 'sql'?" in result.output
    result = run("generate", tiny, "Hello", *SHORT, "--lora", f"sql={tmp_path}")
    assert result.exit_code != 0
    assert f"LoRA adapter 'sql' ({tmp_path}): it has no adapter_config.json" in result.output
    result = run("generate", tiny, "Hello", *SHORT, "--lora", "sql")
    assert result.exit_code != 0
    assert "write it as KEY=VALUE" in result.output


def test_toml_and_flags_together(tiny: str, loras: dict[str, Path], pipe: Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "fastgen.toml"
    file.write_text(
        f'num_blocks = 200\n[lora]\nsql = "{loras["sql"]}"\n[sampling]\nlora = "chat"\nmax_new_tokens = 6\n'
    )
    result = run("generate", tiny, "Hello", "--config", str(file), "--lora", f"chat={loras['chat']}")
    assert (result.exit_code, result.stdout) == (0, texts(pipe)["chat"] + "\n"), result.stderr


def test_explain_shows_them(tiny: str, loras: dict[str, Path]) -> None:
    result = run("explain", tiny, "--json", "--num-blocks", "200", *flags(loras))
    assert json.loads(result.stdout)["lora adapters"] == [
        f"{name}: 2 modules, rank 4, from {path}" for name, path in loras.items()
    ]
    assert "lora adapters" not in run("explain", tiny, "--num-blocks", "200").stdout


def test_help_tells_the_two_flags_apart() -> None:
    shown = " ".join(run("generate", "--help").output.split())
    assert "--lora KEY=VALUE LoRA adapters in peft's format" in shown
    assert "--use-lora TEXT LoRA adapter to answer with, by its name." in shown
