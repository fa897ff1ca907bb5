"""gRPC servers over a tiny engine in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastgen
from fastgen.front import Pipeline
from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.doors import Served, open_door
from fastgen.testing.scripted import ScriptedEngine
from fastgen.testing.tokenizers import byte_tokenizer
from fastgen.text import Tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pipe(tiny: Path) -> Iterator[Pipeline]:
    with fastgen.pipeline(tiny, num_blocks=256, max_batch_tokens=64, prefix_caching=False) as made:
        yield made


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Pipeline]:
    """Answers with as many tokens as are asked for, at most two hundred a second."""
    engine = ScriptedEngine(Tokenizer.load(byte_tokenizer(tmp_path)), script=lambda prompt, index: [97] * 10_000)
    engine.on_step = lambda: time.sleep(0.005)
    with Pipeline(engine) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture(scope="module")
def served(pipe: Pipeline) -> Iterator[Served]:
    with open_door(pipe, "grpc") as made:
        yield made
