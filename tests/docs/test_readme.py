"""The README's examples run, and its commands and links exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

import fastgen
from fastgen.cli import main
from fastgen.testing.adapters import random_lora
from fastgen.testing.checkpoints import tiny_llama

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks(repository: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("number", [0, 2])
def test_python_examples_run(repository, real_model, number, capsys):
    """As printed, but for the model's place and fewer tokens."""
    source = blocks(repository, "python")[number]
    assert NAME in source
    source = source.replace(NAME, str(real_model)).replace("max_new_tokens=128", "max_new_tokens=8")
    source = source.replace("stream=True)", "stream=True, max_new_tokens=8)")
    exec(compile(source, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_lora_example_runs(repository, tmp_path, capsys):
    """As printed, but for the names of the model and the adapters."""
    model = tiny_llama(tmp_path / "model")
    places = {"model.layers.0.self_attn.q_proj": (32, 32), "model.layers.1.mlp.down_proj": (32, 64)}
    sql, chat = (random_lora(tmp_path / name, places, seed=seed) for seed, name in enumerate(("sql", "chat")))
    source = blocks(repository, "python")[1].replace("MODEL", repr(str(model)))
    source = source.replace("path/to/adapter", str(sql)).replace("owner/adapter-on-the-hub", str(chat))
    exec(compile(source, "README.md", "exec"), {"fastgen": fastgen})
    assert capsys.readouterr().out.strip()


def test_there_are_no_other_examples(repository):
    assert len(blocks(repository, "python")) == 3


def test_commands_and_options_exist(repository):
    lines = [
        line for block in blocks(repository, "console") for line in block.splitlines() if line.startswith("$ fastgen")
    ]
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line[2:].split(" > ")[0], comments=True)[1:]
        command: click.Command = main
        while isinstance(command, click.Group):
            name = words.pop(0)
            command = command.get_command(click.Context(command), name) or pytest.fail(
                f"no command {name!r} in {line!r}"
            )
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            assert not word.startswith("--") or word in known, line


def test_make_targets_exist(repository):
    wanted = set(re.findall(r"make ([a-z-]+)", (repository / "README.md").read_text()))
    defined = set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= wanted <= defined | {"and"}


def test_links_exist(repository):
    pages = [repository / "README.md", *(repository / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_no_placeholder_is_left(repository):
    for page in (repository / "README.md", *(repository / "docs").glob("*.md")):
        assert not re.search(
            r"\b[A-Z0-9]+_[A-Z0-9_]+\b", re.sub(r"`[^`]*`|```.*?```", "", page.read_text(), flags=re.DOTALL)
        ), page
