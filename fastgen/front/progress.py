"""The progress bar of a batch, on standard error."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from fastgen.core.loop import Submission

__all__ = ["Bar"]

REFRESH_SECONDS = 0.2


class Bar:
    """Counts finished requests, and tokens per second over all."""

    def __init__(self, requests: Sequence[Submission]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._sinks: list[Any] = [request.sink for request in requests]
        self._bar = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=len(requests), rate="")
        self._done = 0
        self._began = time.perf_counter()

    def wait(self, answers: queue.SimpleQueue[Any]) -> Any:
        """The next answer; the bar moves meanwhile."""
        while True:
            try:
                answer = answers.get(timeout=REFRESH_SECONDS)
            except queue.Empty:
                self._show()
            else:
                self._done += 1
                self._show()
                return answer

    def _show(self) -> None:
        tokens = sum(sink.tokens for sink in self._sinks)
        rate = tokens / max(time.perf_counter() - self._began, 1e-9)
        self._bar.update(self._task, completed=self._done, rate=f"{tokens} tokens, {rate:.0f} tokens/s")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
