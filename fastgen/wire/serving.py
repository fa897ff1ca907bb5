"""The engine process's loop: commands between steps, steps while there is work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from fastgen.core.loop import EngineLike
from fastgen.core.plugin.describe import describe_error
from fastgen.core.processors import checked_already
from fastgen.core.stats import EngineStats
from fastgen.errors import FastgenError
from fastgen.types import SamplingParams, StepOutput
from fastgen.wire.channel import FrameError
from fastgen.wire.info import Pass
from fastgen.wire.messages import (
    Accepted,
    FromEngine,
    Output,
    Refused,
    Step,
    Submit,
    kind_of,
)
from fastgen.wire.preparing import Checking, Commands, Preparing
from fastgen.wire.pulse import Pulse

__all__ = ["Counting", "Serving"]

logger = logging.getLogger("fastgen")

STATS_SECONDS = 0.25
"""Least time between two counts in steps."""
COMMANDS_AT_ONCE = 256
"""Between two steps, so that no flood of commands keeps a step from coming."""


class Counting(EngineLike, Checking, Protocol):
    """An engine that tells where it stands."""

    def stats(self) -> EngineStats: ...


class Serving:
    """Runs an engine for a front. A request that cannot be run is refused and hurts no other; what a step raises ends
    it all, as it does in ``EngineLoop``."""

    def __init__(self, engine: Counting, say: Callable[[FromEngine], None], pulse: Pulse) -> None:
        self._engine = engine
        self._say = say
        self._pulse = pulse
        self._last = engine.stats()
        self._told = 0.0

    def run(self, commands: Commands) -> None:
        """Until the front is gone."""
        prepared = Preparing(commands, self._engine)
        try:
            while True:
                self._carry_out(prepared)
                if self._engine.has_work:
                    self._step()
        except EOFError:
            return
        finally:
            prepared.close()

    def _carry_out(self, commands: Commands) -> None:
        """Sleeps while there is nothing to do at all."""
        wait = not self._engine.has_work
        for _ in range(COMMANDS_AT_ONCE):
            command = commands(wait=wait)
            if command is None:
                return
            wait = False
            if isinstance(command, Submit):
                self._accept(command)
            else:
                self._engine.abort(command.request_id, command.index)

    def _accept(self, command: Submit) -> None:
        accepted: list[str] = []
        try:
            for new in command.requests:
                params = SamplingParams.of(**new.params)
                with checked_already():
                    self._engine.add(new.prompt_token_ids, params, request_id=new.request_id, chat=new.chat, text=True)
                accepted.append(new.request_id)
        except (Exception, SystemExit) as error:
            for request_id in accepted:  # no step has run since: nothing has come of them
                self._engine.abort(request_id)
            if not isinstance(error, FastgenError):
                logger.exception("a request could not be taken in")
            text = str(error) if isinstance(error, FastgenError) else describe_error(error)
            field = getattr(error, "field", None)
            self._say(Refused(command.number, len(accepted), kind_of(error), text, field))
        else:
            self._say(Accepted(command.number))

    def _step(self) -> None:
        self._pulse.step_begins()
        began = time.monotonic()
        outputs = self._engine.step()
        seconds = time.monotonic() - began
        self._pulse.step_ended()
        stats, last = self._engine.stats(), self._last
        self._last = self._pulse.stats = stats
        ran = None
        if stats.passes != last.passes:
            ran = Pass(
                ended=time.time(),
                seconds=seconds,
                tokens=stats.tokens - last.tokens,
                running=stats.running,
                waiting=stats.waiting,
                used_blocks=stats.used_blocks,
                cached_blocks=stats.cached_blocks,
            )
        told = None
        if began - self._told >= STATS_SECONDS or not self._engine.has_work:
            self._told, told = began, stats
        self._tell(outputs, ran, told)

    def _tell(self, outputs: list[StepOutput], ran: Pass | None, stats: EngineStats | None) -> None:
        try:
            self._say(Step([Output.of(output) for output in outputs], ran, stats))
        except FrameError:  # the log-probabilities of a long prompt: the others must not suffer for them
            self._say(Step([], ran, stats))
            for output in outputs:
                self._tell_one(output)

    def _tell_one(self, output: StepOutput) -> None:
        try:
            self._say(Step([Output.of(output)], None, None))
        except FrameError as error:
            self._engine.abort(output.request_id)
            failed = Output(
                output.request_id, output.index, None, 0, "error", error=f"its answer cannot be sent: {error}"
            )
            self._say(Step([failed], None, None))
