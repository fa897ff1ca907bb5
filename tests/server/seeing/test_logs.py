"""Log lines: uvicorn's too, with request ids, without keys, queries or lines that somebody else made up."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fastgen.server import logs

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w.]+ ")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    others = {
        name: (list(logger.handlers), list(logger.filters), logger.propagate, logger.level)
        for name in ("uvicorn", "uvicorn.access", "uvicorn.error", "uvicorn.asgi", "httpx", "httpcore", "asyncio")
        for logger in [logging.getLogger(name)]
    }
    yield
    root.handlers[:], root.level = handlers, level
    for name, (its_handlers, filters, propagate, its_level) in others.items():
        logger = logging.getLogger(name)
        logger.handlers[:], logger.filters[:], logger.propagate = its_handlers, filters, propagate
        logger.setLevel(its_level)


def test_text_lines() -> None:
    out = io.StringIO()
    logs.configure("info", "text", stream=out)
    logger = logging.getLogger("fastgen.server")
    logger.info("hello %s", "you")
    logger.debug("not shown")
    with logs.about_request("id-1"):
        logger.warning("inside")
    first, second = out.getvalue().splitlines()
    assert LINE.match(first)
    assert first.endswith("INFO fastgen.server hello you")
    assert second.endswith("WARNING fastgen.server [id-1] inside")


def test_json_lines() -> None:
    out = io.StringIO()
    logs.configure("debug", "json", stream=out)
    with logs.about_request("id-2"):
        try:
            raise ValueError("bad\nthing")
        except ValueError:
            logging.getLogger("x").exception("it \u2028 failed")
    logging.getLogger("x").debug("second")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert {key: first[key] for key in ("level", "logger", "message", "request_id")} == {
        "level": "error",
        "logger": "x",
        "message": "it \u2028 failed",
        "request_id": "id-2",
    }
    assert first["time"].endswith("+00:00")
    assert "ValueError: bad\nthing" in first["traceback"]
    assert "request_id" not in second


def test_nobody_makes_up_lines() -> None:
    out = io.StringIO()
    logs.configure("info", "text", stream=out)
    forged = "2026-01-01 00:00:00.000 INFO fastgen.server all is well"
    logging.getLogger("x").info("asked for %s", f"\x1b[2J\r\n{forged}\u2028{forged}\u202e")
    try:
        raise RuntimeError(f"oops\n{forged}\x07")
    except RuntimeError:
        logging.getLogger("x").exception("failed")
    lines = out.getvalue().split("\n")
    assert sum(bool(LINE.match(line)) for line in lines) == 2
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u2028\u202e]", out.getvalue())
    assert "\\x1b[2J\\r\\n2026" in lines[0]


@pytest.mark.parametrize("form", ["text", "json"])
def test_keys_are_never_written(form: str) -> None:
    out = io.StringIO()
    logs.configure("info", form, secrets=("sk-one", "sk-one-longer"), stream=out)  # type: ignore[arg-type]
    logger = logging.getLogger("x")
    logger.info("key %s and %s", "sk-one", "sk-one-longer")
    logger.info("Authorization: Bearer some-other-key, and more")
    try:
        raise RuntimeError("with sk-one")
    except RuntimeError:
        logger.exception("failed")
    assert "sk-one" not in out.getvalue()
    assert "longer" not in out.getvalue()
    assert "some-other-key" not in out.getvalue()
    assert "and more" in out.getvalue()


def test_long_messages_are_cut_and_bad_calls_survive() -> None:
    out = io.StringIO()
    logs.configure("info", "text", stream=out)
    logging.getLogger("x").info("a" * 100_000)
    logging.getLogger("x").info("%d apples", "three")
    assert len(out.getvalue()) < 10_000
    assert "arguments that do not fit" in out.getvalue()


class Named:
    """What the HTTP door does."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        with logs.about_request(headers.get(b"x-request-id", b"none").decode()):
            return await self.app(scope, receive, send)


def test_uvicorns_access_log_has_the_ids_and_no_query() -> None:
    out = io.StringIO()
    app = FastAPI()

    @app.get("/slow/{name}")
    async def slow(name: str) -> str:
        await asyncio.sleep(0.05)  # so that the requests overlap
        logging.getLogger("app").info("serving %s", name)
        return name

    @app.get("/health")
    async def health(bad: bool = False) -> JSONResponse:
        return JSONResponse("state", 503 if bad else 200)

    app.add_middleware(Named)

    async def serve() -> None:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
        running = asyncio.create_task(server.serve())
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                await asyncio.gather(
                    *(client.get(f"/slow/{i}?secret=query", headers={"X-Request-Id": f"id-{i}"}) for i in range(4))
                )
                await client.get("/health")
                await client.get("/health?bad=1")
        finally:
            server.should_exit = True
            await running

    logs.configure("info", "json", stream=out)
    asyncio.run(asyncio.wait_for(serve(), 60))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    access = [line for line in lines if line["logger"] == "uvicorn.access"]
    assert {(line["path"], line["request_id"], line["status"], line["method"]) for line in access} == {
        *((f"/slow/{i}", f"id-{i}", 200, "GET") for i in range(4)),
        ("/health", "none", 503, "GET"),  # that all is well is not worth a line each time
    }
    serving = [line for line in lines if line["logger"] == "app"]
    assert {(line["message"], line["request_id"]) for line in serving} == {
        (f"serving {i}", f"id-{i}") for i in range(4)
    }
    assert any(line["logger"] == "uvicorn.error" for line in lines)
    assert "secret" not in out.getvalue()
