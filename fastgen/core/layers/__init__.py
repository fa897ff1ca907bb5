"""The parts a model is composed of."""

from fastgen.core.layers.attention import Attention, CachedAttention, alibi_slopes
from fastgen.core.layers.batch import Batch
from fastgen.core.layers.embed import Embed, Head, Table
from fastgen.core.layers.layer import Layer
from fastgen.core.layers.linear import Linear
from fastgen.core.layers.mlp import MLP, PlainMLP
from fastgen.core.layers.moe import Experts, MoE, SharedExpert
from fastgen.core.layers.norm import LayerNorm, Norm, RMSNorm
from fastgen.core.layers.rope import Rope

__all__ = [
    "MLP",
    "Attention",
    "Batch",
    "CachedAttention",
    "Embed",
    "Experts",
    "Head",
    "Layer",
    "LayerNorm",
    "Linear",
    "MoE",
    "Norm",
    "PlainMLP",
    "RMSNorm",
    "Rope",
    "SharedExpert",
    "Table",
    "alibi_slopes",
]
