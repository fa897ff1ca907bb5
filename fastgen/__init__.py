"""fastgen: serve large language models with Dynamic SplitFuse; every model family is a plugin."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# OpenMP threads without work sleep instead of spinning: beside any other busy process, spinning makes each parallel
# region wait for the operating system's scheduler. Read once, when torch loads; your own setting wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Names load on first use, so that `import fastgen` and `fastgen --help` start at once, without torch.
_HOMES = {
    "Chunk": "fastgen.types",
    "Completion": "fastgen.types",
    "Engine": "fastgen.core.engine",
    "EngineConfig": "fastgen.config",
    "FastgenError": "fastgen.errors",
    "Pipeline": "fastgen.front",
    "Response": "fastgen.types",
    "SamplingParams": "fastgen.types",
    "TokenLogprob": "fastgen.types",
    "Usage": "fastgen.types",
    "pipeline": "fastgen.front",
}

if TYPE_CHECKING:
    from fastgen.config import EngineConfig
    from fastgen.core.engine import Engine
    from fastgen.errors import FastgenError
    from fastgen.front import Pipeline, pipeline
    from fastgen.types import Chunk, Completion, Response, SamplingParams, TokenLogprob, Usage

__all__ = [
    "Chunk",
    "Completion",
    "Engine",
    "EngineConfig",
    "FastgenError",
    "Pipeline",
    "Response",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
    "__version__",
    "pipeline",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fastgen' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
