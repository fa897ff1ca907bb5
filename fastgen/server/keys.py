"""API keys from the environment, where other users of the machine do not see them."""

from __future__ import annotations

import os

from fastgen.server.settings import ServerConfig

__all__ = ["VARIABLE", "with_keys"]

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
