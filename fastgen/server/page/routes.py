"""The page's routes: its files, what it must know before it asks for a key, and the live events."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from fastgen.server.observe import Observed
from fastgen.server.page.live import Live
from fastgen.server.service import Service

__all__ = ["PATHS", "router"]

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    **dict.fromkeys(("theme.css", "style.css", "chat.css", "live.css"), "text/css; charset=utf-8"),
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(
        ("api.js", "app.js", "chart.js", "chat.js", "dom.js", "live.js", "settings.js", "store.js", "text.js"),
        "text/javascript; charset=utf-8",
    ),
}
PATHS = frozenset({"/", "/page/about", *(f"/page/{name}" for name in _TYPES if name != "index.html")})
"""Answered without an API key: they say nothing of the model or its users. ``/live`` does and is not among them."""

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text cannot become markup or code, whatever a script does with it: such an assignment throws.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asks each time, and is told 304
}


def router(service: Service, observed: Observed) -> APIRouter:
    """``/``, its files under ``/page/``, and ``/live``."""
    observed.follow(service.backend)
    live = Live(service, observed)
    about = json.dumps({"needs_key": bool(service.settings.api_key), "version": service.info.version}).encode()
    routes = APIRouter(include_in_schema=False)
    for name, content_type in _TYPES.items():
        path = "/" if name == "index.html" else f"/page/{name}"
        routes.add_api_route(path, _file(name, content_type), methods=["GET", "HEAD"])

    @routes.get("/page/about")
    async def about_page() -> Response:
        return Response(about, media_type="application/json", headers=_HEADERS)

    @routes.get("/live")
    async def live_events() -> Response:
        if live.closed:
            return _refusal(503, "the server is shutting down", "draining")
        if live.full:
            return _refusal(429, "too many viewers watch already; close one or try again later", "too_many_viewers")
        return StreamingResponse(
            live.events(),
            media_type="text/event-stream",
            headers={**_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return routes


def _file(name: str, content_type: str) -> Callable[..., object]:
    """A handler for one of the page's files, which is read once."""
    content = files("fastgen.server.page").joinpath("static", name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = {**_HEADERS, "ETag": tag, "Content-Type": content_type}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if tag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers={**_HEADERS, "ETag": tag})
        return Response(content, headers=headers)

    return serve


def _refusal(status: int, message: str, code: str) -> Response:
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return Response(
        json.dumps({"error": error}), status, media_type="application/json", headers={**_HEADERS, "Retry-After": "5"}
    )
