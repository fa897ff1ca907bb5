"""JSON that strangers wrote, read within bounds: the one reader for config and index files. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastgen.errors import ConfigError, FastgenError

__all__ = ["MAX_BYTES", "parse_json_object", "read_json_object"]

MAX_BYTES = 64 * 2**20


def read_json_object(
    path: Path, *, max_bytes: int = MAX_BYTES, error: type[FastgenError] = ConfigError
) -> dict[str, Any]:
    """The JSON object a file holds. No more than ``max_bytes`` are read, whatever its size is said to be.

    Raises:
        error: it cannot be read, is larger, is not UTF-8 or JSON, is nested too deeply, or holds no object.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from None
    if len(data) > max_bytes:
        raise error(f"{path} is too large: more than {max_bytes} bytes are no config or index file")
    return parse_json_object(data, str(path), error=error)


def parse_json_object(text: str | bytes, name: str, *, error: type[FastgenError] = ConfigError) -> dict[str, Any]:
    """The JSON object in ``text`` (bytes: UTF-8). ``name`` says in messages where it comes from.

    Raises:
        error: it is not UTF-8 or JSON, is nested too deeply, or is no object.
    """
    try:
        content = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError:
        raise error(f"{name} is nested too deeply to be read") from None
    except ValueError as problem:  # bad UTF-8 and numbers of thousands of digits too
        raise error(f"{name} is not valid JSON: {problem}") from None
    if not isinstance(content, dict):
        raise error(f"{name} must hold a JSON object, not {type(content).__name__}")
    return content
