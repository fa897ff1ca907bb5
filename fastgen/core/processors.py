"""The logits processors that plugins offer, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastgen.core.plugin import Registry

__all__ = ["PluginProcessors"]


class PluginProcessors(Mapping[str, Callable[..., Any]]):
    """Factories, each loaded when it is first asked for, so that a broken one troubles only those who want it.

    Looking a name up raises ``PluginError`` where several plugins claim it and none overrides the others, or where the
    one that has it cannot be loaded.
    """

    def __init__(self, plugins: Registry) -> None:
        self._plugins = plugins

    def __getitem__(self, name: str) -> Callable[..., Any]:
        spec = self._plugins.find_logits_processor(name)
        if spec is None:
            raise KeyError(name)
        return spec.load()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({spec.name for spec in self._plugins.logits_processors}))

    def __len__(self) -> int:
        return len(list(iter(self)))
