"""The whole server: engines in processes of their own; tokenizer, HTTP and gRPC in one event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fastgen.config import EngineConfig
from fastgen.front.verbs import Verbs
from fastgen.server import logs
from fastgen.server.admission import Admission
from fastgen.server.ending import MARGIN_SECONDS, Deadline, Stop
from fastgen.server.listening import Addresses, addresses_of, bind, check_certificate, is_local, listen
from fastgen.server.observe import Observed
from fastgen.server.replicas import Replicas
from fastgen.server.service import Service
from fastgen.server.settings import ServerConfig
from fastgen.wire.info import ModelInfo
from fastgen.wire.launching import WORKER

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from fastgen.server.tracing import Tracing

__all__ = ["Addresses", "Stop", "run", "serve"]

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = DOORS_SECONDS = 2.0
"""How long answers that were cut off may take to be read, and connections to close. These five are within
``MARGIN_SECONDS``."""
TRACES_SECONDS = 1.0
"""How long the last spans may take to be sent."""
ENGINES_SECONDS = 4.0
"""What ``Replicas.close`` takes at most."""
EXIT_SECONDS = 0.5
"""How long threads that still work for a request that is gone may take to end."""
LOOK_SECONDS = 0.5
TRACES_TO = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SIGNALS = (signal.SIGTERM, signal.SIGINT)

CreateApp = Callable[[Service, Admission], "FastAPI"]


async def serve(
    model: str,
    config: EngineConfig,
    settings: ServerConfig,
    *,
    stop: Stop | None = None,
    signals: Sequence[int] = SIGNALS,
    on_ready: Callable[[Addresses], None] | None = None,
    on_progress: Callable[[str], None] | None = None,
    create_app: CreateApp | None = None,
    worker: str = WORKER,
) -> int:
    """Serve until told to end.

    The first of ``signals`` lets requests in flight finish, for ``drain_timeout`` seconds, and turns new ones away;
    what is left then ends with a last event. The second ends everything at once. All is over ``MARGIN_SECONDS`` after
    ``drain_timeout``.

    Args:
        on_ready: called once requests are taken. Unset: one line on standard error says where.
        on_progress: told what is being done before that.

    Returns:
        The exit code: 0 after a signal, 128 and the signal's number if that came before requests were taken or was the
        second one, 1 if every engine died for good.

    Raises:
        FastgenError: the model could not be loaded, or a port is taken.
    """
    stop = stop or Stop()
    check_certificate(settings)
    with stop.on_signals(signals):
        listener = bind(settings)
        try:
            replicas = Replicas(model, config, settings, module=worker)
            try:
                if not await _started(replicas, stop, on_progress):
                    return 128 + (stop.signal or 0) if stop.signal else 0
                server = _Server(replicas, config, settings, listener, create_app)
                return await server.run(stop, on_ready or (lambda addresses: _announce(addresses, server.service)))
            finally:
                await asyncio.to_thread(replicas.close)
        finally:
            listener.close()


def run(server: Callable[[], Coroutine[Any, Any, int]], settings: ServerConfig) -> int:
    """The exit code of ``server()``, which is ``serve`` with its arguments, for a process that does nothing else: with
    logging set up, in a fast event loop."""
    import uvloop

    logs.configure(settings.log_level, settings.log_format, secrets=settings.api_key)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(server())
        # Closing waits for every thread that still works, on a prompt whose request was cut off, say.
        leaving = threading.Timer(EXIT_SECONDS, os._exit, (code,))
        leaving.daemon = True
        leaving.start()
    leaving.cancel()
    return code


async def _started(replicas: Replicas, stop: Stop, on_progress: Callable[[str], None] | None) -> bool:
    """Whether the engines are ready; not if it is told to stop before."""
    with nullcontext() if replicas.trusts_code else without_torch():
        starting = asyncio.create_task(asyncio.to_thread(replicas.start))
        stopped = asyncio.create_task(stop.asked.wait())
        told = ""
        try:
            while not starting.done() and not stopped.done():
                await asyncio.wait((starting, stopped), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if on_progress is not None and (text := replicas.detail) not in ("", told):
                    told = text
                    on_progress(text)
            if not starting.done():
                await asyncio.to_thread(replicas.close)
                await asyncio.wait((starting,))
                starting.exception()
                return False
            starting.result()
            return True
        finally:
            stopped.cancel()


class _Server:
    """Both doors over engines that are ready."""

    def __init__(
        self,
        replicas: Replicas,
        config: EngineConfig,
        settings: ServerConfig,
        listener: socket.socket,
        create_app: CreateApp | None,
    ) -> None:
        info = replicas.info
        self.replicas = replicas
        self.settings = settings
        self._listener = listener
        name = settings.served_model_name[0] if settings.served_model_name else info.name
        self._tracing = _tracing(name, info)
        observed = Observed(replicas, tracer=self._tracing)
        verbs = Verbs(observed, tokenizer=replicas.tokenizer, config=config, max_model_len=info.max_model_len)
        self.service = Service(verbs, replicas, info, settings, created=int(time.time()))
        self.admission = Admission(settings, info.max_sequences * settings.replicas)
        make = create_app or _app
        app = make(self.service, self.admission)
        if self._tracing is not None:
            from fastgen.server.tracing import HttpSpans

            app.add_middleware(HttpSpans, tracing=self._tracing)
        self._http = _http_server(app, settings)

    async def run(self, stop: Stop, on_ready: Callable[[Addresses], None]) -> int:
        listen(self._listener, self.settings)
        grpc, grpc_port = None, None
        if self.settings.grpc_port is not None:
            from fastgen.server.grpc.server import create_server

            grpc = create_server(self.service, self.admission, interceptors=_grpc_tracing(self._tracing))
            grpc_port = await grpc.start()
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        try:
            while not self._http.started and not http.done():
                await asyncio.sleep(0.01)
            gc.collect()
            gc.freeze()  # what is there now stays: collections need not look at it
            if not http.done():
                on_ready(addresses_of(self._listener, grpc_port, self.settings))
            code = await self._until_told(stop, http)
            deadline = Deadline(self.settings.drain_timeout + MARGIN_SECONDS)
            await self._drain(stop, deadline)
            if stop.at_once.is_set() and stop.signal:
                code = 128 + stop.signal
            await self._close_http(stop, http, deadline)
            if grpc is not None:
                await grpc.stop(0.0 if stop.at_once.is_set() else _doors(deadline))
        finally:
            gc.unfreeze()
            if self._tracing is not None:
                await _within(TRACES_SECONDS, self._tracing.shutdown)
            if grpc is not None:
                await grpc.stop(0.0)
            if not http.done():
                http.cancel()
        return code

    async def _close_http(self, stop: Stop, http: asyncio.Task[None], deadline: Deadline) -> None:
        self._http.should_exit = True
        self._http.force_exit = stop.at_once.is_set()
        ended = asyncio.create_task(stop.at_once.wait())
        await asyncio.wait((http, ended), timeout=_doors(deadline), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not http.done():
            self._http.force_exit = True
            await asyncio.wait((http,), timeout=LOOK_SECONDS)
        if http.done():
            http.result()

    async def _until_told(self, stop: Stop, http: asyncio.Task[None]) -> int:
        """Serve. The exit code, as far as it is known."""
        asked = asyncio.create_task(stop.asked.wait())
        try:
            while not asked.done() and not http.done():
                await asyncio.wait((asked, http), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if self.replicas.closed:
                    logger.error("every engine has failed, the server ends: %s", self.replicas.detail)
                    return 1
        finally:
            asked.cancel()
        return 0

    async def _drain(self, stop: Stop, deadline: Deadline) -> None:
        """Turn new requests away and let those in flight end, those that take too long with a last event."""
        self.admission.drain()
        self.replicas.drain()
        if self.replicas.closed or await self._idle(stop, 0.0):
            return
        logger.info(
            "shutting down: %d requests in flight have %g seconds; a second signal ends them at once",
            self.replicas.in_flight,
            self.settings.drain_timeout,
        )
        if not await self._idle(stop, self.settings.drain_timeout):
            logger.warning("%d requests did not end in time and are cut off", self.replicas.in_flight)
            self.replicas.cut_off()
            await self._idle(stop, min(LAST_WORDS_SECONDS, deadline.left(keep=DOORS_SECONDS + ENGINES_SECONDS)))

    async def _idle(self, stop: Stop, seconds: float) -> bool:
        """Whether nothing is in flight any more within so many seconds, or before it is to end at once."""
        idle = asyncio.create_task(self.admission.wait_idle(seconds))
        at_once = asyncio.create_task(stop.at_once.wait())
        await asyncio.wait((idle, at_once), return_when=asyncio.FIRST_COMPLETED)
        done = idle.done() and idle.result()
        idle.cancel()
        at_once.cancel()
        return done


def _doors(deadline: Deadline) -> float:
    """Seconds that a door has to close."""
    return min(DOORS_SECONDS, deadline.left(keep=TRACES_SECONDS + ENGINES_SECONDS + EXIT_SECONDS))


async def _within(seconds: float, function: Callable[[], None]) -> None:
    """Call it, and wait so long at most."""
    thread = threading.Thread(target=function, name="fastgen-last", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, seconds)


def _grpc_tracing(tracing: Tracing | None) -> list[Any]:
    if tracing is None:
        return []
    from fastgen.server.tracing import grpc_context

    return [grpc_context(tracing)]


def _tracing(name: str, info: ModelInfo) -> Tracing | None:
    """Where OpenTelemetry's own variables say where to, spans are sent there."""
    endpoint = next((os.environ[variable] for variable in TRACES_TO if os.environ.get(variable)), None)
    if endpoint is None:
        return None
    from fastgen.server.tracing import Tracing

    return Tracing(name, info, endpoint=endpoint)


