"""JSON from strangers, as the standard has it and no further."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["MOST_DEPTH", "RefusedJsonError", "read_json"]

MOST_DEPTH = 100
"""Levels of lists and objects inside each other; templates and schema compilers recurse."""


class RefusedJsonError(ValueError):
    """It is JSON in form, and holds what is not taken."""


def read_json(text: str) -> Any:
    """What ``text`` says.

    Raises:
        RefusedJsonError: a number that is not finite or too long, a key that comes twice in one object, half of a
            surrogate pair, or more than ``MOST_DEPTH`` levels.
        json.JSONDecodeError: it is no JSON at all.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedJsonError("half of a surrogate pair (\\ud800 to \\udfff alone)") from None
    except (json.JSONDecodeError, RefusedJsonError):
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # thousands of digits
        raise RefusedJsonError("a number that is too long") from None
    _check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        shown = repr(twice) if len(twice) <= 80 else f"{twice[:77]!r}..."
        raise RefusedJsonError(f"the key {shown} comes twice in one object")
    return made


def _no_constant(word: str) -> Any:
    raise RefusedJsonError(f"{word} is no number in JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise RefusedJsonError(f"{digits[:40]} is too large")
    return value


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_DEPTH):
        inside = [one.values() if isinstance(one, dict) else one for one in level]
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RefusedJsonError:
    return RefusedJsonError(f"it is nested too deeply; at most {MOST_DEPTH} levels are read")
