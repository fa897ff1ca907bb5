"""`fastgen explain MODEL`: how a model would be served, and why, without loading its weights."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from fastgen.cli.options import engine_options
from fastgen.cli.output import print_json, print_table
from fastgen.config import EngineConfig, cache_directory

if TYPE_CHECKING:
    from fastgen.core.blueprint import Blueprint
    from fastgen.core.calibration import Budget
    from fastgen.core.quant import Quantisation

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

    facts = describe(draw(model, config), config)
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


def describe(drawn: Blueprint, options: EngineConfig) -> dict[str, Any]:
    """What there is to say, as plain values.

    Args:
        options: that the blueprint was drawn with.
    """
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
        "passes": {
            "token_budget": f"{_budget(drawn.budget)} ({drawn.budget.reason})",
            "sequences": _sequences(drawn, options),
            "policy": options.policy,
            "recorded": _recorded(drawn, options),
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
    if drawn.quantisation is not None:
        facts["quantisation"] = _quantisation(drawn.quantisation, drawn.weight_bytes)
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


def _quantisation(quantisation: Quantisation, weight_bytes: int) -> dict[str, Any]:
    schemes: dict[str, list[str]] = {}
    for part in quantisation.parts:
        for scheme in dict.fromkeys(matrix.scheme for matrix in part.matrices.values()):
            schemes.setdefault(scheme, []).append(part.path)
    reasons: dict[str, list[str]] = {}
    for one in quantisation.kept:
        reasons.setdefault(one.reason, []).append(one.path)
    copied = " and, for the head, a copy of the embedding" if quantisation.copies_table else ""
    return {
        "scheme": quantisation.scheme,
        "kernel": ", ".join(quantisation.kernels),
        **{f"in_{scheme}": _alike(paths) for scheme, paths in schemes.items()},
        "in_floats": "; ".join(
            ["embeddings, norms, biases", *(f"{_alike(paths)} ({reason})" for reason, paths in reasons.items())]
        ),
        "packed": f"{_bytes(quantisation.bytes_before)} in {quantisation.dtype}{copied} become "
        f"{_bytes(quantisation.bytes_after)}",
        "all_weights": f"{_bytes(quantisation.model_bytes_before)} become {_bytes(weight_bytes)}",
        "kept_in": str(cache_directory() / "packed") if quantisation.keep else "- (packed at each start)",
    }


def _alike(paths: list[str]) -> str:
    """Paths with a ``*`` for their numbers, each once, with how many there are."""
    counts = Counter(re.sub(r"\d+", "*", path) for path in paths)
    return ", ".join(path if count == 1 else f"{path} ({count})" for path, count in counts.items())


def _budget(budget: Budget) -> str:
    return "chosen at start" if budget.pending else str(budget.tokens)


def _sequences(drawn: Blueprint, options: EngineConfig) -> str:
    asked = options.max_sequences
    if drawn.budget.pending:
        return f"{asked} at once, or as many as a pass has tokens"
    _, running = drawn.pass_limits(options)
    return f"{running} at once" + (f" (max_sequences {asked}, cut to the tokens of a pass)" if running < asked else "")


def _recorded(drawn: Blueprint, options: EngineConfig) -> str:
    from fastgen.core.runtime.graphs import MOST_TOKENS, why_unrecorded

    reason = (
        "record_passes is off" if not options.record_passes else "LoRA adapters are loaded" if drawn.loras else None
    )
    reason = reason or why_unrecorded(drawn.kernels)
    return f"no: {reason}" if reason else f"up to {MOST_TOKENS} tokens, if every part of the model may be"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
