"""Keeps one engine process running: starts it, watches it, ends it when it is stuck, and starts it again."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from fastgen.core.plugin.describe import describe_error
from fastgen.errors import EngineClosedError, FastgenError
from fastgen.server.service import Replica, State
from fastgen.server.settings import ServerConfig
from fastgen.text import Tokenizer
from fastgen.wire.info import Pass
from fastgen.wire.launching import WORKER, ModelChangedError, Plan, check_same, pinned, start_engine
from fastgen.wire.messages import Ready
from fastgen.wire.process import Child
from fastgen.wire.remote import RemoteLoop

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)

RESTARTS_WINDOW = 600.0
"""Seconds within which ``max_restarts`` are counted."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first restart and at most; doubled from one to the next."""
WATCH_SECONDS = 0.2
LAST_STEP_SECONDS = 3.0
"""How long an engine that is told to end may take for the step in flight."""

TokenizerOf = Callable[[Ready], Tokenizer | None]


class Supervisor:
    """One engine process after another, watched by a thread.

    An error that loading itself raises (no such model, a plugin that is missing) ends it at once if the engine was
    never ready before: it would come again. Everything else, a killed process or a system that has none to give, is
    tried again, at most ``max_restarts`` times within ten minutes.

    Each process must load what the first one did: the front goes by that one's tokenizer and limits.
    """

    def __init__(
        self, plan: Plan, settings: ServerConfig, tokenizer_of: TokenizerOf, *, index: int = 0, module: str = WORKER
    ) -> None:
        self.index = index
        self._plan = plan
        self._settings = settings
        self._tokenizer_of = tokenizer_of
        self._module = module
        self._label = f"engine {index}" if plan.places > 1 else "engine"
        self._state: State = "starting"
        self._detail = "not started yet"
        self._loop: RemoteLoop | None = None
        self._child: Child | None = None
        self._ready: Ready | None = None
        self._first: Ready | None = None
        self._error: FastgenError | None = None
        self._restarts = 0
        self._recent: deque[float] = deque()
        self._watchers: tuple[Callable[[Sequence[Pass]], None], ...] = ()
        self.on_death: Callable[[], None] = lambda: None
        """Called, in the supervisor's thread, when a process that was ready is gone."""
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"fastgen-supervisor-{index}", daemon=True)

    # ---- any thread ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return "restarting" if self._state == "ready" and self.loop is None else self._state

    @property
    def detail(self) -> str:
        """Why it is not ready, for people."""
        return self._detail

    @property
    def loop(self) -> RemoteLoop | None:
        """What takes requests now; ``None`` while nothing does."""
        loop = self._loop
        return None if loop is None or loop.closed else loop

    @property
    def ready(self) -> Ready | None:
        """What the engine said of itself when it was ready first."""
        return self._ready

    @property
    def error(self) -> FastgenError | None:
        """Why it was given up."""
        return self._error

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None or not child.running else child.pid

    def replica(self) -> Replica:
        loop = self._loop
        return Replica(
            self.index,
            self.state,
            self.pid,
            restarts=self._restarts,
            outstanding_tokens=0 if loop is None else loop.outstanding_tokens,
            stats=None if loop is None else loop.stats,
            detail=self._detail,
        )

    def watch(self, watcher: Callable[[Sequence[Pass]], None]) -> Callable[[], None]:
        """Have ``watcher`` told of every pass, of later processes too. Call what is returned to end that."""
        self._watchers = (*self._watchers, watcher)

        def end() -> None:
            self._watchers = tuple(one for one in self._watchers if one is not watcher)

        return end

    def start(self, first: Ready | None = None) -> None:
        """``first``: what another engine of the same server said of itself, which this one must be like."""
        self._first = first
        self._thread.start()

    def wait_settled(self, timeout: float | None = None) -> bool:
        """Whether it has been ready once, or was given up, within ``timeout`` seconds."""
        return self._settled.wait(timeout)

    def stop(self) -> None:
        """Have the process ended, and do not wait. Requests in flight fail."""
        self._stopping.set()
        if (loop := self._loop) is not None:
            loop.stop("the server is shutting down")
        if self._state != "ready" and (child := self._child) is not None:
            child.kill()  # it loads, and nothing is lost

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process is gone, once it was told to stop."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    # ---- the supervisor's thread -----------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping.is_set():
                why = self._one_life()
                if self._stopping.is_set() or why is None:
                    return
                logger.error("%s: %s", self._label, why)
                if not self._may_restart(why):
                    return
        except BaseException as error:
            logger.exception("the supervisor of %s failed", self._label)
            self._give_up(EngineClosedError(f"the supervisor failed: {error}"))
        finally:
            if self._stopping.is_set() and self._state != "failed":
                self._state, self._detail = "failed", "the server is shutting down"
                self._error = EngineClosedError("the server is shutting down")
            self._settled.set()

    def _one_life(self) -> str | None:
        """Start the process and watch it until it is gone. What it died of; ``None`` if there is no use in another."""
        try:
            child = Child(self._module, label=self._label)
        except (OSError, RuntimeError) as error:
            return f"the {self._label} process could not be started: {describe_error(error)}"
        self._child = child
        loop: RemoteLoop | None = None
        try:
            if self._stopping.is_set():
                return None
            plan = self._plan if self._first is None else pinned(self._plan, self._first)
            ready = start_engine(child, plan, timeout=self._settings.start_timeout, progress=self._progress)
            if self._first is not None:
                check_same(self._first, ready)
            loop = RemoteLoop(child.channel, self._tokenizer_of(ready), label=self._label)
            loop.watch(self._passes)
            self._ready = self._ready or ready
            self._first = self._first or ready
            self._loop, self._state, self._detail = loop, "ready", ""
            if self._stopping.is_set():
                return None
            self._settled.set()
            return self._watch(child, loop)
        except FastgenError as error:
            hopeless = self._ready is None and not isinstance(error, EngineClosedError)
            if hopeless or isinstance(error, ModelChangedError):
                self._give_up(error)
                return None
            return str(error)
        except (OSError, RuntimeError) as error:  # no thread for the connection, say
            return f"the {self._label} process could not be used: {describe_error(error)}"
        finally:
            self._end(child, loop)

    def _end(self, child: Child, loop: RemoteLoop | None) -> None:
        if loop is None:
            child.kill()
        else:
            loop.stop("the engine was ended before the request did")
            loop.join()
            self.on_death()
        child.end(LAST_STEP_SECONDS if self._stopping.is_set() else 0.0)
        self._loop = self._child = None

    def _watch(self, child: Child, loop: RemoteLoop) -> str:
        """Why the engine is to be ended, once it is."""
        silent = 0.0
        heard = loop.heard
        last = time.monotonic()
        while not loop.wait_closed(WATCH_SECONDS):
            now = time.monotonic()
            # If this process itself was held up, the engine's messages lie there unread: a late look counts as one.
            # And while it works on one, others may lie there.
            same = loop.heard == heard and not loop.reading
            silent = silent + min(now - last, 2 * WATCH_SECONDS) if same else 0.0
            heard, last = loop.heard, now
            why = None
            if silent > self._settings.heartbeat_timeout:
                why = f"it was silent for {self._settings.heartbeat_timeout:g} seconds (heartbeat_timeout)"
            elif loop.in_step > self._settings.step_timeout:
                why = f"a pass took more than {self._settings.step_timeout:g} seconds (step_timeout)"
            if why is not None:
                why = f"the engine is stuck and was ended: {why}"
                loop.stop(why)
                child.kill()
                return why
        if self._stopping.is_set():
            return "the server is shutting down"
        why = loop.why_closed
        if child.wait(LAST_STEP_SECONDS):
            why = f"{why} ({child.how_it_ended()})"
        return why

    def _may_restart(self, why: str) -> bool:
        """Count it and pause; or give up."""
        now = time.monotonic()
        while self._recent and now - self._recent[0] > RESTARTS_WINDOW:
            self._recent.popleft()
        if len(self._recent) >= self._settings.max_restarts:
            times = f"{len(self._recent)} restarts within ten minutes" if self._recent else "no restart is allowed"
            self._give_up(EngineClosedError(f"given up after {times} (max_restarts). The last time: {why}"))
            return False
        pause = min(FIRST_PAUSE * 2 ** len(self._recent), LONGEST_PAUSE)
        self._recent.append(now)
        if self._ready is not None:
            self._state = "restarting"
        self._detail = f"{why}; it is started again in {pause:g} seconds"
        self._stopping.wait(pause)
        self._restarts += not self._stopping.is_set()
        self._detail = f"starting again; before, {why}"
        return True

    def _give_up(self, error: FastgenError) -> None:
        self._error, self._state, self._detail = error, "failed", str(error)
        logger.error("%s: %s", self._label, error)

    def _progress(self, text: str) -> None:
        self._detail = text

    def _passes(self, passes: Sequence[Pass]) -> None:
        for watcher in self._watchers:
            with suppress(Exception):
                watcher(passes)
