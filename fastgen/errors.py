"""The exception tree: every error a user can meet, each saying what was wrong, the value, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineClosedError",
    "FastgenError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "PluginError",
    "RequestFailedError",
    "UnsupportedModelError",
    "did_you_mean",
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


def did_you_mean(word: str, known: Iterable[str], *, count: int = 3) -> str:
    """A suffix for an error message: ``" Did you mean 'a' or 'b'?"``, or an empty string when nothing is near."""
    near = get_close_matches(word, list(known), n=count, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
