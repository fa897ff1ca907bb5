"""What the server's doors (HTTP, gRPC, the page) see of what is behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from fastgen.core.loop import Loop
from fastgen.core.stats import EngineStats
from fastgen.front.verbs import Verbs
from fastgen.server.settings import ServerConfig
from fastgen.wire.info import ModelInfo, Pass

__all__ = ["Backend", "ModelInfo", "Pass", "Replica", "Service", "State", "Watcher"]

State = Literal["starting", "ready", "draining", "restarting", "failed"]


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine process, as it stands."""

    index: int
    state: State
    pid: int | None
    restarts: int
    """Since the server started."""
    outstanding_tokens: int
    """Prompt and answer tokens that its requests may still take."""
    stats: EngineStats | None
    """Its latest counts; ``None`` before the first pass."""
    detail: str = ""
    """Why it is not ready, for people."""


Watcher: TypeAlias = Callable[[int, Sequence[Pass]], None]
"""Called with a replica's index and its latest passes, from any thread: must be quick and must not raise."""


class Backend(Loop, Protocol):
    """A loop that can be looked at: one engine, or several in processes of their own."""

    @property
    def state(self) -> State:
        """``ready`` while at least one engine takes requests."""

    def replicas(self) -> list[Replica]: ...

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Tell ``watcher`` of every pass from now on. Call what is returned to end that."""


@dataclass(frozen=True, slots=True)
class Service:
    """A model being served."""

    verbs: Verbs
    """Runs requests; its loop is ``backend``, possibly with something around it that looks on."""
    backend: Backend
    info: ModelInfo
    settings: ServerConfig
    created: int
    """Unix time, seconds."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names clients may use for the model, the LoRA adapters' own beside them; the first is the usual one."""
        return (*(self.settings.served_model_name or (self.info.name,)), *self.info.loras)
