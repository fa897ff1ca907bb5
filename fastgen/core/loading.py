"""From a blueprint to a model with its weights."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fastgen.config import EngineConfig
from fastgen.core.blueprint import Blueprint
from fastgen.core.checkpoint import check_memory
from fastgen.core.containers import Decoder
from fastgen.core.layers.layer import building
from fastgen.core.lora import Loras
from fastgen.core.quant import Packing
from fastgen.core.request import model_defaults
from fastgen.core.weights import load

__all__ = ["load_model", "tell"]

logger = logging.getLogger("fastgen")


def load_model(blueprint: Blueprint, loras: Loras | None = None, *, progress: bool = False) -> Decoder:
    """Build the model on its device and fill it, one tensor in memory at a time; quantise it meanwhile, if asked to.

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
    placements = blueprint.placements
    packing = None
    if blueprint.quantisation is not None:
        packing = Packing(
            blueprint.quantisation,
            model,
            blueprint.model_config,
            blueprint.checkpoint,
            name=blueprint.files.name,
            plugin=blueprint.registry.record(blueprint.spec.plugin).label,
        )
        placements = packing.begin(placements)
    with Progress(
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        transient=True,
        disable=not progress,
        console=Console(stderr=True),
    ) as bar:
        total = sum(blueprint.checkpoint.tensors[placement.name].nbytes for placement in placements)
        task = bar.add_task("load", total=total)
        load(
            model,
            placements,
            blueprint.model_config,
            blueprint.checkpoint,
            loaded=lambda done: bar.advance(task, done),
            filled=packing.filled if packing is not None else lambda _path: None,
        )
    if packing is not None:
        packing.end()
    if loras is not None:
        loras.attach(model, blueprint.dtype)
    model.bind(blueprint.kernels)
    model.eval()
    model.loaded()
    return model


def tell(blueprint: Blueprint, config: EngineConfig, *, progress: bool = False) -> None:
    """Log what was decided; the sizes go to standard error too if ``progress`` is shown."""
    cache, budget = blueprint.cache, blueprint.budget
    for told, reason in (
        (
            f"KV cache: {cache.num_blocks:,} blocks of {cache.block_size} tokens, {cache.total_bytes / 2**30:.2f} GiB",
            cache.reason,
        ),
        (f"token budget: {budget.tokens:,} tokens a pass", budget.reason),
    ):
        logger.info("%s (%s)", told, reason)
        if progress:
            print(f"{told} ({reason})", file=sys.stderr)
    _, running = blueprint.pass_limits(config)
    if "max_sequences" in config.model_fields_set and running < config.max_sequences:
        logger.warning(
            "max_sequences: %d were asked for, and no more than %d can run at once, as many as a pass has tokens (%s); "
            "raise max_batch_tokens",
            config.max_sequences,
            running,
            budget.reason,
        )
    for lora in blueprint.loras:
        logger.info("LoRA adapter %r: %d modules, from %s", lora.name, len(lora.targets), lora.directory)
    if defaults := model_defaults(blueprint.generation_config):
        logger.info("requests that leave these open take them from generation_config.json: %s", defaults)
