"""Logs of the whole server, uvicorn's too: lines for people or JSON, with the id of the request they are about.

Nothing of a request's content is logged by the server, nor its keys. What comes from outside all the same (paths,
messages of errors) cannot make up lines: control characters are escaped.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import IO, Literal

__all__ = ["JsonLines", "TextLines", "about_request", "configure", "request_id"]

request_id: ContextVar[str] = ContextVar("fastgen_request_id", default="")
"""Of the request that the running task serves; empty outside of any."""

_UVICORN = ("uvicorn", "uvicorn.access", "uvicorn.error", "uvicorn.asgi")
_PROBES = {"/health", "/ready", "/metrics"}
_LOUD = {"httpx": logging.WARNING, "httpcore": logging.WARNING, "asyncio": logging.WARNING}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s'\",;]+")
_HIDDEN = "[key]"
_LONGEST = 4000
"""Characters of a message; tracebacks may be longer."""


def configure(
    level: str = "info",
    form: Literal["text", "json"] = "text",
    *,
    secrets: Iterable[str] = (),
    stream: IO[str] | None = None,
) -> None:
    """Set up this process's logging, instead of whatever was set up before. uvicorn is to be run with
    ``log_config=None``.

    Args:
        level: of the root logger: debug, info, warning or error.
        form: lines for people, or a JSON object each.
        secrets: texts that are never written: the API keys.
        stream: unset: standard error.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter((JsonLines if form == "json" else TextLines)(secrets))
    handler.addFilter(_note_request)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    access = logging.getLogger("uvicorn.access")
    access.filters.clear()
    access.addFilter(_access)
    for name, at_least in _LOUD.items():
        logging.getLogger(name).setLevel(max(at_least, root.level))


@contextmanager
def about_request(name: str) -> Iterator[None]:
    """What is logged inside, in this task and those it starts, bears the request's id."""
    token = request_id.set(name)
    try:
        yield
    finally:
        request_id.reset(token)


class _Lines(logging.Formatter):
    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        found = sorted({text for text in secrets if text}, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, found))) if found else None

    def message(self, record: logging.LogRecord) -> str:
        """What the record says, without keys."""
        try:
            text = record.getMessage()
        except Exception as error:  # a bad call of the logger must not hide that something was logged
            text = f"{record.msg} (arguments that do not fit: {error})"
        text = self._hide(text)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"

    def traceback(self, record: logging.LogRecord) -> list[str]:
        if record.exc_info and record.exc_info[0] is not None:
            return self._hide(self.formatException(record.exc_info)).splitlines()
        return []

    def _hide(self, text: str) -> str:
        text = _BEARER.sub(rf"\1{_HIDDEN}", text)
        return text if self._secrets is None else self._secrets.sub(_HIDDEN, text)


class TextLines(_Lines):
    """``2026-01-31 12:00:00.123 INFO fastgen.server [request id] message``, in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        request = _escape(getattr(record, "request_id", ""))
        head = f"{when} {record.levelname} {record.name}{f' [{request}]' if request else ''} "
        # The bar before each line of a traceback: no text inside can look like a line of its own.
        return "\n".join(
            [head + _escape(self.message(record)), *(f"  | {_escape(line)}" for line in self.traceback(record))]
        )


class JsonLines(_Lines):
    """An object a line: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, ``pid``; ``request_id`` and
    ``traceback`` where there is one; of an HTTP answer ``client``, ``method``, ``path``, ``status``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.message(record),
            "pid": os.getpid(),
        }
        if request := getattr(record, "request_id", ""):
            line["request_id"] = request
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, path, _, status = record.args
            line |= {"client": client, "method": method, "path": path, "status": status}
        if trace := self.traceback(record):
            line["traceback"] = "\n".join(trace)
        return json.dumps(line, default=str)  # ASCII: control characters are escaped


def _note_request(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True


def _access(record: logging.LogRecord) -> bool:
    """Queries are a request's content. Probes and scrapes come every few seconds, and are told of if they fail."""
    if not isinstance(record.args, tuple) or len(record.args) != 5:
        return True
    client, method, address, version, status = record.args
    path = str(address).partition("?")[0]
    record.args = (client, method, path, version, status)
    return path not in _PROBES or not (isinstance(status, int) and status < 400) or logging.root.level <= logging.DEBUG


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
