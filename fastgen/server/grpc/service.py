"""The methods of ``fastgen.v1.Fastgen``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import NoReturn

import grpc

from fastgen.server.aside import LARGE_BYTES, LARGE_ENTRIES, aside, weight
from fastgen.server.grpc.errors import Refusal, refusal
from fastgen.server.native import Native
from fastgen.server.service import Service
from fastgen.wire import proto
from fastgen.wire.requests import GenerateRequest, StreamEvent

__all__ = ["handlers"]

Context = grpc.aio.ServicerContext[bytes, bytes]


def handlers(service: Service, native: Native) -> grpc.GenericRpcHandler:
    """Requests are parsed in the methods and not by gRPC, whose own answer to bytes that are no message is INTERNAL."""
    methods = _Methods(service, native)
    return grpc.method_handlers_generic_handler(
        proto.SERVICE,
        {
            "Generate": grpc.unary_unary_rpc_method_handler(methods.generate),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(methods.generate_stream),
            "ModelInfo": grpc.unary_unary_rpc_method_handler(methods.model_info),
        },
    )


class _Methods:
    """A client that cancels, is gone, or whose deadline has passed cancels the method's task, and that aborts the
    request."""

    def __init__(self, service: Service, native: Native) -> None:
        self._service = service
        self._native = native

    async def generate(self, data: bytes, context: Context) -> bytes:
        try:
            async with asyncio.timeout(context.time_remaining()):
                response = await self._native.answer(await _request(data))
                large = weight(response) > LARGE_ENTRIES
                return await aside(large, lambda: proto.response_message(response).SerializeToString())
        except Exception as error:
            await _abort(context, refusal(error))

    async def generate_stream(self, data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            async with asyncio.timeout(context.time_remaining()):
                async with aclosing(self._native.stream(await _request(data))) as events:
                    async for event in events:
                        yield await _event(event)
        except Exception as error:
            await _abort(context, refusal(error))

    async def model_info(self, _: bytes, context: Context) -> bytes:
        return proto.model_info_message(self._service.info).SerializeToString()


async def _request(data: bytes) -> GenerateRequest:
    return await aside(len(data) > LARGE_BYTES, lambda: proto.parse_request(data))


async def _event(event: StreamEvent) -> bytes:
    return await aside(weight(event) > LARGE_ENTRIES, lambda: proto.event_message(event).SerializeToString())


async def _abort(context: Context, refused: Refusal) -> NoReturn:
    await context.abort(refused.code, refused.message, refused.metadata)
