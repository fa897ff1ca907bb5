"""API keys, for all of the server's methods but the health service's: probes have none."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

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
        found = False
        for name, value in details.invocation_metadata or ():
            if name != "authorization":
                continue
            text = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
            scheme, _, key = text.partition(b" ")
            for known in self._keys:  # all are compared, each in constant time: the time taken tells nothing
                found |= scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), known)
        return found


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "no valid API key came with the call; send one as metadata: authorization: Bearer KEY",
    )
