"""The file that names peers: what is in it is checked at once, what it points to when a row is opened."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fastgen.bench.peers import read
from fastgen.bench.peers.rows import ADAPTERS
from fastgen.bench.protocol import Settings
from fastgen.errors import ConfigError

PYTHON = f'python = "{sys.executable}"\n'


def write(folder: Path, text: str) -> Path:
    file = folder / "peers.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no peer"),
        ("[a", "is not TOML"),
        ("a = 1", "the peer 'a' .*write a table"),
        ("[a]\n" + PYTHON, "the peer 'a' .*'engine' must be one of vllm, openvino-genai"),
        ('[a]\nengine = "vlm"\n' + PYTHON, "unknown engine 'vlm'; .*Did you mean 'vllm'"),
        ('[a]\nengine = "mine.py"\n' + PYTHON, "there is no adapter .*mine.py"),
        ('[a]\nengine = "vllm"\n', "the peer 'a' .*python"),
        ('[a]\nengine = "vllm"\nbugdet = 3\n' + PYTHON, "the peer 'a' .*bugdet.*Did you mean 'budget'"),
        ('[a]\nengine = "vllm"\nbudget = 0\n' + PYTHON, "the peer 'a' .*budget"),
        ('[a]\nengine = "vllm"\ndtype = "int8"\n' + PYTHON, "the peer 'a' .*dtype"),
        ('[a]\nengine = "vllm"\nquiet_seconds = 0\n' + PYTHON, "the peer 'a' .*quiet_seconds"),
        ('[a]\nengine = "openvino-genai"\n' + PYTHON, "needs 'model', a folder with openvino_model.xml"),
        ('[a]\nengine = "llama-cpp-python"\n' + PYTHON, "needs 'model', a GGUF file"),
    ],
)
def test_refused_when_read(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(write(tmp_path, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml: No such file"):
        read(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read(tmp_path / "bytes.toml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('engine = "vllm"\npython = "venv/bin/python"\n', "there is no interpreter {}/venv/bin/python"),
        ('engine = "vllm"\npython = "peers.toml"\n', "{}/peers.toml cannot be executed"),
        ('engine = "vllm"\nmodel = "m"\n' + PYTHON, "there is no model {}/m"),
        ('engine = "openvino-genai"\nmodel = "."\n' + PYTHON, "is not a folder with openvino_model.xml"),
        ('engine = "onnxruntime-genai"\nmodel = "."\n' + PYTHON, "is not a folder with genai_config.json"),
        ('engine = "llama-cpp-python"\nmodel = "."\n' + PYTHON, "is not a GGUF file"),
    ],
)
def test_refused_when_opened(tmp_path: Path, text: str, problem: str) -> None:
    rows = read(write(tmp_path, f"[a]\n{text}"))
    with pytest.raises(ConfigError, match=r"the peer 'a' .*" + problem.format(re.escape(str(tmp_path)))):
        rows["a"](Settings(tmp_path))


@pytest.mark.parametrize(("engine", "package"), [(name, name.split("-")[0]) for name in ADAPTERS])
def test_an_environment_without_the_engine_says_so(tmp_path: Path, engine: str, package: str) -> None:
    """The adapters themselves, as far as a machine without the engines can run them."""
    (tmp_path / "openvino_model.xml").touch()
    (tmp_path / "genai_config.json").touch()
    (tmp_path / "m.gguf").touch()
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    model = "m.gguf" if engine == "llama-cpp-python" else "."
    rows = read(write(tmp_path, f'[it]\nengine = "{engine}"\npython = "bare"\nmodel = "{model}"\n'))
    with pytest.raises(ConfigError, match=r"the peer it .*ModuleNotFoundError: No module named '\w+'"):
        rows["it"](Settings(tmp_path))
