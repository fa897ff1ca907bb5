"""Whether two answers say the same."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["alike"]

TOLERANCE = 1e-4
"""Of log-probabilities: passes of other shapes add numbers up in another order."""
_OF_THE_RUN = frozenset({"request_id", "cached_tokens"})
"""Fields that depend on what ran before."""


def alike(one: Any, other: Any) -> bool:
    """Whether two ``Response``s, ``Chunk``s, or lists of them, are equal in every field: but for the names of the
    requests and what the prefix cache held, and with log-probabilities that may differ in the last digits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return math.isclose(one, other, abs_tol=TOLERANCE)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if is_dataclass(one):
        names = [field.name for field in fields(one) if field.name not in _OF_THE_RUN]
        return all(alike(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)
