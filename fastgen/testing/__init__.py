"""For the authors of plugins: the conformance kit, tiny checkpoints, and a driver for decoders. Names load lazily."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen.testing.conformance import ModelConformance
    from fastgen.testing.subject import TINY

__all__ = ["TINY", "ModelConformance"]

_HOMES = {"ModelConformance": "fastgen.testing.conformance", "TINY": "fastgen.testing.subject"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"fastgen.testing has no {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
