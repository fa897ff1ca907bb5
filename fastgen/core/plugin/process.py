"""This process's registry: made once, on first use; and the plugins that a script adds by a call."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fastgen.core.plugin.loader import PluginRecord, discover, environment_flag, load_all, selection
from fastgen.core.plugin.registry import Registry
from fastgen.errors import PluginError

__all__ = ["load_registry", "register", "registered", "registry", "unregister"]

_lock = threading.RLock()
_registry: Registry | None = None
_loading = False


def load_registry(
    *, allow: Iterable[str] | None = None, block: Iterable[str] | None = None, strict: bool | None = None
) -> Registry:
    """Load the installed plugins anew; a broken one costs one line on stderr.

    ``allow`` and ``block`` hold names of plugins or of their distributions. Whatever is ``None`` is taken from the
    environment: ``FASTGEN_PLUGINS`` (comma-separated; unset: all; empty: none), ``FASTGEN_DISABLE_PLUGINS``,
    ``FASTGEN_PLUGINS_STRICT``.

    Raises:
        PluginError: a plugin is broken, and ``strict``.
        ConfigError: ``FASTGEN_PLUGINS_STRICT`` is neither yes nor no.
    """
    if allow is None and "FASTGEN_PLUGINS" in os.environ:
        allow = selection(os.environ["FASTGEN_PLUGINS"])
    if block is None:
        block = selection(os.environ.get("FASTGEN_DISABLE_PLUGINS", ""))
    if strict is None:
        strict = environment_flag("FASTGEN_PLUGINS_STRICT")
    points = discover()
    records, warnings = load_all(points, allow=None if allow is None else list(allow), block=list(block), strict=strict)
    for text in warnings:
        _warn(text)
    for record in records:
        if record.status == "failed":
            _warn(f"the plugin {record.label} is broken and left out: {record.error} (fastgen plugins --failed)")
    return Registry(records, points)


def registry() -> Registry:
    """The registry of this process, loaded on the first call; see ``load_registry``.

    Raises:
        PluginError: as ``load_registry``; or a plugin asked for the registry while it was being made.
    """
    global _registry, _loading
    if _registry is not None:
        return _registry
    with _lock:
        if _registry is None:
            if _loading:
                raise PluginError("a plugin asked for the registry, or registered something, while it was being loaded")
            _loading = True
            try:
                _registry = load_registry()
            finally:
                _loading = False
        return _registry


def register(plugin: object, *, name: str | None = None) -> PluginRecord:
    """Add a plugin, a module or an object whose methods implement hooks, to this process alone.

    For scripts and notebooks. Child processes do not have it and refuse to start; a distribution with an entry point
    in the group ``fastgen`` works everywhere.

    Raises:
        PluginError: it is broken, or its name belongs to an installed plugin.
    """
    with _lock:
        return registry().register(plugin, name)


def unregister(name: str) -> None:
    """Take out a plugin added by ``register``. Raises PluginError when there is none of that name."""
    with _lock:
        registry().unregister(name)


@contextmanager
def registered(plugin: object, *, name: str | None = None) -> Iterator[PluginRecord]:
    """``register`` for the length of a ``with`` block, as tests need it."""
    record = register(plugin, name=name)
    try:
        yield record
    finally:
        if record.in_process:
            unregister(record.name)


def _warn(text: str) -> None:
    if sys.stderr is not None:
        print(f"fastgen: warning: {text}", file=sys.stderr)
