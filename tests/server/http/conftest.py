"""Servers for the tests: an application in this process, and a real one on a port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

import fastgen
from fastgen.front import Pipeline
from fastgen.server.admission import Admission
from fastgen.server.http.app import create_app
from fastgen.server.inprocess import in_process
from fastgen.server.service import Service
from fastgen.server.settings import ServerConfig
from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.scripted import ScriptedEngine
from fastgen.testing.tokenizers import byte_tokenizer
from fastgen.text import Tokenizer
from fastgen.wire.info import ModelInfo

SECONDS = 30.0
SLOTS = 2
"""Sequences that run at once in the tiny pipeline."""


@dataclass
class Door:
    """An application and what is behind it."""

    pipe: Pipeline
    service: Service
    admission: Admission
    app: FastAPI

    def http(self, **options: Any) -> httpx.AsyncClient:
        """A client that calls the application, without a network."""
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(**{"transport": transport, "base_url": "http://server", "timeout": SECONDS, **options})

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            **{
                "api_key": "none",
                "base_url": "http://server/v1",
                "http_client": self.http(),
                "max_retries": 0,
                **options,
            }
        )

    def idle(self) -> bool:
        """Whether nothing runs and nothing is counted as running."""
        stats: Any = self.pipe.stats()
        return not self.admission.choices and not (stats.running or stats.waiting)


@dataclass
class Live(Door):
    """The same on a port."""

    url: str = ""

    def sync_openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            **{"api_key": "none", "base_url": f"{self.url}/v1", "max_retries": 0, "timeout": SECONDS, **options}
        )


MakeDoor = Callable[..., Door]


def make_door(pipe: Pipeline, *, max_sequences: int = SLOTS, info: ModelInfo | None = None, **settings: Any) -> Door:
    service = in_process(pipe, ServerConfig(**settings), name="tiny", info=info)
    admission = Admission(service.settings, max_sequences)
    return Door(pipe, service, admission, create_app(service, admission))


@contextmanager
def on_a_port(door: Door) -> Iterator[Live]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(door.app, log_config=None, lifespan="off", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Live(**vars(door), url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        listener.close()
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pipe(tiny: Path) -> Iterator[Pipeline]:
    """A tiny model of 512 tokens, two sequences at once."""
    with fastgen.pipeline(tiny, num_blocks=96, max_sequences=SLOTS) as made:
        yield made


@pytest.fixture(scope="module")
def door(pipe: Pipeline) -> Door:
    return make_door(pipe)


@pytest.fixture(scope="module")
def make(pipe: Pipeline) -> MakeDoor:
    """Makes an application with other settings, over the same pipeline unless another is given."""

    def made(other: Pipeline | None = None, **options: Any) -> Door:
        return make_door(other or pipe, **options)

    return made


@pytest.fixture(scope="module")
def live(door: Door) -> Iterator[Live]:
    with on_a_port(door) as served:
        yield served


@pytest.fixture(scope="session")
def serve() -> Callable[[Door], Any]:
    """Puts an application on a port, for a ``with`` block."""
    return on_a_port


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Waits for a condition."""
    return wait_until


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def engine(bytes_tokenizer: Tokenizer) -> ScriptedEngine:
    """Answers with the prompt, one byte a step."""
    return ScriptedEngine(bytes_tokenizer)


@pytest.fixture
def scripted(engine: ScriptedEngine) -> Iterator[Door]:
    """An application over that engine."""
    info = ModelInfo(
        name="scripted",
        architecture="Scripted",
        dtype="float32",
        device="cpu",
        quantization=None,
        max_model_len=engine.max_model_len,
        max_batch_tokens=512,
        max_sequences=128,
        block_size=16,
        total_blocks=1,
        vocab_size=259,
        loras=("polite",),
        version=fastgen.__version__,
    )
    with closing(Pipeline(engine)) as pipe:  # type: ignore[arg-type]
        yield make_door(pipe, max_sequences=128, info=info)
