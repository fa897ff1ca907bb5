"""The command `fastgen bench`. Heavy imports wait until a benchmark runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastgen.bench.options import Common, common_options, execute, numbers
from fastgen.errors import ConfigError

if TYPE_CHECKING:
    from fastgen.bench.measures import Sla
    from fastgen.bench.protocol import Workload

__all__ = ["bench"]

F = TypeVar("F", bound=Callable[..., Any])

CLIENTS = click.IntRange(min=1, max=1024)
WORKLOAD_HELP = (
    "w1 (one stream), w2 (64 requests), w3 (streams disturbed by long prompts), fastgen-1200-60 (DeepSpeed-FastGen's, "
    "any mean lengths), or a JSON file"
)


@click.group()
def bench() -> None:
    """Measure: tokens per second, waits and gaps, beside other engines."""


def _workloads(*default: str) -> Callable[[F], F]:
    return click.option(
        "--workload",
        "names",
        multiple=True,
        default=default,
        show_default=True,
        help=f"{WORKLOAD_HELP}; may be repeated.",
    )


_workload = click.option("--workload", "name", default="fastgen-1200-60", show_default=True, help=f"{WORKLOAD_HELP}.")


def _sla_options(function: F) -> F:
    for option in (
        click.option("--sla-scale", type=float, default=1.0, show_default=True, help="Factor of both SLA rates."),
        click.option(
            "--sla-prompt-rate",
            type=float,
            default=512.0,
            show_default=True,
            help="The first token must come within prompt tokens / this seconds.",
        ),
        click.option(
            "--sla-rates",
            default="2,4,6",
            show_default=True,
            help="Tokens a second that users must be given: the moving average (span 16) of gaps stays under 1/this.",
        ),
    ):
        function = option(function)
    return function


def _slas(prompt_rate: float, rates: str, scale: float) -> list[Sla]:
    from fastgen.bench.measures import Sla

    if not prompt_rate > 0 or not scale > 0:
        raise ConfigError(f"--sla-prompt-rate {prompt_rate:g} and --sla-scale {scale:g} must be above 0")
    return [Sla(prompt_rate, rate).scaled(scale) for rate in numbers(rates, "--sla-rates")]


@bench.command()
@_workloads("w1", "w2")
@common_options
def offline(names: tuple[str, ...], **common: Any) -> None:
    """Whole workloads at once: fastgen beside transformers' batched generate, the same weights, greedy, output lengths
    fixed. Engines take turns; medians of the rounds are shown with their spread."""
    execute("offline", Common(**common), names, default_engines="fastgen,transformers")


@bench.command()
@_workloads("w1")
@common_options
def latency(names: tuple[str, ...], **common: Any) -> None:
    """One stream: each request after the one before. Time to the first token, and the gaps between tokens."""
    from fastgen.bench.synthetic import with_clients

    execute(
        "latency",
        Common(**common),
        names,
        default_engines="fastgen,transformers",
        arrange=lambda workload: [with_clients(workload, 1)],
    )


@bench.command()
@_workload
@click.option("--clients", type=CLIENTS, help="Closed loop: so many at a time, each sends its next when answered.")
@click.option("--rate", type=float, help="Open loop: Poisson arrivals, so many a second, however many are running.")
@_sla_options
@common_options
def serving(
    name: str,
    clients: int | None,
    rate: float | None,
    sla_prompt_rate: float,
    sla_rates: str,
    sla_scale: float,
    **common: Any,
) -> None:
    """Requests that come while others run: first tokens, gaps, and how many requests a second keep a service level."""
    seed = common["seed"]

    def arrange(workload: Workload) -> list[Workload]:
        from fastgen.bench.synthetic import poisson, with_clients

        if clients is not None:
            return [with_clients(workload, clients, seed=seed)]
        if rate is not None:
            return [poisson(workload, rate, seed=seed)]
        if workload.at_once:
            raise ConfigError(f"the workload {name} does not say when requests arrive: give --clients or --rate")
        return [workload]

    if clients is not None and rate is not None:
        raise ConfigError("give --clients or --rate, not both")
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--rate {rate:g} must be above 0")
    slas = _slas(sla_prompt_rate, sla_rates, sla_scale)
    execute(
        "serving",
        Common(**common),
        [name],
        default_engines="fastgen",
        arrange=arrange,
        slas=slas,
        sla_scale=sla_scale,
    )


@bench.command()
@_workload
@click.option("--clients", "clients", help="Closed loops, such as 1,2,4,8,16,32 (the default).")
@click.option("--rates", help="Open loops instead: arrivals a second, such as 0.5,1,2,4.")
@_sla_options
@common_options
def sweep(
    name: str,
    clients: str | None,
    rates: str | None,
    sla_prompt_rate: float,
    sla_rates: str,
    sla_scale: float,
    **common: Any,
) -> None:
    """The same requests under a series of loads: how latency grows with throughput."""
    if clients is not None and rates is not None:
        raise ConfigError("give --clients or --rates, not both")
    counts = [int(value) for value in numbers(clients or "1,2,4,8,16,32", "--clients")]
    if clients is not None and [float(count) for count in counts] != numbers(clients, "--clients"):
        raise ConfigError(f"--clients {clients}: give whole numbers")
    chosen = numbers(rates, "--rates") if rates is not None else []
    seed = common["seed"]

    def arrange(workload: Workload) -> list[Workload]:
        from fastgen.bench.synthetic import poisson, with_clients

        if chosen:
            return [poisson(workload, rate, seed=seed) for rate in chosen]
        return [with_clients(workload, count, seed=seed) for count in counts]

    slas = _slas(sla_prompt_rate, sla_rates, sla_scale)
    execute(
        "sweep", Common(**common), [name], default_engines="fastgen", arrange=arrange, slas=slas, sla_scale=sla_scale
    )


@bench.command()
@click.argument("results", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
def plot(results: Path, output: Path) -> None:
    """Draw what a benchmark wrote with --json once more, to OUTPUT (.png or .svg)."""
    from fastgen.bench import plots, record

    plots.check(output)
    for path in plots.draw(record.read(results), output):
        click.echo(f"Drawn to {path}.")
