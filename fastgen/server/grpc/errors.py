"""What went wrong, as gRPC says it: a status code, a message, and metadata at the end.

Metadata: ``fastgen-field`` names the field at fault (percent-encoded); ``retry-after`` is whole seconds, and says that
the request has not been begun and may be sent again.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from urllib.parse import quote

import grpc

from fastgen.errors import EngineClosedError, FastgenError, InvalidRequestError, OverloadedError, RequestFailedError
from fastgen.server.admission import DrainingError
from fastgen.server.native import NotReadyError, UnknownModelError

__all__ = ["INTERNAL", "Refusal", "refusal"]

logger = logging.getLogger(__name__)

INTERNAL = "internal error; the server's log says more"
LONGEST = 2000
"""Bytes of a message, percent-encoded as gRPC sends it: all metadata together may be 8 KiB."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status to end a call with."""

    code: grpc.StatusCode
    message: str
    field: str | None = None
    retry_after: float | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        made = []
        if self.field is not None:
            made.append(("fastgen-field", quote(self.field[:200], errors="replace")))
        if self.retry_after is not None:
            made.append(("retry-after", str(math.ceil(self.retry_after))))
        return tuple(made)


def refusal(error: BaseException) -> Refusal:
    """The status for an error. One that nobody foresaw goes to the log; the client hears only that there was one."""
    code = grpc.StatusCode
    text = _short(str(error))
    match error:
        case UnknownModelError():
            return Refusal(code.NOT_FOUND, text, field=error.field)
        case InvalidRequestError():
            return Refusal(code.INVALID_ARGUMENT, text, field=error.field)
        case OverloadedError():
            return Refusal(code.RESOURCE_EXHAUSTED, text, retry_after=error.retry_after)
        case DrainingError() | NotReadyError():
            return Refusal(code.UNAVAILABLE, text, retry_after=1)
        case EngineClosedError():
            return Refusal(code.UNAVAILABLE, text)
        case RequestFailedError():
            return Refusal(code.INTERNAL, text)
        case TimeoutError():
            return Refusal(code.DEADLINE_EXCEEDED, "the request's deadline passed before its answer was whole")
        case FastgenError():
            logger.error("a request met an error that has no status of its own", exc_info=error)
        case _:
            logger.error("a call met an unexpected error", exc_info=error)
    return Refusal(code.INTERNAL, INTERNAL)


def _short(text: str) -> str:
    """No longer than metadata may be, and such that it can be encoded."""
    text = text.encode("utf-8", "replace").decode()
    most = len(text)
    while len(quote(text[:most])) > LONGEST:
        most = most * 3 // 4
    return text if most == len(text) else f"{text[:most]}..."
