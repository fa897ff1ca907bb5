"""A connection that speaks HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from fastgen.client.errors import AuthenticationError, NotBegun, RequestTimeoutError, ServerUnreachableError
from fastgen.client.retry import Deadline
from fastgen.client.transport import CONNECT_SECONDS
from fastgen.errors import EngineClosedError, FastgenError, InvalidRequestError, OverloadedError, RequestFailedError
from fastgen.types import Chunk, Response
from fastgen.wire import documents
from fastgen.wire.info import ModelInfo
from fastgen.wire.requests import GenerateRequest, StreamEvent

__all__ = ["HttpTransport"]

T = TypeVar("T")

GENERATE, MODEL, READY = "v1/fastgen/generate", "v1/fastgen/model", "ready"
MOST_IDLE = 32
"""Connections kept for later requests."""
IDLE_SECONDS = 3.0
"""How long. Less than the five after which a server closes them: a request must not meet that."""


class HttpTransport:
    """To ``http://host:port`` or ``https://...``, perhaps with a path before the server's own."""

    def __init__(self, url: str, *, api_key: str | None, ca_cert: Path | None) -> None:
        self._url = url.rstrip("/") + "/"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._ca_cert = ca_cert
        self._http: httpx.AsyncClient | None = None

    async def generate(self, request: GenerateRequest, deadline: Deadline) -> Response:
        body = documents.request_document(request, stream=False)
        async with self._answer("POST", GENERATE, deadline, body) as answer:
            return self._read(documents.read_response, await answer.aread())

    async def stream(self, request: GenerateRequest, deadline: Deadline) -> AsyncGenerator[StreamEvent, None]:
        body = documents.request_document(request, stream=True)
        async with self._answer("POST", GENERATE, deadline, body) as answer:
            async for name, data in _events(answer.aiter_bytes()):
                if name == "error":
                    raise self._error(200, _problem(data), None)
                event = self._read(documents.read_event, data)
                yield event
                if isinstance(event, Chunk) and event.usage is not None:
                    return
        raise EngineClosedError(f"the server at {self._url} ended the stream before the answer was whole")

    async def ready(self, deadline: Deadline) -> bool:
        try:
            async with self._answer("GET", READY, deadline):
                return True
        except NotBegun as refused:
            if isinstance(refused.error, ServerUnreachableError):
                raise
            return False
        except ServerUnreachableError:
            raise
        except EngineClosedError:  # 503
            return False

    async def model_info(self, deadline: Deadline) -> ModelInfo:
        async with self._answer("GET", MODEL, deadline) as answer:
            return self._read(documents.read_model_info, await answer.aread())

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    def _answer(
        self, method: str, path: str, deadline: Deadline, body: bytes | None = None
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """A successful answer, whose body is still to be read; anything else is raised. The connection is closed if the
        block ends before the body does: that is how the server hears of it."""
        return self._opened(method, path, deadline, body)

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, deadline: Deadline, body: bytes | None
    ) -> AsyncIterator[httpx.Response]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with (
                asyncio.timeout(deadline.left),
                self._open().stream(method, self._url + path, content=body, headers=headers) as answer,
            ):
                if answer.status_code != 200:
                    raise self._refused(answer, await answer.aread())
                yield answer
        except TimeoutError as error:
            if isinstance(error, FastgenError):
                raise
            raise deadline.error() from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            unreachable = ServerUnreachableError(f"no server answers at {self._url}: {error or type(error).__name__}")
            raise NotBegun(unreachable) from None
        except httpx.HTTPError as error:  # the connection broke, or what came is no HTTP
            what = str(error) or type(error).__name__
            raise EngineClosedError(
                f"the connection to {self._url} broke before the answer was whole: {what}"
            ) from None

    def _open(self) -> httpx.AsyncClient:
        if self._http is None:
            roots = None if self._ca_cert is None else str(self._ca_cert)
            tls: ssl.SSLContext | bool = ssl.create_default_context(cafile=roots) if roots else True
            self._http = httpx.AsyncClient(
                headers=self._headers,
                verify=tls,
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=MOST_IDLE, keepalive_expiry=IDLE_SECONDS
                ),
            )
        return self._http

    def _refused(self, answer: httpx.Response, body: bytes) -> FastgenError | NotBegun:
        retry_after = None
        with suppress(KeyError, ValueError):
            retry_after = float(answer.headers["Retry-After"])
        return self._error(answer.status_code, _problem(body), retry_after)

    def _error(self, status: int, problem: dict[str, Any], retry_after: float | None) -> FastgenError | NotBegun:
        """A status and the body of an error, in the shape of OpenAI's, as one of fastgen's."""
        text = str(problem.get("message") or f"{self._url} answered with status {status}")
        field = problem.get("param")
        match problem.get("code"), status:
            case "unknown_url", _:
                return FastgenError(f"the server at {self._url} is not fastgen's, or of another version: {text}")
            case (("engine_closed" | "unavailable"), 200):  # in a stream
                return EngineClosedError(text)
            case _, 429:
                wait = 1.0 if retry_after is None else retry_after
                return NotBegun(OverloadedError(text, retry_after=wait), wait)
            case _, 503 if retry_after is not None:
                return NotBegun(EngineClosedError(text), retry_after)
            case _, 502 | 503 | 504:
                return EngineClosedError(text)
            case None, code if code >= 500:  # not ours: a server in its last breath, or a proxy
                return EngineClosedError(text)
            case _, 401 | 403:
                return AuthenticationError(text)
            case _, 408:
                return RequestTimeoutError(text)
            case _, code if 400 <= code < 500:
                return InvalidRequestError(text, field=field if isinstance(field, str) else None)
            case _:
                return RequestFailedError(text)

    def _read(self, read: Callable[[bytes], T], data: bytes) -> T:
        try:
            return read(data)
        except ValueError as error:
            raise FastgenError(f"the server at {self._url} is not fastgen's, or of another version: {error}") from None


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, bytes]]:
    """Name and data of server-sent events, as our server writes them: a line each. Split at line feeds alone: JSON may
    hold what else Unicode counts as the end of a line."""
    rest = bytearray()
    async for piece in pieces:
        searched = max(0, len(rest) - 1)  # a large event comes in many pieces: each byte is looked at once
        rest += piece
        begin = 0
        while (end := rest.find(b"\n\n", searched)) >= 0:
            fields = dict(line.split(b": ", 1) for line in bytes(rest[begin:end]).split(b"\n") if b": " in line)
            begin = searched = end + 2
            if b"data" in fields:
                yield fields.get(b"event", b"message").decode(), fields[b"data"]
        del rest[:begin]


def _problem(body: bytes) -> dict[str, Any]:
    """The ``error`` of a body; empty where a proxy wrote it."""
    with suppress(ValueError, KeyError, TypeError):
        error = msgspec.json.decode(body)["error"]
        if isinstance(error, dict):
            return error
    return {}
