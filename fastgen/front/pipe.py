"""``Pipeline``: a model in this process, for callers in any number of threads and event loops."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fastgen.core.loop import EngineLoop
from fastgen.front.verbs import Verbs

if TYPE_CHECKING:
    from fastgen.config import EngineConfig
    from fastgen.core.engine import Engine, EngineStats

__all__ = ["Pipeline", "pipeline"]


def pipeline(
    model: str | Path, config: EngineConfig | None = None, *, progress: bool | None = None, **engine_options: Any
) -> Pipeline:
    """Load a model and make it ready to answer.

    ::

        with fastgen.pipeline("HuggingFaceTB/SmolLM2-135M-Instruct") as pipe:
            print(pipe("The capital of France is", max_new_tokens=8).text)

    Args:
        model: a Hugging Face name, a directory, or a checkpoint file such as ``.gguf``.
        config: engine options (``fastgen.EngineConfig``); or give them as keywords.
        progress: show bars while files are fetched and read. Unset: if standard error is a terminal.

    Raises:
        FastgenError: with what is wrong with the name, the files, an option or the plugin.
    """
    from fastgen.core.engine import Engine

    show = sys.stderr.isatty() if progress is None else progress
    return Pipeline(Engine.load(model, config, progress=show, **engine_options))


class Pipeline(Verbs):
    """A model in this process: its engine works in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        """``engine`` belongs to the pipeline from here on."""
        loop = EngineLoop(engine)
        super().__init__(loop, tokenizer=engine.tokenizer, config=engine.config, max_model_len=engine.max_model_len)
        self.engine = engine
        """Its step and add are the background thread's; reading its config is fine."""
        self.loop: EngineLoop = loop
        self._finalizer = weakref.finalize(self, loop.stop)  # a pipeline nobody closed
        self._finalizer.atexit = False  # the loop sees to that itself

    def stats(self) -> EngineStats:
        """The engine's counts, read between two steps.

        Raises:
            EngineClosedError: it was closed.
        """
        return self.loop.run(self.engine.stats).result()

    def close(self) -> None:
        """End the engine and free its memory. Requests in flight raise ``EngineClosedError`` where they are waited for.
        Closing twice is harmless."""
        self._finalizer.detach()
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
