"""A tiny model behind what looks on, in this process; and servers on a port, for clients that need one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest
import uvicorn
from fastapi import FastAPI

from fastgen.front.pipe import Pipeline, pipeline
from fastgen.front.verbs import Verbs
from fastgen.server.inprocess import InProcessBackend, in_process
from fastgen.server.observe import Observed, Tracer
from fastgen.server.service import Replica, Service, Watcher
from fastgen.server.settings import ServerConfig
from fastgen.testing.checkpoints import tiny_llama
from fastgen.wire.info import Pass


class TellingBackend(InProcessBackend):
    """Tells of its passes, as engines in processes of their own do, and may look like several replicas."""

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__(pipe)
        self.watchers: list[Watcher] = []
        self.faked: list[Replica] = []
        engine = pipe.engine
        step = engine.step

        def timed_step():  # type: ignore[no-untyped-def]
            before, start = engine.stats(), time.time()
            outputs = step()
            after, end = engine.stats(), time.time()
            one = Pass(
                end,
                end - start,
                after.tokens - before.tokens,
                after.running,
                after.waiting,
                after.used_blocks,
                after.cached_blocks,
            )
            for watcher in self.watchers if after.passes > before.passes else ():
                watcher(0, [one])
            return outputs

        engine.step = timed_step  # type: ignore[method-assign]

    def replicas(self) -> list[Replica]:
        return [*super().replicas(), *self.faked]

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        self.watchers.append(watcher)
        return lambda: self.watchers.remove(watcher)


@contextmanager
def _served(app: FastAPI, port: int = 0) -> Iterator[str]:
    """Its address."""
    config = uvicorn.Config(app, port=port, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="test-server", daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server does not stop"


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serves an app until the test ends: ``serve(app, port=0)`` gives its address."""
    with ExitStack() as stack:
        yield lambda app, port=0: stack.enter_context(_served(app, port))


@dataclass
class Seen:
    """A service and what looks on."""

    service: Service
    observed: Observed
    backend: TellingBackend


@pytest.fixture(scope="session")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    model = tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    with pipeline(model, num_blocks=64, block_size=16, max_batch_tokens=64) as opened:
        yield opened


Look = Callable[..., Seen]


def _look(pipe: Pipeline, settings: ServerConfig | None = None, tracer: Tracer | None = None) -> Seen:
    service = in_process(pipe, settings, name="tiny")
    backend = TellingBackend(pipe)
    observed = Observed(backend, tracer=tracer)
    verbs = Verbs(observed, tokenizer=pipe.tokenizer, config=pipe.config, max_model_len=pipe.max_model_len)
    return Seen(replace(service, verbs=verbs, backend=backend), observed, backend)


@pytest.fixture
def look(pipe: Pipeline) -> Look:
    """Makes a service: ``look(settings=..., tracer=...)``."""
    return lambda **options: _look(pipe, **options)


@pytest.fixture
def seen(look: Look) -> Seen:
    return look()
