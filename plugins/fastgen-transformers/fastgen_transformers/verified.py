"""What became of each architecture when `survey` last tried it: shipped with the package, as ``verified.json``."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import transformers

__all__ = ["DIFFERENT", "differs", "remark", "table"]

DIFFERENT = "its logits there are not those of transformers' own forward pass"


PATH: Traversable | None = files("fastgen_transformers") / "verified.json"
"""``None``: nothing is known, which is how the survey looks at all of them again."""


@cache
def table() -> dict[str, Any]:
    """``{"transformers": version, "rows": [{"model_type", "architecture", "verdict", "reason", "plugin"}, ...]}``"""
    found: dict[str, Any] = json.loads(PATH.read_text()) if PATH is not None and PATH.is_file() else {"rows": []}
    return found


def differs(architecture: str) -> str | None:
    """Why an architecture is refused although its code looks as if it could be served. In half precision, rounding may
    hide from the trial of a loaded model what was plain in float32."""
    for row in _rows(architecture):
        if row["verdict"] == "differs" or DIFFERENT in row["reason"]:
            return f"when it was tried, {row['reason'].partition(': ')[2] or row['reason']}"
    return None


def remark(architecture: str) -> str:
    """What whoever loads it should know, in one line."""
    matching = [row for row in _rows(architecture) if row["verdict"] == "matches"]
    tried = f"at tiny size it matches generate of transformers {table().get('transformers')}"
    if not matching:
        tried = "it was never compared with transformers' generate: look at its answers closely"
    elif all(row["reason"] for row in matching):
        tried = f"{tried} {matching[0]['reason']}"
    return (
        f"{architecture} runs through the modelling code of transformers {transformers.__version__}, by the fallback "
        f"fastgen-transformers: slower than a plugin made for it; {tried}"
    )


def _rows(architecture: str) -> list[dict[str, Any]]:
    return [row for row in table()["rows"] if row["architecture"] == architecture]
