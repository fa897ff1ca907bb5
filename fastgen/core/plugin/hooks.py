"""The hooks, and how one plugin is asked for its specs, apart from all others."""

from __future__ import annotations

import inspect
from dataclasses import replace
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import pluggy

from fastgen.core.plugin.specs import (
    CheckpointFormatSpec,
    CommandSpec,
    KernelSpec,
    LogitsProcessorSpec,
    ModelSourceSpec,
    ModelSpec,
    Spec,
)
from fastgen.errors import PluginError, did_you_mean

__all__ = ["HOOKS", "Hooks", "collect", "hookimpl"]

PROJECT = "fastgen"
_hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the implementation of the hook of its name."""


class Hooks:
    """Every hook. A plugin implements any of them as plain functions of its entry module, marked ``@hookimpl``,
    without arguments; each is called once in each process, when the plugins are loaded."""

    @_hookspec
    def fastgen_models(self) -> list[ModelSpec]:  # type: ignore[empty-body]
        """Model families."""

    @_hookspec
    def fastgen_checkpoint_formats(self) -> list[CheckpointFormatSpec]:  # type: ignore[empty-body]
        """File formats that can be turned into a Hugging Face directory."""

    @_hookspec
    def fastgen_model_sources(self) -> list[ModelSourceSpec]:  # type: ignore[empty-body]
        """Places, by prefix of the model's name, that models can be fetched from."""

    @_hookspec
    def fastgen_kernels(self) -> list[KernelSpec]:  # type: ignore[empty-body]
        """Further implementations of the operations in ``fastgen.kernels.ops``."""

    @_hookspec
    def fastgen_logits_processors(self) -> list[LogitsProcessorSpec]:  # type: ignore[empty-body]
        """Logits processors that requests may ask for."""

    @_hookspec
    def fastgen_commands(self) -> list[CommandSpec]:  # type: ignore[empty-body]
        """Further commands of the ``fastgen`` command line."""


HOOKS: dict[str, type[Spec]] = {
    "fastgen_models": ModelSpec,
    "fastgen_checkpoint_formats": CheckpointFormatSpec,
    "fastgen_model_sources": ModelSourceSpec,
    "fastgen_kernels": KernelSpec,
    "fastgen_logits_processors": LogitsProcessorSpec,
    "fastgen_commands": CommandSpec,
}


class _Manager(pluggy.PluginManager):
    """Spares itself pluggy's careful look at what cannot be a hook: with many plugins that is most of the time."""

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        return super().parse_hookspec_opts(module_or_class, name) if name in HOOKS else None

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        if isinstance(plugin, ModuleType) and not inspect.isroutine(vars(plugin).get(name)):
            return None
        return super().parse_hookimpl_opts(plugin, name)


def collect(plugin: object, name: str, specs: list[Spec]) -> None:
    """Ask ``plugin`` (a module or an object) for all its specs, checked and stamped with ``name``.

    They are appended to ``specs`` one by one, so that after an error the caller sees what the plugin meant to serve.
    Each plugin gets a pluggy manager of its own: dropping it undoes everything, and no plugin can wrap another's hooks.

    Raises:
        PluginError: an unknown, misspelt or unmarked hook, or one that returns something else than its specs.
        Exception: whatever the plugin raises.
    """
    manager = _Manager(PROJECT)
    manager.add_hookspecs(Hooks)
    implemented = _check_names(manager, plugin)
    try:
        manager.register(plugin, name)
    except pluggy.PluginValidationError as error:
        raise PluginError(" ".join(str(error).split())) from None
    for hook, kind in HOOKS.items():
        if hook in implemented:
            _ask(manager, hook, kind, name, specs)
    _check_claims(specs)


def _check_names(manager: pluggy.PluginManager, plugin: object) -> set[str]:
    """The names of the hooks that ``plugin`` implements."""
    found: set[str] = set()
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            _check_unmarked(plugin, attribute)
            continue
        hook = options.get("specname") or attribute
        if hook in HOOKS:
            if options.get("wrapper") or options.get("hookwrapper"):
                raise PluginError(f"{hook} is a hook wrapper; hooks of fastgen return specs and cannot be wrapped")
            found.add(hook)
        elif not options.get("optionalhook"):  # pluggy's mark for a hook that only some versions of fastgen know
            raise PluginError(f"fastgen has no hook {hook!r}.{did_you_mean(hook, HOOKS)} Its hooks: {', '.join(HOOKS)}")
    if not found:
        raise PluginError(f"it implements no hook; mark one of {', '.join(HOOKS)} with @fastgen.api.hookimpl")
    return found


def _check_unmarked(plugin: object, attribute: str) -> None:
    if not attribute.startswith("fastgen_") or not inspect.isroutine(getattr(plugin, attribute, None)):
        return
    near = get_close_matches(attribute, HOOKS, n=1, cutoff=0.85)
    if near:
        meant = "" if near[0] == attribute else f" (did you mean {near[0]!r}?)"
        raise PluginError(f"the function {attribute}{meant} is not marked with @fastgen.api.hookimpl")


def _ask(manager: pluggy.PluginManager, hook: str, kind: type[Spec], name: str, specs: list[Spec]) -> None:
    results: list[Any] = getattr(manager.hook, hook)()
    if not results:  # pluggy leaves None out
        raise PluginError(f"{hook} returned None; it must return a list of {kind.__name__}")
    if not isinstance(results[0], list | tuple):
        raise PluginError(f"{hook} returned {results[0]!r}; it must return a list of {kind.__name__}")
    for spec in results[0]:
        if not isinstance(spec, kind):
            raise PluginError(f"{hook} returned {spec!r} in its list; it must hold {kind.__name__} objects")
        specs.append(replace(spec, plugin=name))


def _check_claims(specs: list[Spec]) -> None:
    seen: set[tuple[type[Spec], str]] = set()
    for spec in specs:
        for claim in spec.claims():
            if (type(spec), claim) in seen:
                raise PluginError(f"it claims {claim!r} in two {type(spec).__name__}s")
            seen.add((type(spec), claim))
