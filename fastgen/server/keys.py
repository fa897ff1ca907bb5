"""API keys: from the environment, where other users of the machine do not see them; and whether a call brings one."""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence

from fastgen.server.settings import ServerConfig

__all__ = ["VARIABLE", "brings_key", "with_keys"]

VARIABLE = "FASTGEN_API_KEY"


def with_keys(settings: ServerConfig) -> ServerConfig:
    """``settings`` with the keys in ``FASTGEN_API_KEY``, comma-separated, unless it has keys of its own.

    Raises:
        ConfigError: one of them is empty.
    """
    keys = os.environ.get(VARIABLE, "")
    if not keys.strip() or "api_key" in settings.model_fields_set:
        return settings
    options = settings.model_dump(exclude_unset=True)
    return ServerConfig(**{**options, "api_key": [key.strip() for key in keys.split(",")]})


def brings_key(authorization: bytes, keys: Sequence[bytes]) -> bool:
    """Whether the value of a call's ``authorization`` is ``Bearer`` and one of ``keys``."""
    scheme, _, key = authorization.partition(b" ")
    found = False
    for known in keys:  # all are compared, each in constant time: the time taken tells nothing
        found |= scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), known)
    return found
