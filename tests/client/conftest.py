"""Both doors to a tiny model, and to engines with written answers; and the client at each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import fastgen
from fastgen.client import Client
from fastgen.front import Pipeline
from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.children import faulty_plugin
from fastgen.testing.doors import SCRIPTED, Served, open_door
from fastgen.testing.scripted import ScriptedEngine
from fastgen.testing.tokenizers import byte_tokenizer
from fastgen.text import Tokenizer

DOORS = ("grpc", "http")


@pytest.fixture(scope="module")  # no longer: others look at what is installed
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """With the processors of ``fastgen.testing.children``. Without a prefix cache: what was asked before does not show
    in the usage."""
    tiny = tiny_llama(tmp_path_factory.mktemp("tiny"))
    with (
        faulty_plugin(tmp_path_factory.mktemp("site")),
        fastgen.pipeline(tiny, num_blocks=256, max_batch_tokens=64, prefix_caching=False) as made,
    ):
        yield made


@pytest.fixture(scope="module", params=DOORS)
def served(request: pytest.FixtureRequest, pipe: Pipeline) -> Iterator[Served]:
    with open_door(pipe, request.param) as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Client]:
    with Client(served.address) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    """Answers without end, at most a thousand tokens a second."""
    made = ScriptedEngine(tokenizer, script=lambda prompt, index: [97] * 9_000)
    made.on_step = lambda: time.sleep(0.001)
    return made


@pytest.fixture(params=DOORS)
def scripted(request: pytest.FixtureRequest, engine: ScriptedEngine) -> Iterator[Callable[..., Served]]:
    """Opens a door to that engine, with settings."""
    with ExitStack() as stack:
        pipe = stack.enter_context(Pipeline(engine))  # type: ignore[arg-type]

        def made(**settings: Any) -> Served:
            return stack.enter_context(open_door(pipe, request.param, info=SCRIPTED, **settings))

        yield made
