"""A connection that speaks gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from fastgen.client.errors import AuthenticationError, NotBegun, ServerUnreachableError
from fastgen.client.retry import Deadline
from fastgen.errors import EngineClosedError, FastgenError, InvalidRequestError, OverloadedError, RequestFailedError
from fastgen.types import Response
from fastgen.wire import proto
from fastgen.wire.info import ModelInfo
from fastgen.wire.pb import fastgen_pb2 as pb
from fastgen.wire.requests import GenerateRequest, StreamEvent

__all__ = ["GrpcTransport"]

M = TypeVar("M", bound=Message)

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a server that comes back is found at once
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 30_000),  # a server whose machine is gone says no goodbye
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # however long it is silent
    ("grpc.enable_retries", 0),  # the client's own are counted, and know what is safe
)

NO_CONNECTION = ("failed to connect", "connection refused", "name resolution", "dns resolution", "connect failed")
"""How gRPC says, in the details of UNAVAILABLE, that nothing was ever sent. It has no code of its own for that."""


class GrpcTransport:
    """To ``host:port``. The channel is made in the background loop, at the first call."""

    def __init__(self, target: str, *, api_key: str | None, tls: bool, ca_cert: Path | None) -> None:
        self._target = target
        self._metadata = [] if api_key is None else [("authorization", f"Bearer {api_key}")]
        self._tls, self._ca_cert = tls, ca_cert
        self._channel: grpc.aio.Channel | None = None

    async def generate(self, request: GenerateRequest, deadline: Deadline) -> Response:
        return proto.response(await self._call("Generate", proto.request_message(request), pb.Response, deadline))

    async def stream(self, request: GenerateRequest, deadline: Deadline) -> AsyncGenerator[StreamEvent, None]:
        method = self._open().unary_stream(
            f"/{proto.SERVICE}/GenerateStream",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.StreamEvent.FromString,
        )
        call = method(proto.request_message(request), timeout=deadline.left, metadata=self._metadata)
        try:
            async for message in call:
                yield proto.event(message)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, deadline) from None
        finally:
            call.cancel()  # unless it is over

    async def ready(self, deadline: Deadline) -> bool:
        method = self._open().unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await method(health_pb2.HealthCheckRequest(), timeout=deadline.left, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, deadline) from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def model_info(self, deadline: Deadline) -> ModelInfo:
        message = await self._call("ModelInfo", pb.ModelInfoRequest(), pb.ModelInfoResponse, deadline)
        return proto.model_info(message)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _call(self, name: str, request: Message, answer: type[M], deadline: Deadline) -> M:
        method = self._open().unary_unary(
            f"/{proto.SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            result: M = await method(request, timeout=deadline.left, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, deadline) from None
        return result

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            if self._tls:
                roots = None if self._ca_cert is None else self._ca_cert.read_bytes()
                credentials = grpc.ssl_channel_credentials(roots)
                self._channel = grpc.aio.secure_channel(self._target, credentials, options=OPTIONS)
            else:
                self._channel = grpc.aio.insecure_channel(self._target, options=OPTIONS)
        return self._channel

    def _error(self, error: grpc.aio.AioRpcError, deadline: Deadline) -> FastgenError | NotBegun:
        """A status as one of fastgen's errors; see ``fastgen.server.grpc.errors`` for what the server says."""
        code, text = error.code(), error.details() or error.code().name
        told: dict[str, Any] = dict(error.trailing_metadata() or ())
        retry_after: float | None = None
        with suppress(KeyError, ValueError):
            retry_after = float(told["retry-after"])
        status = grpc.StatusCode
        match code:
            case status.INVALID_ARGUMENT | status.NOT_FOUND:
                field = told.get("fastgen-field")
                return InvalidRequestError(text, field=None if field is None else unquote(field))
            case status.RESOURCE_EXHAUSTED if retry_after is not None:
                return NotBegun(OverloadedError(text, retry_after=retry_after), retry_after)
            case status.RESOURCE_EXHAUSTED:
                return InvalidRequestError(f"the request is too large for the server: {text}")
            case status.UNAVAILABLE if retry_after is not None:
                return NotBegun(EngineClosedError(text), retry_after)
            case status.UNAVAILABLE if any(words in text.lower() for words in NO_CONNECTION):
                return NotBegun(ServerUnreachableError(f"no server answers at {self._target}: {text}"))
            case status.UNAVAILABLE | status.CANCELLED:
                return EngineClosedError(f"the server ended the request, or is gone: {text}")
            case status.DEADLINE_EXCEEDED:
                return deadline.error()
            case status.UNAUTHENTICATED | status.PERMISSION_DENIED:
                return AuthenticationError(text)
            case status.UNIMPLEMENTED:
                return FastgenError(f"the server at {self._target} is not fastgen's, or of another version: {text}")
            case _:
                return RequestFailedError(text)
