"""How a checkpoint fits the model that its config describes: what is read, what is left, what stands for what."""

from __future__ import annotations

from collections.abc import Mapping

from fastgen.core.checkpoint import Checkpoint
from fastgen.core.containers import Decoder
from fastgen.core.dtypes import FLOATS
from fastgen.core.hf_config import HFConfig
from fastgen.core.quantised import WAY_OUT, quantised_tensor
from fastgen.core.weight_map import WeightMap
from fastgen.core.weights import Placement, plan
from fastgen.errors import CheckpointError

__all__ = ["place", "prepare"]

Shapes = dict[str, tuple[int, ...]]


def prepare(
    config: HFConfig, checkpoint: Checkpoint, weights: WeightMap
) -> tuple[HFConfig, WeightMap, Shapes, list[str]]:
    """The config to build, where tensors go, the shapes of those to load, and what to say about the others."""
    config, weights, shapes, untied = _tie(config, checkpoint, weights)
    return config, weights, shapes, [*untied, *_leave_unread(shapes, weights, config)]


def place(
    model: Decoder, weights: WeightMap, config: HFConfig, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]
) -> list[Placement]:
    """Where each of the checkpoint's tensors goes.

    Raises:
        CheckpointError: they do not fit (see ``weights.plan``), or are quantised.
    """
    try:
        placements = plan(model, weights, config, shapes)
    except CheckpointError as error:
        found = quantised_tensor({name: checkpoint.tensors[name].dtype for name in shapes})
        if found is None:
            raise
        raise CheckpointError(
            f"the checkpoint is quantised, though config.json does not say so: {found}. This is not supported; "
            f"{WAY_OUT}. ({error})"
        ) from None
    for placement in placements:
        dtype = checkpoint.tensors[placement.name].dtype
        if dtype not in FLOATS:
            raise CheckpointError(
                f"{placement.name} is stored as {dtype}: quantised or damaged weights, which are not supported; "
                f"{WAY_OUT}"
            )
    return placements


def _tie(config: HFConfig, checkpoint: Checkpoint, weights: WeightMap) -> tuple[HFConfig, WeightMap, Shapes, list[str]]:
    """A config that ties head and embedding, beside a file that holds both: equal, the head is left unread;
    different, each is used, as transformers does. Of a file that holds the head alone, it is the embedding too. The
    config to build, where tensors go, the shapes to load, and what to say."""
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    found: dict[str, str] = {}
    for name, renamed in weights.rename(shapes).items():
        to = weights.find(renamed)
        if to is not None and to.tail == "weight":
            found[to.path] = name
    head, table = found.get("head.proj"), found.get("embed.tokens")
    if not config.tie_word_embeddings or head is None:
        return config, weights, shapes, []
    if table is None:
        module = weights.rename(shapes)[head].rpartition(".")[0]
        return config, weights.but({module: "embed.tokens"}), shapes, []
    if checkpoint.agrees(head, checkpoint, table):
        del shapes[head]
        return config, weights, shapes, []
    warning = (
        f"config.json ties the output head to the embedding, but the checkpoint holds a different {head}: both are used"
    )
    return config.model_copy(update={"tie_word_embeddings": False}), weights, shapes, [warning]


def _leave_unread(shapes: Shapes, weights: WeightMap, config: HFConfig) -> list[str]:
    """Take out of ``shapes`` what the weight map says is not served. Returns what to say about it."""
    if weights.unused is None:
        return []
    unread = [name for name in shapes if weights.unused(name, config)]
    for name in unread:
        del shapes[name]
    if not unread:
        return []
    return [
        f"{len(unread)} tensors of the checkpoint belong to parts that are not served here and are left unread: "
        f"{', '.join(unread[:2])}{', ...' if len(unread) > 2 else ''}"
    ]
