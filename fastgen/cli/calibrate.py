"""`fastgen calibrate MODEL`: how throughput grows with the tokens of a pass, and the token budget that follows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastgen.cli.options import SectionedCommand, engine_options
from fastgen.cli.output import print_table
from fastgen.config import EngineConfig
from fastgen.errors import ConfigError

if TYPE_CHECKING:
    from fastgen.core.calibration import Budget, Calibration
    from fastgen.core.measuring import Tick

__all__ = ["calibrate"]

BUSY = 0.1
"""Cores that others keep busy, from which on times are not to be relied on."""


@click.command(cls=SectionedCommand)
@click.argument("model")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the curve here."
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the curve to this file, .png or .svg.",
)
@engine_options
def calibrate(model: str, json_path: Path | None, plot_path: Path | None, config: EngineConfig) -> None:
    """Measure how long forward passes of 1, 2, 4, ... tokens of MODEL take, for some 20 seconds, and choose the token
    budget: the smallest from 64 on that reaches 95 % of the best throughput, or with --target-latency the largest up to
    there whose pass stays within so many milliseconds.

    The curve is remembered for this model, these options and this machine; engines started later take their budget
    from it, unless max_batch_tokens says otherwise.
    """
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"{option} {path}: the folder {path.parent} does not exist")
    if plot_path is not None:
        from fastgen.bench import plots

        plots.check(plot_path)
    from fastgen.bench.machine import Meter
    from fastgen.core.engine import Engine

    # With a target the engine would measure by itself before it starts.
    plain = config.model_copy(update={"target_latency": None})
    with Engine.load(model, plain, progress=sys.stderr.isatty()) as engine, _progress() as tick:
        meter = Meter()
        found = engine.calibrate(tick=tick)
        others = meter.read()
    budget = found.budget(config.target_latency)
    _print(found, budget)
    if others >= BUSY:
        click.echo(
            f"Other processes kept {others:.2f} cores busy meanwhile: calibrate again when the machine is quiet."
        )
    if config.max_batch_tokens is not None:
        click.echo(f"max_batch_tokens is set to {config.max_batch_tokens} in these options and goes over it.")
    if json_path is not None:
        _write(found, budget, config.target_latency, json_path)
        click.echo(f"Written to {json_path}.")
    if plot_path is not None:
        from fastgen.bench.curve import draw_curve

        draw_curve(found, budget, plot_path)
        click.echo(f"Drawn to {plot_path}.")
    try:
        click.echo(f"Remembered in {found.remember()}.")
    except ConfigError as error:
        click.echo(f"warning: {error}", err=True)


def _print(found: Calibration, budget: Budget) -> None:
    setting = found.setting
    threads = f"{setting.threads} thread{'s' * (setting.threads != 1)}"
    click.echo(f"{setting.model}, {setting.dtype}. {setting.device}, {threads}.")
    click.echo(f"Passes of a fresh prompt's tokens after {found.context} others; medians.")
    click.echo()
    columns = ("tokens", "ms a pass", "tokens/s", "of the best")
    rows = [
        (f"{point.tokens}", _ms(point.seconds), f"{point.rate:,.0f}", f"{100 * point.rate / found.best:.0f} %")
        for point in found.points
    ]
    print_table(columns, rows, right=columns)
    if not found.complete:
        click.echo("There was no time, or no room, for larger passes.")
    click.echo()
    click.echo(f"Token budget: {budget.tokens} ({budget.reason}).")


def _ms(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _write(found: Calibration, budget: Budget, target_latency: float | None, path: Path) -> None:
    import json

    facts: dict[str, Any] = {
        "budget": budget.tokens,
        "reason": budget.reason,
        "target_latency": target_latency,
        "calibration": found.model_dump(mode="json"),
    }
    try:
        path.write_text(json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


@contextmanager
def _progress() -> Iterator[Tick]:
    """A bar over the time it may take, on a terminal only. It is drawn seldom: it shares the cores."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, refresh_per_second=1, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("measuring", total=1.0)
        yield lambda size, used: bar.update(task, description=f"passes of {size} tokens", completed=used)
