"""A service over an engine in this process: for tests of the doors, and for embedding them in another program."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress

from fastgen.core.loop import EngineLoop, Submission
from fastgen.core.stats import EngineStats
from fastgen.errors import EngineClosedError
from fastgen.front.pipe import Pipeline
from fastgen.front.verbs import Verbs
from fastgen.server.observe import Observed
from fastgen.server.service import Replica, Service, State, Watcher
from fastgen.server.settings import ServerConfig
from fastgen.wire.info import ModelInfo

__all__ = ["InProcessBackend", "in_process"]

STATS_SECONDS = 1.0
"""Longest wait for an engine's counts, which it gives between two passes."""


class InProcessBackend:
    """A pipeline's engine as a backend with one replica. The pipeline stays its caller's to close."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._loop: EngineLoop = pipe.loop
        self.starting = False
        """Set by whoever wants it to look unready."""

    @property
    def closed(self) -> bool:
        return self._loop.closed

    def new_request_id(self) -> str:
        return self._loop.new_request_id()

    def submit(self, submissions: Sequence[Submission]) -> Future[None]:
        return self._loop.submit(submissions)

    def abort(self, request_id: str) -> None:
        self._loop.abort(request_id)

    @property
    def state(self) -> State:
        if self.closed:
            return "failed"
        return "starting" if self.starting else "ready"

    def replicas(self) -> list[Replica]:
        stats: EngineStats | None = None
        with suppress(EngineClosedError, TimeoutError):
            stats = self._loop.run(self._pipe.engine.stats).result(STATS_SECONDS)
        return [Replica(0, self.state, os.getpid(), restarts=0, outstanding_tokens=0, stats=stats)]

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """No passes are told of: they are not seen from here."""
        return lambda: None


def in_process(
    pipe: Pipeline,
    settings: ServerConfig | None = None,
    *,
    name: str | None = None,
    info: ModelInfo | None = None,
) -> Service:
    """A service that answers with ``pipe``.

    Args:
        name: of the model. Unset: as it was loaded.
        info: of the model, where its engine cannot be asked (a scripted one).
    """
    backend = InProcessBackend(pipe)
    verbs = Verbs(Observed(backend), tokenizer=pipe.tokenizer, config=pipe.config, max_model_len=pipe.max_model_len)
    return Service(verbs, backend, info or _info(pipe, name), settings or ServerConfig(), created=int(time.time()))


def _info(pipe: Pipeline, name: str | None) -> ModelInfo:
    from fastgen import __version__

    engine = pipe.engine
    blueprint = engine.blueprint
    return ModelInfo(
        name=name or str(blueprint.files.name),
        architecture=", ".join(blueprint.model_config.architectures),
        dtype=str(blueprint.dtype).removeprefix("torch."),
        device=str(blueprint.device),
        quantization=pipe.config.quantization,
        max_model_len=pipe.max_model_len,
        max_batch_tokens=engine.max_batch_tokens,
        max_sequences=pipe.config.max_sequences,
        block_size=pipe.config.block_size,
        total_blocks=blueprint.cache.num_blocks,
        vocab_size=engine.limits.valid_ids,
        loras=engine.limits.loras,
        version=__version__,
    )
