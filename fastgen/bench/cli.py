"""The command `fastgen bench`. Heavy imports wait until a benchmark runs."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastgen.errors import ConfigError

if TYPE_CHECKING:
    from fastgen.bench.offline import Watch
    from fastgen.bench.workloads import Workload

__all__ = ["bench"]

SOURCE_OPTIONS = ("revision", "token", "offline", "load_bin")


@click.group()
def bench() -> None:
    """Measure: tokens per second beside other engines."""


@bench.command()
@click.argument("model")
@click.option(
    "--workload",
    "workload_names",
    multiple=True,
    default=("w1", "w2"),
    show_default=True,
    help="A built-in workload (w1: one stream, w2: 64 requests) or a JSON file; may be repeated.",
)
@click.option("--engines", default="fastgen,transformers", show_default=True, help="Which engines, in turn.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Timed runs of each engine.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of every engine. Unset: torch's choice.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Number format of every engine.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, ... for every engine.")
@click.option(
    "-o", "--option", "options", multiple=True, metavar="NAME=VALUE", help="An engine option of fastgen; repeatable."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all rounds here.")
def offline(
    model: str,
    workload_names: tuple[str, ...],
    engines: str,
    rounds: int,
    threads: int | None,
    dtype: str,
    device: str,
    options: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Run whole workloads at once: fastgen beside transformers' batched generate, the same weights, greedy, output
    lengths fixed. Engines take turns; medians of the rounds are shown with their spread."""
    from fastgen.bench import workloads as work
    from fastgen.bench.offline import compare, machine, select_engines

    chosen = [work.load(name) for name in dict.fromkeys(workload_names)]
    names = select_engines([name.strip() for name in engines.split(",") if name.strip()])
    engine_options = _parse_options(options)
    if json_path is not None and not json_path.resolve().parent.is_dir():
        raise ConfigError(f"--json {json_path}: the folder {json_path.parent} does not exist")

    import torch
    from rich.console import Console

    from fastgen.bench.engines import Settings
    from fastgen.bench.report import print_report
    from fastgen.core.source import resolve

    threads = threads or torch.get_num_threads()
    device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    # Where the files come from is settled here, once for all engines.
    source = {name: engine_options.pop(name) for name in SOURCE_OPTIONS if name in engine_options}
    found = resolve(model, **source)
    found.fetch_weights()
    settings = Settings(found.directory, dtype, device, threads, tuple(engine_options.items()))
    info = machine(threads)
    with _progress(chosen, names, rounds) as watch:
        results = compare(chosen, names, settings, rounds=rounds, watch=watch)
    print_report(Console(width=None if sys.stdout.isatty() else 120), results, info, model=found.name, dtype=dtype)
    if json_path is not None:
        record: dict[str, Any] = {"model": found.name, "dtype": dtype, "device": device}
        record |= {"machine": info, "options": engine_options}
        record["results"] = [result.as_json() for result in results]
        json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        click.echo(f"Written to {json_path}.")


def _parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Validated by fastgen's own config, before anything is loaded."""
    from fastgen.config import EngineConfig

    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--option {pair}: write NAME=VALUE, such as max_batch_tokens=256")
        if name in ("dtype", "device", "threads"):
            raise ConfigError(f"--option {pair}: use --{name}, which holds for every engine")
        options[name] = _literal(value)
    config = EngineConfig.of(options)
    return {name: getattr(config, name) for name in options}


def _literal(text: str) -> Any:
    """A number, a truth value, ...: as TOML writes it; else text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@contextmanager
def _progress(workloads: Sequence[Workload], engines: Sequence[str], rounds: int) -> Iterator[Watch]:
    """A bar over all runs, counted in output tokens, on a terminal only. It is drawn seldom: it shares the cores."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, refresh_per_second=1, transient=True, disable=not console.is_terminal)
    total = sum(workload.output_tokens for workload in workloads) * len(engines) * rounds
    with bar:
        task = bar.add_task("loading", total=total)

        def watch(workload: str, engine: str, number: int) -> Any:
            bar.update(task, description=f"{workload} {engine} {number}/{rounds}")
            return lambda tokens: bar.advance(task, tokens)

        yield watch
