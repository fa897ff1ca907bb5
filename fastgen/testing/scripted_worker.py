"""An engine process without a model, ready in half a second: for tests of what stands around engine processes.

It answers with the prompt's bytes, or does what the prompt's first word says: ``SLOW`` goes slowly, ``EXIT`` leaves,
``RAISE`` breaks a step, ``SLEEP`` is stuck in one, ``GARBAGE`` says what is no message. The model's name may be
``refuses`` or ``raises`` (it cannot be loaded), ``leaves`` (it dies while it loads) or ``loads`` (for ever);
``leaves-later DIRECTORY`` loads once and never again.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from fastgen import __version__
from fastgen.core.stats import EngineStats
from fastgen.errors import CheckpointError
from fastgen.testing.scripted import ScriptedEngine
from fastgen.types import SamplingParams, StepOutput
from fastgen.wire.info import ModelInfo
from fastgen.wire.messages import Ready, Start
from fastgen.wire.worker import leave, main

__all__ = ["MODULE"]

MODULE = "fastgen.testing.scripted_worker"
SLOW_SECONDS = 0.02


class Engine(ScriptedEngine):
    """One that counts, and minds its prompts."""

    words: list[str]
    """The first word of each prompt to be minded."""
    tokens: int

    def add(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        chat: bool = False,
        text: bool = False,
    ) -> str:
        request_id = super().add(prompt_token_ids, params, request_id=request_id, chat=chat, text=text)
        self.words.append(bytes(prompt_token_ids).split(b" ")[0].decode())
        return request_id

    def check(self, prompt_token_ids: list[int], params: SamplingParams | None = None, *, chat: bool = False) -> None:
        """It has no logits processors to refuse."""

    def step(self) -> list[StepOutput]:
        words, self.words = self.words, [word for word in self.words if word == "SLOW"]
        if "EXIT" in words:
            os._exit(3)
        if "RAISE" in words:
            raise RuntimeError("the step is broken")
        if "SLEEP" in words:
            time.sleep(3600)
        if "GARBAGE" in words:
            os.write(int(sys.argv[2]), b"GET / HTTP/1.1\r\n\r\n")
        if "SLOW" in words:
            time.sleep(SLOW_SECONDS)
        outputs = super().step()
        self.tokens += len(outputs)
        if not self.has_work:
            self.words.clear()
        return outputs

    def stats(self) -> EngineStats:  # type: ignore[override]
        running = len(self._choices)
        return EngineStats(self.steps, self.tokens, self.tokens, 0, 0.0, running, 0, 0, 100, running, 0, 100, 0, 0)


def load(start: Start) -> tuple[Engine, Ready]:
    name, _, directory = start.model.partition(" ")
    if name == "refuses":
        raise CheckpointError("the files of this model are not there")
    if name == "raises":
        raise ValueError("a plugin's fault")
    if name == "leaves":
        print("out of memory", file=sys.stderr)
        os._exit(9)
    if name == "loads":
        time.sleep(3600)
    if name == "leaves-later":
        mark = Path(directory) / "loaded"
        if mark.exists():
            os._exit(9)
        mark.touch()
    engine = Engine(None)
    engine.words, engine.tokens = [], 0
    info = ModelInfo(name, "Scripted", "none", "cpu", None, 10_000, 512, 128, 16, 100, 256, (), __version__)
    return engine, Ready(info, directory or os.devnull)


if __name__ == "__main__":
    leave(main(load=load))
