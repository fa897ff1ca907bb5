"""Request bodies: strict JSON, then a pydantic model, with errors that name the field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from fastgen.errors import InvalidRequestError, did_you_mean
from fastgen.server.aside import LARGE_BYTES, aside
from fastgen.server.http.errors import RequestRefused
from fastgen.wire import strict_json

__all__ = ["parse_json", "read_body", "read_json", "with_body"]

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

BODY_SECONDS = 60.0
"""How long a client may take to send its body."""


async def read_body(request: Request, model: type[M]) -> M:
    """The body as ``model``.

    Raises:
        RequestRefused: no JSON, or JSON of another shape, with the status for it.
        InvalidRequestError: a field is missing, unknown or holds a wrong value; names it.
    """
    raw = await _read(request)
    return await aside(len(raw) > LARGE_BYTES, lambda: _validated(parse_json(raw), model))


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object; raises as ``read_body``."""
    raw = await _read(request)
    return await aside(len(raw) > LARGE_BYTES, lambda: parse_json(raw))


async def with_body(request: Request, function: Callable[[], T]) -> T:
    """What ``function`` gives, which goes through the request's body, read before: in a thread if that is large."""
    return await aside(len(await request.body()) > LARGE_BYTES, function)


async def _read(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # Also what keeps other sites' pages out: a browser asks before it sends this type across origins.
        raise RequestRefused(
            415,
            f"the Content-Type is {kind[:100]!r}; send the body as application/json",
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.body()
    except TimeoutError:
        raise RequestRefused(
            408,
            f"the body did not come within {BODY_SECONDS:g} s",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None


def _validated(value: dict[str, Any], model: type[M]) -> M:
    for name in value:
        if name not in model.model_fields:  # before pydantic lists them all
            raise _unknown(name, name, model.model_fields)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _problem(error.errors(include_url=False), model) from None


def parse_json(raw: bytes) -> dict[str, Any]:
    """A JSON object, read as the standard has it: UTF-8, no NaN or Infinity, no key twice, no half characters.

    Raises:
        InvalidRequestError: it is anything else; says where.
    """
    try:
        value = strict_json.read_json(raw.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: byte {error.start} is out of place") from None
    except strict_json.RefusedJsonError as error:
        raise InvalidRequestError(f"the body is not JSON that can be used: {error}") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, and is {_json_type(value)}")
    return value


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _problem(errors: Sequence[Mapping[str, Any]], model: type[BaseModel]) -> InvalidRequestError:
    """The first of pydantic's errors."""
    error = errors[0]
    path = [str(part) for part in error["loc"]]
    field = ".".join(path) or None
    if error["type"] == "extra_forbidden":
        return _unknown(field or "", path[-1], model.model_fields if len(path) == 1 else ())
    if error["type"] == "missing":
        return InvalidRequestError(f"{field} is missing", field=field)
    text = str(error["msg"]).removeprefix("Value error, ")
    if field is None:
        own = str(error.get("ctx", {}).get("field") or "") or None
        return InvalidRequestError(text, field=own)
    given = "" if "got" in text else f" (got {_short(error['input'])})"
    return InvalidRequestError(f"{field}: {text}{given}", field=field)


def _unknown(field: str, name: str, known: Iterable[str]) -> InvalidRequestError:
    return InvalidRequestError(f"unknown field {_short(field)}.{did_you_mean(name, known)}", field=field)


def _short(value: object) -> str:
    text = repr(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
