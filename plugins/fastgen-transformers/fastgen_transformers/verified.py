"""What became of each architecture when `survey` last tried it: shipped with the package, as ``verified.json``."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import transformers

__all__ = ["differs", "remark", "table"]


@cache
def table() -> dict[str, Any]:
    """``{"transformers": version, "architectures": {name: {"verdict": ..., "reason": ...}}}``"""
    path = files("fastgen_transformers") / "verified.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"architectures": {}}
    return found


def differs(architecture: str) -> str | None:
    """Why an architecture is refused although its code looks as if it could be served."""
    row = table()["architectures"].get(architecture, {})
    return row["reason"] if row.get("verdict") == "differs" else None


def remark(architecture: str) -> str:
    """What a user should know who loads it."""
    row, version = table()["architectures"].get(architecture, {}), table().get("transformers")
    tried = (
        f"compared with transformers {version}'s generate at tiny size: it matches"
        if row.get("verdict") == "matches"
        else "never compared with transformers' generate before: look at its answers closely"
    )
    return (
        f"no plugin is made for {architecture}, so it runs through transformers {transformers.__version__}'s own "
        f"modelling code (fallback fastgen-transformers), slower than a plugin would; {tried}"
    )
