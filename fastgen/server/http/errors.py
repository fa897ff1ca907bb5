"""Errors as clients of OpenAI's API parse them: ``{"error": {"message", "type", "param", "code"}}``, on every route."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fastgen.errors import (
    EngineClosedError,
    FastgenError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    first_problem,
)
from fastgen.server.admission import DrainingError
from fastgen.server.native import NotReadyError, UnknownModelError

__all__ = [
    "ClientGone",
    "ErrorBody",
    "ErrorDetail",
    "RequestAborted",
    "RequestRefused",
    "error_response",
    "install",
    "refusal",
]

logger = logging.getLogger(__name__)

INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"
INTERNAL = "internal error; the server's log says more, under this request's id (X-Request-Id)"
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; logs do."""


class ErrorDetail(msgspec.Struct):
    message: str
    """For a person."""
    type: str
    param: str | None = None
    """The field of the request at fault, where there is one."""
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class RequestRefused(FastgenError):
    """A refusal with an HTTP status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """The client closed the connection before its answer was there."""


class RequestAborted(FastgenError):
    """The server ended the request before its answer was whole."""


def refusal(error: FastgenError) -> RequestRefused:
    """Any of fastgen's errors as one with a status."""
    match error:
        case RequestRefused():
            return error
        case UnknownModelError():
            return RequestRefused(404, str(error), param=error.field, code="model_not_found")
        case InvalidRequestError():
            return RequestRefused(400, str(error), param=error.field, code="invalid_value")
        case OverloadedError():
            after = {"Retry-After": str(math.ceil(error.retry_after))}
            return RequestRefused(429, str(error), code="rate_limit_exceeded", kind="rate_limit_error", headers=after)
        case DrainingError() | NotReadyError():
            return RequestRefused(503, str(error), code="unavailable", kind=UNAVAILABLE, headers={"Retry-After": "1"})
        case EngineClosedError() | RequestAborted():  # it had begun: whoever sends it again may get it twice
            return RequestRefused(503, str(error), code="unavailable", kind=UNAVAILABLE)
        case RequestFailedError():
            return RequestRefused(500, str(error), code="request_failed", kind="server_error")
        case _:
            logger.error("a request met an error that has no status of its own", exc_info=error)
            return RequestRefused(500, INTERNAL, code="internal_error", kind="server_error")


def body_of(error: RequestRefused) -> ErrorBody:
    return ErrorBody(ErrorDetail(_safe(str(error)), error.kind, error.param and _safe(error.param), error.code))


def error_response(error: FastgenError) -> Response:
    refused = refusal(error)
    return Response(
        msgspec.json.encode(body_of(refused)),
        status_code=refused.status,
        media_type="application/json",
        headers=refused.headers,
    )


def install(app: FastAPI) -> None:
    """Every error of the framework and of fastgen in that shape."""
    app.add_exception_handler(FastgenError, _ours)
    app.add_exception_handler(ClientGone, _nobody)
    app.add_exception_handler(ClientDisconnect, _nobody)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(RequestValidationError, _validation)


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, FastgenError)
    return error_response(error)


async def _framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"there is no {request.method} {request.url.path[:200]}", "unknown_url"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message, code = f"{request.url.path[:200]} takes {allowed}, not {request.method}", "method_not_allowed"
    return error_response(RequestRefused(error.status_code, message, code=code, headers=error.headers))


async def _validation(request: Request, error: Exception) -> Response:
    """Of path and query parameters; bodies are read by ``fastgen.server.http.body``."""
    assert isinstance(error, RequestValidationError)
    problems: list[dict[str, Any]] = [{**one, "loc": one["loc"][1:]} for one in error.errors()]
    field, text = first_problem(problems, (), what="parameter")
    return error_response(InvalidRequestError(text, field=field))


def _safe(text: str) -> str:
    """Text that can be encoded, and no longer than a message should be."""
    text = text if len(text) <= 2000 else f"{text[:1997]}..."
    return text.encode("utf-8", "replace").decode()
