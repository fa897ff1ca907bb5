"""Which family serves a model, and what it reads in the model's config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastgen.core.hf_config import HFConfig, read_raw_config
from fastgen.core.plugin import LoadedModel, ModelSpec, Registry
from fastgen.core.quantised import refuse_quantised_beside
from fastgen.core.source import ModelFiles
from fastgen.errors import ConfigError, UnsupportedModelError

__all__ = ["Family", "architectures_of", "find_family"]


class Family(NamedTuple):
    """A model's family, with nothing left to import, and the model's config as the family reads it."""

    spec: ModelSpec
    parts: LoadedModel
    config: HFConfig


def find_family(files: ModelFiles, plugins: Registry, adapter: Mapping[str, str]) -> Family:
    """The family of a model's files.

    Args:
        adapter: pins, as in ``Registry.find_model``.

    Raises:
        UnsupportedModelError: no plugin serves it, or its config asks for what its family does not do.
        ConfigError: its config holds what cannot be used, or contradicts itself.
        PluginError: several plugins claim it, or the one that does is broken.
    """
    raw = read_raw_config(files.directory)
    names = architectures_of(raw)
    if not names:
        raise UnsupportedModelError(
            f"{files.name}: config.json names no architectures, so no plugin can be chosen; add "
            '"architectures": ["FooForCausalLM"], the name of the class it was saved from'
        )
    spec = plugins.find_model(names, adapter=adapter)
    _check_model_type(raw, names, spec, plugins, adapter)
    parts = spec.load()
    config = parts.config.from_raw(raw)
    if "quantization_config" not in parts.config.model_fields:
        refuse_quantised_beside(files.directory)
    return Family(spec, parts, config)


def architectures_of(raw: Mapping[str, Any]) -> list[str]:
    """The names in a raw config's ``architectures``, whatever form they have."""
    names = raw.get("architectures") or []
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]


def _check_model_type(
    raw: Mapping[str, Any], names: list[str], spec: ModelSpec, plugins: Registry, adapter: Mapping[str, str]
) -> None:
    """Refuse a config whose two names of its family belong to two families of one distribution, whose author tells
    them apart: they differ in what the weights do not show, such as a window or a default. ``model_type`` is that of
    ``FooForCausalLM``, in small letters. A stranger's architecture may go by any type.

    Raises:
        ConfigError: names both.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or spec.fallback or set(names) & set(adapter):
        return
    stem = re.sub(r"[^a-z0-9]", "", kind.lower())
    meant = re.compile(rf"{stem}(for[a-z]+|lmheadmodel)", re.IGNORECASE)
    if not stem or any(meant.fullmatch(name) for name in spec.architectures):
        return
    for row in plugins.model_rows():
        same = row.plugin.distribution == plugins.record(spec.plugin).distribution
        if same and not row.spec.fallback and meant.fullmatch(row.architecture):
            served = next(name for name in names if name in spec.architectures)
            raise ConfigError(
                f"config.json names the architecture {served!r} and the model_type {kind!r}, which is that of "
                f"{row.architecture!r}; correct the one that is wrong, or pin the plugin of the architecture (the "
                f"engine option adapter={{{served!r}: {spec.plugin!r}}})"
            )
