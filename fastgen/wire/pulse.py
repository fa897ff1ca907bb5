"""A thread of the engine process that says that it lives, and how long the step in flight has taken."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from fastgen.core.stats import EngineStats
from fastgen.wire.messages import Beat

__all__ = ["BEAT_SECONDS", "Pulse"]

BEAT_SECONDS = 0.5


class Pulse:
    """Says ``Beat`` twice a second, as long as this process may run at all: a step that holds the interpreter's lock,
    and a process that was stopped, are silent."""

    def __init__(self, say: Callable[[Beat], None], parent: int, *, on_orphaned: Callable[[], None]) -> None:
        """
        Args:
            parent: the process that must live.
            on_orphaned: called when it does not. The connection's end tells of that too, unless a fork of the parent
                holds it open.
        """
        self._say = say
        self._parent = parent
        self._on_orphaned = on_orphaned
        self._step_began: float | None = None
        self.stats: EngineStats | None = None
        """Of the last pass."""

    def start(self) -> None:
        threading.Thread(target=self._beat, name="fastgen-pulse", daemon=True).start()

    def step_begins(self) -> None:
        self._step_began = time.monotonic()

    def step_ended(self) -> None:
        self._step_began = None

    def _beat(self) -> None:
        while True:
            began = self._step_began
            with suppress(Exception):  # a connection that is going down
                self._say(Beat(0.0 if began is None else time.monotonic() - began, self.stats))
            time.sleep(BEAT_SECONDS)
            if os.getppid() != self._parent:
                self._on_orphaned()
