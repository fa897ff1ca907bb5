"""The parts a model is composed of."""

from fastgen.core.layers.attention import Attention
from fastgen.core.layers.batch import Batch
from fastgen.core.layers.embed import Embed, Head, Table
from fastgen.core.layers.layer import Layer
from fastgen.core.layers.linear import Linear
from fastgen.core.layers.mlp import MLP
from fastgen.core.layers.norm import RMSNorm
from fastgen.core.layers.rope import Rope

__all__ = ["MLP", "Attention", "Batch", "Embed", "Head", "Layer", "Linear", "RMSNorm", "Rope", "Table"]
