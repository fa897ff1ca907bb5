"""Whether the server lives, and whether it takes requests: for probes, load balancers and people."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from fastgen.server.admission import Admission
from fastgen.server.http.openapi import json_answer
from fastgen.server.service import Service, State

__all__ = ["router"]


DETAILS: dict[State, str] = {
    "ready": "",
    "starting": "the model is being loaded",
    "draining": "the server is shutting down",
    "restarting": "the engine died and is being started again",
    "failed": "the engine died and is not started again; the server's log says why",
}
"""In general: everyone may ask, and why an engine died is the operator's business."""


class Health(msgspec.Struct):
    status: State
    detail: str = ""
    """Why it is not ready, for people."""


class Version(msgspec.Struct):
    version: str
    """Of fastgen."""


def router(service: Service, admission: Admission) -> APIRouter:
    made = APIRouter(tags=["server"])

    @made.get("/health", **json_answer(Health, (503, Health), open_to_all=True))
    async def health() -> Response:
        """200 while the engine works, shutting down or not; 503 while it starts, restarts or has failed."""
        state = service.backend.state
        return _answer(state, 200 if state in ("ready", "draining") else 503)

    @made.get("/ready", **json_answer(Health, (503, Health), open_to_all=True))
    async def ready() -> Response:
        """200 if requests are taken: the engine is ready, and the server is not shutting down."""
        state = service.backend.state
        if admission.draining and state != "failed":
            state = "draining"
        return _answer(state, 200 if state == "ready" else 503)

    @made.get("/version", **json_answer(Version))
    async def version() -> Response:
        return Response(msgspec.json.encode(Version(service.info.version)), media_type="application/json")

    def _answer(state: State, status: int) -> Response:
        return Response(
            msgspec.json.encode(Health(state, DETAILS[state])), status_code=status, media_type="application/json"
        )

    return made