def _app(service: Service, admission: Admission) -> FastAPI:
    from fastgen.server.http.app import create_app

    return create_app(service, admission)


def _http_server(app: FastAPI, settings: ServerConfig) -> uvicorn.Server:
    import uvicorn

    from fastgen.server.http.connections import BoundedProtocol

    if settings.log_level == "info":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its beginnings and ends are told by us

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:
            return nullcontext()  # they are ours

    return Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=None,
            access_log=settings.log_level in ("debug", "info"),
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,  # within DOORS_SECONDS
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
    )


def _announce(addresses: Addresses, service: Service) -> None:
    settings = service.settings
    if not settings.api_key and not is_local(settings.host):
        logger.warning("everyone who reaches %s is served: there is no API key (FASTGEN_API_KEY)", settings.host)
    grpc = f", gRPC on {addresses.grpc}" if addresses.grpc else ""
    engines = f" with {settings.replicas} engines" if settings.replicas > 1 else ""
    ready = f"{service.names[0]} is ready{engines} on {addresses.http}{grpc}; Ctrl-C ends it"
    if settings.log_format == "json":
        logger.info("%s", ready)
    else:
        print(f"fastgen: {ready}", file=sys.stderr, flush=True)


@contextmanager
def without_torch() -> Iterator[None]:
    """transformers, which reads tokenizers, imports torch if it finds it: seconds, and hundreds of megabytes, of no use
    in a process that runs no model. Where neither is loaded yet, it finds none."""
    hidden = "torch" not in sys.modules and "transformers" not in sys.modules
    quiet = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]
            if quiet is None:
                del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
