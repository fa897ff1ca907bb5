"""The ASGI application: all routes and what stands round them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from fastgen.server import metrics
from fastgen.server.admission import Admission
from fastgen.server.http import chat, completions, errors, generate, health, models, openapi, tokens
from fastgen.server.http.middleware import ApiKeys, BodyLimit, RequestIds
from fastgen.server.observe import Observed
from fastgen.server.page import routes as page
from fastgen.server.service import Service

__all__ = ["create_app"]

BODIES = 16
"""Largest bodies that lie in memory at once; of smaller ones, more."""
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered without an API key: probes have none."""


def create_app(service: Service, admission: Admission) -> FastAPI:
    """The server's HTTP side. It starts and ends nothing: whoever made ``service`` does.

    Metrics and the page need a loop that looks on: an ``Observed`` as the loop of ``service.verbs``.
    """
    settings = service.settings
    app = FastAPI(
        title="fastgen",
        version=service.info.version,
        description="Large language models, served through OpenAI's API.",
        docs_url="/docs" if settings.docs else None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_url="/openapi.json" if settings.docs else None,
    )
    app.include_router(health.router(service, admission))
    app.include_router(models.router(service))
    app.include_router(completions.router(service, admission))
    app.include_router(chat.router(service, admission))
    app.include_router(tokens.router(service))
    app.include_router(generate.router(service, admission))
    observed = service.verbs.loop
    if settings.metrics and isinstance(observed, Observed):
        app.include_router(metrics.router(service, observed))
    if settings.page and isinstance(observed, Observed):
        app.include_router(page.router(service, observed))
    errors.install(app)
    openapi.describe(app, keys=bool(settings.api_key))
    # The last added stands outermost.
    app.add_middleware(BodyLimit, limit=settings.body_limit, limit_of_all=BODIES * settings.body_limit)
    if settings.api_key:
        open_paths = OPEN_PATHS | page.PATHS if settings.page else OPEN_PATHS
        app.add_middleware(ApiKeys, keys=settings.api_key, open_paths=open_paths)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    if settings.metrics and isinstance(observed, Observed):
        app.add_middleware(metrics.HttpCounts, observed=observed)
    app.add_middleware(RequestIds)
    return app
