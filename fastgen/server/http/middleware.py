"""What stands round every route: a request id, a net for unexpected errors, API keys, a limit on the body's size."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.errors import OverloadedError
from fastgen.server.http.errors import INTERNAL, RequestRefused, error_response
from fastgen.server.keys import brings_key
from fastgen.server.logs import about_request

__all__ = ["ApiKeys", "BodyLimit", "RequestIds", "request_id_of"]

logger = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_of(scope: Scope) -> str:
    """The id of the HTTP request, as its ``X-Request-Id`` header says."""
    return str(scope.get("state", {}).get("request_id", ""))


class RequestIds:
    """Gives each request an id, the client's own ``X-Request-Id`` where that is sane, and answers 500 to what nobody
    foresaw: the traceback goes to the log, under the id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def named_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        with about_request(request_id):
            try:
                await self._app(scope, receive, named_send)
            except Exception:
                logger.exception("unexpected error")
                if started:
                    raise  # the connection is cut, so that nobody takes the answer for whole
                error = RequestRefused(500, INTERNAL, code="internal_error", kind="server_error")
                await error_response(error)(scope, receive, named_send)


class ApiKeys:
    """Refuses requests that bring none of the keys, except to paths that are open to everyone."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or self._known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = RequestRefused(
            401,
            "no valid API key came with the request; send one as: Authorization: Bearer KEY",
            code="invalid_api_key",
            kind="authentication_error",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        return brings_key(headers.get("authorization", "").encode("utf-8", "surrogateescape"), self._keys)


class BodyLimit:
    """Refuses bodies above a size: at once where the length is announced, else as soon as too much has come. So
    are those that would be too much with all others: a body lies here while its request is read, waits and runs."""

    def __init__(self, app: ASGIApp, limit: int, limit_of_all: int) -> None:
        """Both in bytes."""
        self._app, self._limit, self._limit_of_all = app, limit, limit_of_all
        self._came_of_all = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isascii() and announced.isdigit() and int(announced[:20]) > self._limit:
            await error_response(self._too_large())(scope, receive, send)
            return
        came = 0

        async def counted_receive() -> Message:
            nonlocal came
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                came += size
                self._came_of_all += size
                if came > self._limit:
                    raise self._too_large()
                if self._came_of_all > self._limit_of_all:
                    raise OverloadedError(
                        f"the server is full: the requests in flight have more than {self._limit_of_all} bytes; try "
                        f"again later",
                        retry_after=1.0,
                    )
            return message

        try:
            await self._app(scope, counted_receive, send)
        finally:
            self._came_of_all -= came

    def _too_large(self) -> RequestRefused:
        return RequestRefused(
            413,
            f"the request is larger than {self._limit} bytes (max_request_size)",
            code="request_too_large",
            headers={"Connection": "close"},
        )
