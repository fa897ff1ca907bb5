"""What a client needs of a connection, whatever it speaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from fastgen.client.retry import Deadline
from fastgen.types import Response
from fastgen.wire.info import ModelInfo
from fastgen.wire.requests import GenerateRequest, StreamEvent

__all__ = ["CONNECT_SECONDS", "Transport"]

CONNECT_SECONDS = 10.0
"""Longest wait for a connection to be made."""


class Transport(Protocol):
    """Every method runs in the client's background loop, and raises fastgen's errors; or ``NotBegun``, where the
    request may be sent again."""

    async def generate(self, request: GenerateRequest, deadline: Deadline) -> Response: ...

    def stream(self, request: GenerateRequest, deadline: Deadline) -> AsyncGenerator[StreamEvent, None]:
        """Closing it ends the request on the server. Ends with the chunk that has the usage; a connection that breaks
        before is an error."""

    async def ready(self, deadline: Deadline) -> bool:
        """Whether the server takes requests. It may not: no error."""

    async def model_info(self, deadline: Deadline) -> ModelInfo: ...

    async def close(self) -> None: ...
