"""docs/Serving.md: its examples run as printed, but for the model's place; its file, options and routes exist."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import fastgen
from fastgen.cli import main
from fastgen.config import EngineConfig
from fastgen.server.settings import ServerConfig
from fastgen.testing.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "Serving.md").read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with fastgen.serve(str(model), device="cpu", num_blocks=64) as server:
        yield server.url


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_python_examples_run(page: str, model: Path, url: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = blocks(page, "python")
    assert len(found) == 3
    exec(compile(found[number], "Serving.md", "exec"), {"URL": url, "MODEL": str(model)})
    assert capsys.readouterr().out.strip()


def test_the_config_file_is_one(page: str) -> None:
    (text,) = blocks(page, "toml")
    options = tomllib.loads(text)
    assert ServerConfig(**options.pop("server")).served_model_name == ("smol",)
    assert EngineConfig(**options).max_batch_tokens == 256


def test_options_named_are_there(page: str) -> None:
    serve = main.get_command(click.Context(main), "serve")
    assert serve is not None
    known = {option for parameter in serve.params for option in (*parameter.opts, *parameter.secondary_opts)}
    commands = "".join(part for part in page.split("```") if "apt-get" not in part)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", commands))
    assert len(named) >= 6
    assert named <= known | {"--help"}
    faults = page.partition("## What happens when")[2].partition("## Seeing it")[0]
    for name in re.findall(r"`([a-z]+_[a-z_]+)`", faults):
        assert name in ServerConfig.model_fields


def test_the_unit_starts_a_command_that_is_there(page: str) -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(blocks(page, "ini")[0])
    program, command, *words = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/fastgen")
    serve = main.get_command(click.Context(main), command)
    assert serve is not None
    assert words[0] in {option for parameter in serve.params for option in parameter.opts}
    assert float(unit["Service"]["TimeoutStopSec"]) > ServerConfig().drain_timeout


@pytest.mark.slow
def test_routes_named_answer(page: str, url: str) -> None:
    import httpx

    table = page.partition("| route |")[2].partition("What differs")[0]
    named = set(re.findall(r"`(?:GET |POST )?(/[a-z0-9/_.]*)`", table))
    assert {"/v1/models", "/v1/chat/completions", "/", "/metrics"} <= named
    for route in named:
        with httpx.stream("GET", url + route) as answer:  # POST alone: 405, which is an answer
            assert answer.status_code in (200, 405), route
