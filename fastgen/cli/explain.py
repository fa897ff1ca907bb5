"""`fastgen explain MODEL`: how a model would be served, and why, without loading its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fastgen.cli.options import engine_options
from fastgen.cli.output import print_json, print_table
from fastgen.config import EngineConfig

if TYPE_CHECKING:
    from fastgen.core.blueprint import Blueprint

__all__ = ["explain"]


@click.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@engine_options
def explain(model: str, as_json: bool, config: EngineConfig) -> None:
    """Show how MODEL (a Hugging Face name, a directory or a file) would be served: its files, plugin and geometry, the
    memory for weights and cache, and the kernel chosen for each operation. Weights are fetched if they are not here,
    and not read."""
    from fastgen.core.blueprint import draw

    facts = describe(draw(model, config))
    if as_json:
        print_json(facts)
        return
    for title, section in facts.items():
        click.echo(click.style(title, bold=True))
        if title == "kernels":
            columns = ("operation", "sizes", "chosen", "not chosen")
            print_table(columns, [(k["operation"], k["sizes"], k["chosen"], k["not_chosen"]) for k in section])
        elif isinstance(section, list):
            for line in section:
                click.echo(f"  {line}")
        else:
            width = max(map(len, section))
            for name, value in section.items():
                click.echo(f"  {name.replace('_', ' '):<{width}}  {value}")
        click.echo()


def describe(drawn: Blueprint) -> dict[str, Any]:
    """What there is to say, as plain values."""
    from fastgen.core.request import model_defaults

    config, cache, plugin = drawn.model_config, drawn.cache, drawn.registry.record(drawn.spec.plugin)
    facts: dict[str, Any] = {
        "model": {
            "name": drawn.files.name,
            "files": str(drawn.files.directory),
            "from": drawn.files.origin,
            "revision": drawn.files.revision or "-",
            "architecture": ", ".join(config.architectures),
            "plugin": f"{plugin.name} ({plugin.distribution} {plugin.version})",
        },
        "geometry": {
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "vocabulary": config.vocab_size,
            "tied_embeddings": config.tie_word_embeddings,
            "rope": config.rope.type if config.rope is not None else "-",
            "longest_sequence": drawn.max_model_len,
        },
        "memory": {
            "device": str(drawn.device),
            "dtype": f"{str(drawn.dtype).removeprefix('torch.')} ({drawn.dtype_reason})",
            "weights": _bytes(drawn.weight_bytes),
            "cache_block": f"{_bytes(cache.bytes_per_block)} for {cache.block_size} tokens",
            "cache": f"{cache.num_blocks} blocks, {_bytes(cache.total_bytes)} ({cache.reason})",
            "tokens_that_fit": cache.tokens,
        },
        "kernels": [
            {
                "operation": choice.need.operation,
                "sizes": ", ".join(f"{name} {value}" for name, value in choice.need.sizes.items()),
                "chosen": choice.chosen,
                "not_chosen": "; ".join(f"{name}: {reason}" for name, reason in choice.rejected) or "-",
            }
            for choice in drawn.kernels.choices
        ],
    }
    if drawn.loras:
        facts["lora adapters"] = [
            f"{lora.name}: {len(lora.targets)} modules, rank {', '.join(map(str, lora.ranks))}, from {lora.directory}"
            for lora in drawn.loras
        ]
    if defaults := model_defaults(drawn.generation_config):
        facts["sampling defaults (generation_config.json)"] = defaults
    if drawn.warnings:
        facts["warnings"] = drawn.warnings
    return facts


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
