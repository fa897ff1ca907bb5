"""The API's description: request bodies from the pydantic models that read them, answers from the msgspec structs that
are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import Response

from fastgen.server.http.errors import ErrorBody

__all__ = ["describe", "json_answer", "json_body"]

_REF = "#/components/schemas/{name}"
_STRUCTS: dict[str, type[msgspec.Struct]] = {"ErrorBody": ErrorBody}
_MODELS: dict[str, type[BaseModel]] = {}

_REASONS = {
    400: "The request cannot be run; says which field is at fault.",
    401: "No valid API key.",
    404: "No such model.",
    405: "The path takes another method.",
    413: "The body is too large.",
    415: "The body is no JSON by its Content-Type.",
    429: "No room now; Retry-After says when to come again.",
    500: "The server's fault, or the answer failed while it was generated.",
    503: "The engine is not ready, or the server shuts down.",
}
_OF_ANY = (401,)
_OF_BODIES = (400, 413, 415)


def json_answer(
    struct: type[msgspec.Struct],
    *others: tuple[int, type[msgspec.Struct]],
    errors: tuple[int, ...] = (),
    stream: type[msgspec.Struct] | None = None,
    open_to_all: bool = False,
) -> dict[str, Any]:
    """Keywords for a route whose answer is ``struct`` as JSON.

    Args:
        others: further statuses with what they carry.
        errors: statuses of errors the route may give, beside those any may.
        open_to_all: whether it is answered without an API key.
        stream: events it sends instead (text/event-stream) where the client asks for a stream.
    """
    content: dict[str, Any] = {"application/json": {"schema": _ref(struct)}}
    if stream is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event": _ref(stream)}
    responses: dict[int, dict[str, Any]] = {200: {"description": "OK", "content": content}}
    for status in errors if open_to_all else (*_OF_ANY, *errors):
        responses[status] = _error(status)
    for status, other in others:
        responses[status] = {
            "description": _REASONS.get(status, ""),
            "content": {"application/json": {"schema": _ref(other)}},
        }
    made: dict[str, Any] = {"response_class": Response, "response_model": None, "responses": responses}
    return {**made, "openapi_extra": {"security": []}} if open_to_all else made


def json_body(
    model: type[BaseModel], answer: type[msgspec.Struct], *, errors: tuple[int, ...] = (), **more: Any
) -> dict[str, Any]:
    """The same for a route that reads a body of ``model``."""
    _MODELS[model.__name__] = model
    made = json_answer(answer, errors=(*_OF_BODIES, *errors), **more)
    schema = {"$ref": _REF.format(name=model.__name__)}
    made["openapi_extra"] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return made


def describe(app: FastAPI, *, keys: bool) -> None:
    """Have ``app.openapi()`` make the whole description, once. ``keys``: whether an API key is asked for."""

    def make() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas |= _schemas()
            _describe_events(made["paths"])
            if keys:
                made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                made["security"] = [{"key": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = make  # type: ignore[method-assign]


def _describe_events(paths: Mapping[str, Any]) -> None:
    """Of a stream, the schema is that of each event, as OpenAPI 3.2 reads one: an object of its fields' texts."""
    texts = {"data": {"type": "string"}, "event": {"type": "string"}}
    for path in paths.values():
        for operation in path.values():
            for answer in operation["responses"].values():
                events = answer.get("content", {}).get("text/event-stream")
                if events is not None:
                    events["schema"] = {"type": "object", "properties": texts, "required": ["data"]}


def _ref(struct: type[msgspec.Struct]) -> dict[str, str]:
    _STRUCTS[struct.__name__] = struct
    return {"$ref": _REF.format(name=struct.__name__)}


def _error(status: int) -> dict[str, Any]:
    return {"description": _REASONS[status], "content": {"application/json": {"schema": _ref(ErrorBody)}}}


def _schemas() -> dict[str, Any]:
    _, made = msgspec.json.schema_components(list(_STRUCTS.values()), ref_template=_REF)
    schemas: dict[str, Any] = dict(made)
    for name, model in _MODELS.items():
        schema = model.model_json_schema(ref_template=_REF.replace("{name}", "{model}"))
        nested: Mapping[str, Any] = schema.pop("$defs", {})
        schemas |= {**nested, name: schema}
    return schemas
