"""The exception tree: every error a user can meet, each saying what was wrong, the value, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineClosedError",
    "FastgenError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "OverloadedError",
    "PluginError",
    "RequestFailedError",
    "UnsupportedModelError",
    "did_you_mean",
    "first_problem",
]


class FastgenError(Exception):
    """Base of every error fastgen raises on purpose. Its text is one plain message for a person."""


class ConfigError(FastgenError, ValueError):
    """An engine option or a model's config file holds a value that cannot be used."""


class InvalidRequestError(FastgenError, ValueError):
    """A request was refused at the front. ``field`` names the argument at fault, where there is one."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelNotFoundError(FastgenError):
    """No such directory, file or repository, or it could not be reached."""


class CheckpointError(FastgenError):
    """The files of a model are missing, truncated, hostile, or do not fit the model they claim to be."""


class UnsupportedModelError(FastgenError):
    """No plugin claims this architecture, or its config asks for something that changes the maths and is not there."""


class PluginError(FastgenError):
    """A plugin is broken, clashes with another, or was written for another version of fastgen."""


class RequestFailedError(FastgenError):
    """One accepted request ended in an error (a logits processor raised, logits were NaN); the others go on."""


class EngineClosedError(FastgenError):
    """The engine was closed, or died, before the request ended."""


class OverloadedError(FastgenError):
    """The server has no room just now. HTTP: 429 with Retry-After; gRPC: RESOURCE_EXHAUSTED. From a client: nor had it
    at each of the tries made."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        """``retry_after``: seconds after which there may be room."""
        super().__init__(message)
        self.retry_after = retry_after


LONGEST_WORD = 100
"""Characters that names are looked for by: finding them takes time with the square of that."""


def did_you_mean(word: str, known: Iterable[str], *, count: int = 3) -> str:
    """A suffix for an error message: ``" Did you mean 'a' or 'b'?"``, or an empty string when nothing is near."""
    near = get_close_matches(word[:LONGEST_WORD], list(known), n=count, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def some(names: Sequence[str], *, most: int = 5, separator: str = ", ") -> str:
    """The first few of many for an error message: ``"a, b and 7 more"``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def first_problem(
    errors: Sequence[Mapping[str, Any]], known: Iterable[str], *, what: str = "option", secret: Iterable[str] = ()
) -> tuple[str | None, str]:
    """The first of pydantic's ``ValidationError.errors()`` as ``(field, sentence)``.

    Args:
        known: the fields there are, to suggest from.
        secret: fields whose value must not be repeated.
    """
    error = errors[0]
    field = ".".join(str(part) for part in error["loc"]) or None
    if error["type"] == "extra_forbidden":
        return field, f"unknown {what} {field!r}.{did_you_mean(str(field), known)}"
    text = str(error["msg"]).removeprefix("Value error, ")
    if field is None:
        return None, text
    given = "" if "got" in text or field in secret else f" (got {error['input']!r})"
    return field, f"{field}: {text}{given}"
