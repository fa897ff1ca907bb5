"""Plugins: what they hand over (specs), how they are asked (hooks), loaded (loader) and chosen (claims, registry).

Light: importing it loads neither torch nor transformers.
"""

from __future__ import annotations

from fastgen.core.plugin.claims import ModelRow
from fastgen.core.plugin.hooks import HOOKS, Hooks, collect, hookimpl
from fastgen.core.plugin.loader import PluginRecord
from fastgen.core.plugin.process import load_registry, register, registered, registry, unregister
from fastgen.core.plugin.registry import Registry
from fastgen.core.plugin.specs import (
    CheckpointFormatSpec,
    CommandSpec,
    KernelSpec,
    LoadedModel,
    LogitsProcessorSpec,
    ModelSourceSpec,
    ModelSpec,
    Spec,
)

__all__ = [
    "HOOKS",
    "CheckpointFormatSpec",
    "CommandSpec",
    "Hooks",
    "KernelSpec",
    "LoadedModel",
    "LogitsProcessorSpec",
    "ModelRow",
    "ModelSourceSpec",
    "ModelSpec",
    "PluginRecord",
    "Registry",
    "Spec",
    "collect",
    "hookimpl",
    "load_registry",
    "register",
    "registered",
    "registry",
    "unregister",
]
