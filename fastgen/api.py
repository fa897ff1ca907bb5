"""Everything a plugin may import: ``from fastgen import api as fg``. What is not here may change without notice.

Importing it loads neither torch nor transformers. The parts, which need torch, load when they are first used, so a
plugin's entry module mentions them inside its ``build`` function only; the classes of odd parts live in a module of
their own, which the entry module imports inside ``build``. A whole adapter for a model like Llama::

    from fastgen import api as fg

    class FooConfig(fg.HFConfig):
        attention_bias: bool = False

    def build(config: FooConfig) -> fg.Decoder:
        ...

    @fg.hookimpl
    def fastgen_models() -> list[fg.ModelSpec]:
        return [fg.ModelSpec(("FooForCausalLM",), FooConfig, build, fg.DECODER_WEIGHTS)]

and in its pyproject.toml::

    [project]
    keywords = ["FooForCausalLM"]      # lets fastgen say whose fault it is when the plugin does not load
    dependencies = ["fastgen>=0.1,<0.2"]

    [project.entry-points.fastgen]
    foo = "fastgen_foo"
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastgen.core.plugin import (
    CheckpointFormatSpec,
    CommandSpec,
    KernelSpec,
    LogitsProcessorSpec,
    ModelSourceSpec,
    ModelSpec,
    hookimpl,
    register,
    registered,
    unregister,
)
from fastgen.errors import (
    CheckpointError,
    ConfigError,
    FastgenError,
    InvalidRequestError,
    ModelNotFoundError,
    PluginError,
    UnsupportedModelError,
    did_you_mean,
)

if TYPE_CHECKING:
    from fastgen.core.containers import Block, Decoder, PreNorm
    from fastgen.core.hf_config import HFConfig
    from fastgen.core.layers import MLP, Attention, Batch, Embed, Head, Layer, Linear, RMSNorm, Rope, Table
    from fastgen.core.layers.layer import parameter
    from fastgen.core.rope_config import RopeConfig
    from fastgen.core.weight_map import DECODER_WEIGHTS, WeightMap
    from fastgen.kernels.ops import Implementation, KernelTable, Need

_HOMES = {
    "Attention": "fastgen.core.layers",
    "Batch": "fastgen.core.layers",
    "Block": "fastgen.core.containers",
    "Decoder": "fastgen.core.containers",
    "Embed": "fastgen.core.layers",
    "HFConfig": "fastgen.core.hf_config",
    "Head": "fastgen.core.layers",
    "Implementation": "fastgen.kernels.ops",
    "KernelTable": "fastgen.kernels.ops",
    "DECODER_WEIGHTS": "fastgen.core.weight_map",
    "Layer": "fastgen.core.layers",
    "Linear": "fastgen.core.layers",
    "MLP": "fastgen.core.layers",
    "Need": "fastgen.kernels.ops",
    "PreNorm": "fastgen.core.containers",
    "RMSNorm": "fastgen.core.layers",
    "Rope": "fastgen.core.layers",
    "RopeConfig": "fastgen.core.rope_config",
    "Table": "fastgen.core.layers",
    "WeightMap": "fastgen.core.weight_map",
    "parameter": "fastgen.core.layers.layer",
}

__all__ = [
    "DECODER_WEIGHTS",
    "MLP",
    "Attention",
    "Batch",
    "Block",
    "CheckpointError",
    "CheckpointFormatSpec",
    "CommandSpec",
    "ConfigError",
    "Decoder",
    "Embed",
    "FastgenError",
    "HFConfig",
    "Head",
    "Implementation",
    "InvalidRequestError",
    "KernelSpec",
    "KernelTable",
    "Layer",
    "Linear",
    "LogitsProcessorSpec",
    "ModelNotFoundError",
    "ModelSourceSpec",
    "ModelSpec",
    "Need",
    "PluginError",
    "PreNorm",
    "RMSNorm",
    "Rope",
    "RopeConfig",
    "Table",
    "UnsupportedModelError",
    "WeightMap",
    "did_you_mean",
    "hookimpl",
    "parameter",
    "register",
    "registered",
    "unregister",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"fastgen.api has no {name!r}.{did_you_mean(name, __all__)}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
