"""From a blueprint to a model with its weights."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fastgen.core.blueprint import Blueprint
from fastgen.core.checkpoint import check_memory
from fastgen.core.containers import Decoder
from fastgen.core.layers.layer import building
from fastgen.core.lora import Loras
from fastgen.core.weights import load

__all__ = ["load_model"]


def load_model(blueprint: Blueprint, loras: Loras | None = None, *, progress: bool = False) -> Decoder:
    """Build the model on its device and fill it, one tensor in memory at a time.

    Args:
        loras: adapters to put into it.
        progress: show a bar on standard error.

    Raises:
        CheckpointError: the weights do not fit in memory, or a file changed since the blueprint was drawn.
    """
    if blueprint.device.type == "cpu":
        check_memory(blueprint.weight_bytes, "the weights")
    parts = blueprint.spec.load()
    with building(blueprint.dtype, blueprint.device):
        model = parts.build(blueprint.model_config)
    with Progress(
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        transient=True,
        disable=not progress,
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("load", total=blueprint.checkpoint.total_bytes)
        load(
            model,
            blueprint.placements,
            blueprint.model_config,
            blueprint.checkpoint,
            loaded=lambda done: bar.advance(task, done),
        )
    if loras is not None:
        loras.attach(model, blueprint.dtype)
    model.bind(blueprint.kernels)
    model.eval()
    model.loaded()
    return model
