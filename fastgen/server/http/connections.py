"""Bounds on what clients can hold without asking for anything: connections, and heads that never end."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedProtocol"]

HEAD_SECONDS = 20.0
"""How long a client may take from connecting, or from the first byte of a further request, to the end of the head."""
MOST_CONNECTIONS = 8192
SPARE_FILES = 128
"""Of the files this process may open, for everything else: engines, models, logs."""

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
_TEXT = (
    b'{"error":{"message":"the server has too many connections; try again later",'
    b'"type":"service_unavailable_error","param":null,"code":"unavailable"}}'
)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, which bounds neither: for ``uvicorn.Config(http=BoundedProtocol)``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.write(_FULL % (len(_TEXT), _TEXT))
            transport.close()
            return
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._begin()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end()
        super().on_headers_complete()

    def _begin(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _end(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


def most_connections() -> int:
    """As many as there are files to be had for, if that is fewer."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, files - SPARE_FILES))
