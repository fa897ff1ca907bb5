"""``create_server``: the gRPC server over a service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fastgen.errors import ConfigError
from fastgen.server.admission import Admission
from fastgen.server.grpc.auth import ApiKeys
from fastgen.server.grpc.health import Health
from fastgen.server.grpc.service import handlers
from fastgen.server.native import Native
from fastgen.server.service import Service
from fastgen.server.settings import ServerConfig
from fastgen.wire import proto

__all__ = ["GrpcServer", "create_server"]


def create_server(
    service: Service, admission: Admission, *, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> GrpcServer:
    """The server's gRPC side, to be started in the event loop it shall run in. It ends neither ``service`` nor
    ``admission``. Calls without a valid key do not reach ``interceptors``."""
    return GrpcServer(service, admission, interceptors)


class GrpcServer:
    """Listens on ``settings.host`` and ``settings.grpc_port``."""

    def __init__(
        self, service: Service, admission: Admission, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    ) -> None:
        self._service = service
        keys = [ApiKeys(service.settings.api_key)] if service.settings.api_key else []
        self._interceptors = [*keys, *interceptors]
        self._native = Native(service, admission)
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Begin to listen.

        Returns:
            The port.

        Raises:
            ConfigError: it cannot listen there, or the TLS files are not what they should be.
        """
        settings = self._service.settings
        server = grpc.aio.server(interceptors=self._interceptors, options=_options(settings))
        self._health = Health(self._native)
        server.add_generic_rpc_handlers([handlers(self._service, self._native)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((proto.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        port = _listen(server, settings)
        await self._health.look()
        await server.start()
        self._server = server
        self._looking = asyncio.create_task(self._health.keep_looking(), name="fastgen-grpc-health")
        return port

    async def stop(self, grace: float | None = None) -> None:
        """Take no new calls, and end those in flight after ``grace`` seconds; unset, at once. The port is free
        afterwards. Stopping twice, or what was not started, is harmless."""
        server, self._server = self._server, None
        if server is None:
            return
        assert self._health is not None
        assert self._looking is not None
        self._looking.cancel()
        await self._health.enter_graceful_shutdown()  # whoever watches hears of it
        await server.stop(grace)


def _listen(server: grpc.aio.Server, settings: ServerConfig) -> int:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.grpc_port or 0}"
    try:
        if settings.tls_cert is None or settings.tls_key is None:
            port = server.add_insecure_port(address)
        else:
            chain, key = Path(settings.tls_cert).read_bytes(), Path(settings.tls_key).read_bytes()
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"gRPC cannot listen on {address}: {error}") from error
    if not port:
        raise ConfigError(f"gRPC cannot listen on {address}; is the port taken?")
    return port


def _options(settings: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.body_limit),
        ("grpc.max_send_message_length", -1),  # an answer may be large: log-probabilities of all its tokens
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            5_000,
        ),  # clients look whether we live, in a long wait
        ("grpc.keepalive_time_ms", 60_000),  # and we look, too: a machine that is gone says no goodbye
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error, not half of the calls
    ]
