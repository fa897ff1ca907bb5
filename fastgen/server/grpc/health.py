"""The standard health service, told by the backend's state."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2

from fastgen.server.native import Native
from fastgen.wire import proto

__all__ = ["Health"]

SECONDS = 0.2
"""Between two looks at the backend, for those who watch."""

NAMES = ("", proto.SERVICE)
"""Asked for as a whole, or by the service's name."""


class Health(health.aio.HealthServicer):  # type: ignore[misc, unused-ignore]
    """SERVING while requests are taken; NOT_SERVING while the model loads, an engine is being restarted, or the server
    shuts down. ``Check`` looks afresh, ``Watch`` hears of changes."""

    def __init__(self, native: Native) -> None:
        super().__init__()
        self._native = native
        self._told: bool | None = None

    async def Check(self, request: Any, context: Any) -> Any:
        await self.look()
        return await super().Check(request, context)

    async def keep_looking(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(SECONDS)

    async def look(self) -> None:
        ready = self._native.ready
        if ready != self._told:
            self._told = ready
            status = health_pb2.HealthCheckResponse
            for name in NAMES:
                await self.set(name, status.SERVING if ready else status.NOT_SERVING)
