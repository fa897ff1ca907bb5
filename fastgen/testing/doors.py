"""A server's doors, open in this process: for tests of what stands before and behind them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fastgen.front import Pipeline
from fastgen.server.admission import Admission
from fastgen.server.inprocess import InProcessBackend, in_process
from fastgen.server.service import Service
from fastgen.server.settings import ServerConfig
from fastgen.wire.info import ModelInfo

__all__ = ["SCRIPTED", "Served", "open_door", "wait_until"]

T = TypeVar("T")

SECONDS = 60.0
"""Longest wait for anything here."""

SCRIPTED = ModelInfo(
    name="scripted",
    architecture="Scripted",
    dtype="float32",
    device="cpu",
    quantization=None,
    max_model_len=10_000,
    max_batch_tokens=512,
    max_sequences=128,
    block_size=16,
    total_blocks=1,
    vocab_size=259,
    loras=(),
    version="0",
)
"""Of a pipeline over a ``ScriptedEngine``, which cannot be asked."""


@dataclass(frozen=True)
class Served:
    """A pipeline, and the door to it."""

    pipe: Pipeline
    service: Service
    admission: Admission
    address: str
    """As ``fastgen.client`` takes it."""
    stop: Callable[[], None]
    """Close the door at once. Twice is harmless."""

    @property
    def backend(self) -> InProcessBackend:
        assert isinstance(self.service.backend, InProcessBackend)
        return self.service.backend

    def idle(self) -> bool:
        """Whether nothing runs, and nothing is counted as running."""
        stats: Any = self.pipe.stats()
        return not self.admission.choices and not (getattr(stats, "running", 0) or getattr(stats, "waiting", 0))


@contextmanager
def open_door(
    pipe: Pipeline,
    door: Literal["grpc", "http"],
    *,
    max_sequences: int = 8,
    info: ModelInfo | None = None,
    scheme: str = "",
    **settings: Any,
) -> Iterator[Served]:
    """Serve ``pipe`` on a port of this machine, a free one unless the settings name it.

    Args:
        info: as ``in_process``.
        scheme: of the address, where it is not the door's usual one.
        settings: fields of ``ServerConfig``.
    """
    service = in_process(pipe, ServerConfig(**{"port": 0, "grpc_port": 0, **settings}), name="tiny", info=info)
    admission = Admission(service.settings, max_sequences)
    opened = _grpc(service, admission) if door == "grpc" else _http(service, admission)
    scheme = scheme or {"grpc": "", "http": "http://"}[door]
    with opened as (port, stop):
        yield Served(pipe, service, admission, f"{scheme}localhost:{port}", stop)


def wait_until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """
    Raises:
        TimeoutError: it did not come true.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("waited in vain")
        time.sleep(0.005)


@contextmanager
def _grpc(service: Service, admission: Admission) -> Iterator[tuple[int, Callable[[], None]]]:
    from fastgen.server.grpc.server import create_server

    events = asyncio.new_event_loop()
    thread = threading.Thread(target=events.run_forever, name="grpc-door")
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, events).result(SECONDS)

    server = create_server(service, admission)
    try:
        yield run(server.start()), lambda: run(server.stop(0))
    finally:
        run(server.stop(0))
        events.call_soon_threadsafe(events.stop)
        thread.join()
        events.close()


@contextmanager
def _http(service: Service, admission: Admission) -> Iterator[tuple[int, Callable[[], None]]]:
    import uvicorn

    from fastgen.server.http.app import create_app

    settings = service.settings
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", settings.port))
    port: int = listener.getsockname()[1]
    config = uvicorn.Config(
        create_app(service, admission),
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=0,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http-door")
    thread.start()

    def stop() -> None:
        server.should_exit = server.force_exit = True
        thread.join(SECONDS)
        listener.close()

    try:
        wait_until(lambda: server.started)
        yield port, stop
    finally:
        stop()
