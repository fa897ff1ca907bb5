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
    "CheckpointError": "fastgen.errors",
    "Chunk": "fastgen.types",
    "Completion": "fastgen.types",
    "ConfigError": "fastgen.errors",
    "Engine": "fastgen.core.engine",
    "EngineClosedError": "fastgen.errors",
    "EngineConfig": "fastgen.config",
    "EngineStats": "fastgen.core.stats",
    "FastgenError": "fastgen.errors",
    "InvalidRequestError": "fastgen.errors",
    "ModelNotFoundError": "fastgen.errors",
    "OverloadedError": "fastgen.errors",
    "Pipeline": "fastgen.front",
    "PluginError": "fastgen.errors",
    "RequestFailedError": "fastgen.errors",
    "Response": "fastgen.types",
    "SamplingParams": "fastgen.types",
    "StepOutput": "fastgen.types",
    "TokenLogprob": "fastgen.types",
    "UnsupportedModelError": "fastgen.errors",
    "Usage": "fastgen.types",
    "pipeline": "fastgen.front",
    "serve": "fastgen.server.background",
}

if TYPE_CHECKING:
    from fastgen.client import client
    from fastgen.config import EngineConfig
    from fastgen.core.engine import Engine
    from fastgen.core.stats import EngineStats
    from fastgen.errors import (
        CheckpointError,
        ConfigError,
        EngineClosedError,
        FastgenError,
        InvalidRequestError,
        ModelNotFoundError,
        OverloadedError,
        PluginError,
        RequestFailedError,
        UnsupportedModelError,
    )
    from fastgen.front import Pipeline, pipeline
    from fastgen.server.background import serve
    from fastgen.types import Chunk, Completion, Response, SamplingParams, StepOutput, TokenLogprob, Usage

__all__ = [
    "CheckpointError",
    "Chunk",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineStats",
    "FastgenError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "OverloadedError",
    "Pipeline",
    "PluginError",
    "RequestFailedError",
    "Response",
    "SamplingParams",
    "StepOutput",
    "TokenLogprob",
    "UnsupportedModelError",
    "Usage",
    "__version__",
    "client",
    "pipeline",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name == "client":  # a package that can be called
        return import_module("fastgen.client")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fastgen' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
