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
    OverloadedError,
    PluginError,
    UnsupportedModelError,
    did_you_mean,
    some,
)

if TYPE_CHECKING:
    from fastgen.core.containers import Block, Decoder, Parallel, ParallelNorms, PostNorm, PreNorm, Sandwich
    from fastgen.core.hf_config import Count, HFConfig, Positive
    from fastgen.core.layers import (
        MLP,
        Attention,
        Batch,
        CachedAttention,
        Embed,
        Experts,
        Head,
        Layer,
        LayerNorm,
        Linear,
        MoE,
        Norm,
        PlainMLP,
        RMSNorm,
        Rope,
        SharedExpert,
        Table,
        alibi_slopes,
    )
    from fastgen.core.layers.layer import parameter
    from fastgen.core.rope_config import RopeConfig
    from fastgen.core.weight_map import (
        DECODER_WEIGHTS,
        Destination,
        WeightMap,
        expert_rules,
        split_gate_up,
        split_interleaved,
        split_qkv,
        split_qkv_groups,
    )
    from fastgen.kernels.ops import Implementation, KernelTable, Need
    from fastgen.kernels.paging import CacheSpec, PagedAttention, PagedLayout, Scores

_HOMES = {
    "alibi_slopes": "fastgen.core.layers",
    "Attention": "fastgen.core.layers",
    "Batch": "fastgen.core.layers",
    "Block": "fastgen.core.containers",
    "CachedAttention": "fastgen.core.layers",
    "CacheSpec": "fastgen.kernels.paging",
    "Count": "fastgen.core.hf_config",
    "Decoder": "fastgen.core.containers",
    "DECODER_WEIGHTS": "fastgen.core.weight_map",
    "Destination": "fastgen.core.weight_map",
    "Embed": "fastgen.core.layers",
    "expert_rules": "fastgen.core.weight_map",
    "Experts": "fastgen.core.layers",
    "Head": "fastgen.core.layers",
    "HFConfig": "fastgen.core.config_class",
    "Implementation": "fastgen.kernels.ops",
    "KernelTable": "fastgen.kernels.ops",
    "Layer": "fastgen.core.layers",
    "LayerNorm": "fastgen.core.layers",
    "Linear": "fastgen.core.layers",
    "MLP": "fastgen.core.layers",
    "MoE": "fastgen.core.layers",
    "Need": "fastgen.kernels.ops",
    "Norm": "fastgen.core.layers",
    "PagedAttention": "fastgen.kernels.paging",
    "PagedLayout": "fastgen.kernels.paging",
    "Parallel": "fastgen.core.containers",
    "ParallelNorms": "fastgen.core.containers",
    "parameter": "fastgen.core.layers.layer",
    "PlainMLP": "fastgen.core.layers",
    "Positive": "fastgen.core.hf_config",
    "PostNorm": "fastgen.core.containers",
    "PreNorm": "fastgen.core.containers",
    "RMSNorm": "fastgen.core.layers",
    "Rope": "fastgen.core.layers",
    "RopeConfig": "fastgen.core.rope_config",
    "Sandwich": "fastgen.core.containers",
    "Scores": "fastgen.kernels.paging",
    "SharedExpert": "fastgen.core.layers",
    "split_gate_up": "fastgen.core.weight_map",
    "split_interleaved": "fastgen.core.weight_map",
    "split_qkv": "fastgen.core.weight_map",
    "split_qkv_groups": "fastgen.core.weight_map",
    "Table": "fastgen.core.layers",
    "WeightMap": "fastgen.core.weight_map",
}

__all__ = [
    "DECODER_WEIGHTS",
    "MLP",
    "Attention",
    "Batch",
    "Block",
    "CacheSpec",
    "CachedAttention",
    "CheckpointError",
    "CheckpointFormatSpec",
    "CommandSpec",
    "ConfigError",
    "Count",
    "Decoder",
    "Destination",
    "Embed",
    "Experts",
    "FastgenError",
    "HFConfig",
    "Head",
    "Implementation",
    "InvalidRequestError",
    "KernelSpec",
    "KernelTable",
    "Layer",
    "LayerNorm",
    "Linear",
    "LogitsProcessorSpec",
    "MoE",
    "ModelNotFoundError",
    "ModelSourceSpec",
    "ModelSpec",
    "Need",
    "Norm",
    "OverloadedError",
    "PagedAttention",
    "PagedLayout",
    "Parallel",
    "ParallelNorms",
    "PlainMLP",
    "PluginError",
    "Positive",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "Rope",
    "RopeConfig",
    "Sandwich",
    "Scores",
    "SharedExpert",
    "Table",
    "UnsupportedModelError",
    "WeightMap",
    "alibi_slopes",
    "did_you_mean",
    "expert_rules",
    "hookimpl",
    "parameter",
    "register",
    "registered",
    "some",
    "split_gate_up",
    "split_interleaved",
    "split_qkv",
    "split_qkv_groups",
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
