"""``/v1/models``, and which model a request means."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from fastgen.server.http.answers import Model, ModelList
from fastgen.server.http.openapi import json_answer
from fastgen.server.native import adapter_of
from fastgen.server.service import Service

__all__ = ["name_of", "router"]


def name_of(service: Service, asked: str | None) -> str:
    """The name that answers carry: the one asked for, else the model's first.

    Raises:
        UnknownModelError: no model or adapter has that name.
    """
    adapter_of(service, asked)
    return service.names[0] if asked is None else asked


def router(service: Service) -> APIRouter:
    made = APIRouter(prefix="/v1/models", tags=["models"])

    def describe(name: str) -> Model:
        return Model(
            id=name,
            created=service.created,
            root=service.info.name,
            parent=None if adapter_of(service, name) is None else service.names[0],
            max_model_len=service.info.max_model_len,
        )

    @made.get("", **json_answer(ModelList))
    async def models() -> Response:
        """All names a request may use."""
        return _json(ModelList(data=[describe(name) for name in service.names]))

    @made.get("/{model:path}", **json_answer(Model, errors=(404,)))
    async def model(model: str) -> Response:
        """One of them."""
        return _json(describe(name_of(service, model)))

    return made


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
