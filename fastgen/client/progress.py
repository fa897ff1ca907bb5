"""The progress bar of a batch, on standard error."""

from __future__ import annotations

from typing import Any, Self

__all__ = ["Bar"]


class Bar:
    """Counts finished requests, and tokens of their answers."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("", total=total, tokens=0)
        self._tokens = 0

    def done(self, response: Any) -> None:
        """One more is there. In any thread."""
        self._tokens += response.usage.completion_tokens
        self._bar.update(self._task, advance=1, tokens=self._tokens)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
