"""API keys, for all of the server's methods but the health service's: probes have none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from fastgen.server.keys import brings_key

__all__ = ["ApiKeys"]

OPEN = "/grpc.health.v1.Health/"


class ApiKeys(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Refuses calls whose metadata bring none of the keys (``authorization: Bearer KEY``)."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]
        self._refuse: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(OPEN) or self._known(handler_call_details):
            return await continuation(handler_call_details)
        return self._refuse

    def _known(self, details: grpc.HandlerCallDetails) -> bool:
        values = [value for name, value in details.invocation_metadata or () if name == "authorization"]
        texts = (one if isinstance(one, bytes) else one.encode("utf-8", "surrogateescape") for one in values)
        return any(brings_key(text, self._keys) for text in texts)


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "no valid API key came with the call; send one as metadata: authorization: Bearer KEY",
    )
