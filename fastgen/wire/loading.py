"""The engine that an engine process serves: its share of the machine, and what it tells of itself."""

from __future__ import annotations

import os

import torch

import fastgen
from fastgen.config import EngineConfig
from fastgen.core.engine import Engine
from fastgen.wire.info import ModelInfo
from fastgen.wire.messages import Ready, Start

__all__ = ["load", "share"]


def load(start: Start) -> tuple[Engine, Ready]:
    """The engine that ``start`` asks for; raises as ``Engine.load``."""
    config = share(EngineConfig.of(start.config), start.place, start.places)
    engine = Engine.load(start.model, config)
    blueprint = engine.blueprint
    budget, running = blueprint.pass_limits(engine.config)
    info = ModelInfo(
        name=str(blueprint.files.name),
        architecture=", ".join(blueprint.model_config.architectures),
        dtype=str(blueprint.dtype).removeprefix("torch."),
        device=str(blueprint.device),
        quantization=engine.config.quantization,
        max_model_len=engine.max_model_len,
        max_batch_tokens=budget,
        max_sequences=running,
        block_size=engine.config.block_size,
        total_blocks=blueprint.cache.num_blocks,
        vocab_size=engine.limits.valid_ids,
        loras=engine.limits.loras,
        version=fastgen.__version__,
    )
    return engine, Ready(info, str(blueprint.files.directory))


def share(config: EngineConfig, place: int, places: int) -> EngineConfig:
    """The options of one of several engines on this machine: each gets a GPU of its own while there are enough, and
    those on one device divide its memory and its cores. What is set as a number of threads or bytes is each one's."""
    if places == 1:
        return config
    options = config.model_dump(exclude_unset=True)
    gpus = torch.cuda.device_count() if config.device in ("auto", "cuda") else 0
    if gpus:
        options["device"] = f"cuda:{place % gpus}"
    beside = -(-places // gpus) if gpus else places
    if config.threads is None:
        options["threads"] = max(1, len(os.sched_getaffinity(0)) // places)
    if config.num_blocks is None:
        memory = config.cache_memory if config.cache_memory is not None else (0.9 if gpus else 0.4)
        if isinstance(memory, float):
            options["cache_memory"] = memory / beside
    return EngineConfig.of(options)
