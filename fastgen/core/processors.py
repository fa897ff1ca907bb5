"""The logits processors that plugins offer, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from fastgen.core.plugin import Registry

if TYPE_CHECKING:
    from fastgen.text import Tokenizer

__all__ = ["PluginProcessors", "checked_already"]

_checked = ContextVar("checked", default=False)


@contextmanager
def checked_already() -> Iterator[None]:
    """Requests added inside have options that their specs' ``check`` has let through, as a server's front does."""
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


class PluginProcessors(Mapping[str, Callable[..., Any]]):
    """Factories for one request, each loaded when it is first asked for, so that a broken one troubles only those who
    want it. A factory comes with what its spec says it needs.

    Looking a name up raises ``PluginError`` where several plugins claim it and none overrides the others, or where the
    one that has it cannot be loaded.
    """

    def __init__(self, plugins: Registry, *, tokenizer: Tokenizer | None, stop_token_ids: frozenset[int]) -> None:
        self._plugins = plugins
        self._offers: dict[str, Any] = {
            "tokenizer": tokenizer,
            "stop_token_ids": stop_token_ids,
            "checked": _checked.get(),
        }

    def __getitem__(self, name: str) -> Callable[..., Any]:
        spec = self._plugins.find_logits_processor(name)
        if spec is None:
            raise KeyError(name)
        return partial(spec.load(), **{need: self._offers[need] for need in spec.needs})

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({spec.name for spec in self._plugins.logits_processors}))

    def __len__(self) -> int:
        return len(list(iter(self)))
