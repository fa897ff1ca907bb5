"""Command-line options that all benchmarks share, and the run that follows from them."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastgen.errors import ConfigError, FastgenError

if TYPE_CHECKING:
    from fastgen.bench.measures import Sla
    from fastgen.bench.protocol import Opener, Workload
    from fastgen.bench.rounds import Watch

__all__ = ["Common", "common_options", "execute", "numbers"]

F = TypeVar("F", bound=Callable[..., Any])

SOURCE_OPTIONS = ("revision", "token", "offline", "load_bin")

_OPTIONS = (
    click.argument("model"),
    click.option("--engines", help="Which engines, in turn: fastgen, transformers, or rows of --peers."),
    click.option("--policy", "policies", default="", metavar="NAMES", help="Compare fastgen's scheduling policies."),
    click.option("--url", "urls", multiple=True, metavar="[NAME=]URL", help="A server with OpenAI's API; repeatable."),
    click.option("--url-model", help="The model's name there. Unset: the first that the server lists."),
    click.option("--api-key", envvar="FASTGEN_BENCH_API_KEY", show_envvar=True, help="Sent to the servers."),
    click.option(
        "--peers",
        "peers_file",
        type=click.Path(dir_okay=False, exists=True, path_type=Path),
        help="TOML file with engines in virtual environments of their own; see docs/Performance.md.",
    ),
    click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each engine."),
    click.option("--threads", type=click.IntRange(min=1), help="CPU threads of every engine. Unset: torch's choice."),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        default="float32",
        show_default=True,
        help="Number format of every engine.",
    ),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, ... for every engine."),
    click.option(
        "-o",
        "--option",
        "options",
        multiple=True,
        metavar="NAME=VALUE",
        help="An engine option of fastgen; repeatable.",
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything drawn."),
    click.option("--scale", type=float, default=1.0, show_default=True, help="Factor of fastgen-P-G's lengths."),
    click.option("--requests", type=click.IntRange(min=1), default=512, show_default=True, help="Of fastgen-P-G."),
    click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write everything here."),
    click.option(
        "--plot",
        "plot_path",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Write plots: out.png becomes out-token-latency.png and so on; .png or .svg.",
    ),
    click.option("--timelines", is_flag=True, help="Keep in the JSON when every token came."),
)


@dataclass(frozen=True, slots=True)
class Common:
    """What `common_options` gathered."""

    model: str
    engines: str | None
    policies: str
    urls: tuple[str, ...]
    url_model: str | None
    api_key: str | None
    peers_file: Path | None
    rounds: int
    threads: int | None
    dtype: str
    device: str
    options: tuple[str, ...]
    seed: int
    scale: float
    requests: int
    json_path: Path | None
    plot_path: Path | None
    timelines: bool


def common_options(function: F) -> F:
    """Adds the options to a command, which takes them as ``**common`` for `Common`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def numbers(text: str, option: str) -> list[float]:
    """Comma-separated numbers above 0, each once.

    Raises:
        ConfigError: something else, or none.
    """
    from fastgen.bench.rows import words

    try:
        values = [float(word) for word in words(text)]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise ConfigError(f"{option} {text}: give numbers above 0, comma-separated")
    return list(dict.fromkeys(values))


def execute(
    command: str,
    common: Common,
    names: Sequence[str],
    *,
    default_engines: str,
    arrange: Callable[[Workload], list[Workload]] = lambda workload: [workload],
    slas: Sequence[Sla] = (),
    sla_scale: float = 1.0,
) -> None:
    """Check everything, load the engines, run the rounds, print the tables, write the files.

    Args:
        names: of workloads.
        default_engines: when neither ``--engines`` nor ``--url`` is given.
        arrange: the loads to put each workload under.
        sla_scale: how ``slas`` were scaled, for the report.

    Raises:
        FastgenError: something cannot be run; whatever can be is checked before anything loads.
    """
    from fastgen.bench import plots
    from fastgen.bench.engines import TransformersEngine
    from fastgen.bench.rows import select_rows, words

    engines = common.engines if common.engines is not None else "" if common.urls else default_engines
    policies = words(common.policies)
    rows = select_rows(
        words(engines),
        policies=policies,
        urls=common.urls,
        url_model=common.url_model,
        api_key=common.api_key,
        peers=_peers(common.peers_file),
    )
    if command in ("serving", "sweep") and TransformersEngine.name in rows:
        raise ConfigError(
            f"bench {command}: transformers takes no requests in while others run; use it with offline and latency"
        )
    engine_options = _parse_options(common.options)
    for option, path in (("--json", common.json_path), ("--plot", common.plot_path)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"{option} {path}: the folder {path.parent} does not exist")
    if common.plot_path is not None:
        plots.check(common.plot_path)
    drawn = _draft(names, common)

    import torch
    from rich.console import Console

    from fastgen.bench.machine import machine
    from fastgen.bench.protocol import Settings
    from fastgen.bench.record import Record, SlaRecord, make_rows, write
    from fastgen.bench.report import print_record
    from fastgen.bench.rounds import compare
    from fastgen.core.source import resolve

    threads = common.threads or torch.get_num_threads()
    device = common.device if common.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    # Where the files come from is settled here, once for all engines.
    source = {name: engine_options.pop(name) for name in SOURCE_OPTIONS if name in engine_options}
    found = resolve(common.model, **source)
    workloads = [load for make in drawn for load in arrange(make(found.directory))]
    if words(engines):
        found.fetch_weights()
    if not any(load.clients or load.rate for load in workloads):
        slas = ()  # a service level is for requests of strangers, not for a script of arrivals
    settings = Settings(found.directory, common.dtype, device, threads, tuple(engine_options.items()))
    info = machine(threads)
    with _progress(workloads, len(rows), common.rounds) as watch:
        results = compare(workloads, rows, settings, rounds=common.rounds, watch=watch, failed=_left_out)
    record = Record(
        command=command,
        model=found.name,
        dtype=common.dtype,
        device=device,
        seed=common.seed,
        options=engine_options,
        machine=info,
        slas=[SlaRecord(prompt_rate=sla.prompt_rate, rate=sla.rate) for sla in slas],
        scaling=_scaling(workloads, sla_scale),
        rows=make_rows(results, slas, timelines=common.timelines),
    )
    print_record(Console(width=None if sys.stdout.isatty() else 120), record, results)
    if common.json_path is not None:
        write(record, common.json_path)
        click.echo(f"Written to {common.json_path}.")
    if common.plot_path is not None:
        for path in plots.draw(record, common.plot_path):
            click.echo(f"Drawn to {path}.")


def _draft(names: Sequence[str], common: Common) -> list[Callable[[Path], Workload]]:
    """Files are read and names checked now; what is drawn waits for the model's vocabulary."""
    from fastgen.bench import workloads
    from fastgen.bench.synthetic import fastgen_workload, is_fastgen

    def draw(name: str) -> Callable[[Path], Workload]:
        def make(directory: Path) -> Workload:
            size = _vocabulary(directory)
            return fastgen_workload(
                name, vocabulary=size, seed=common.seed, scale=common.scale, requests=common.requests
            )

        return make

    def keep(workload: Workload) -> Callable[[Path], Workload]:
        return lambda directory: workload

    drafts = []
    for name in dict.fromkeys(names):
        if is_fastgen(name):
            fastgen_workload(name, vocabulary=1, scale=common.scale, requests=1)  # refuses lengths of nothing
            drafts.append(draw(name))
        elif common.scale != 1.0:
            raise ConfigError(f"--scale is for workloads fastgen-PROMPT-OUTPUT, not for {name}")
        else:
            drafts.append(keep(workloads.load(name)))
    return drafts


def _vocabulary(directory: Path) -> int:
    """Token ids to draw from."""
    from fastgen.core.hf_config import read_raw_config

    raw = read_raw_config(directory)
    size = raw.get("vocab_size") or (raw.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{directory}/config.json names no vocab_size to draw token ids from")
    return size


def _scaling(workloads: Sequence[Workload], sla_scale: float) -> str | None:
    """How a run of DeepSpeed-FastGen's workload differs from the paper's, in words."""
    from fastgen.bench.synthetic import PAPER_MEANS

    about = next((workload.about for workload in workloads if "length_scale" in workload.about), None)
    if about is None:
        return None
    parts = []
    if any(mean not in paper for mean, paper in zip(about["means"], PAPER_MEANS, strict=True)):
        parts.append("other mean lengths")
    if about["length_scale"] != 1:
        parts.append(f"lengths x {about['length_scale']:g}")
    if about["requests"] != about["paper_requests"]:
        parts.append(f"{about['requests']} of {about['paper_requests']} requests")
    if sla_scale != 1:
        parts.append(f"SLA rates x {sla_scale:g}")
    return ", ".join(parts) or None


def _left_out(name: str, error: FastgenError) -> None:
    click.echo(f"{name} is left out: {error}", err=True)


def _peers(file: Path | None) -> Mapping[str, Opener]:
    if file is None:
        return {}
    from fastgen.bench import peers

    return peers.read(file)


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
def _progress(workloads: Sequence[Workload], engines: int, rounds: int) -> Iterator[Watch]:
    """A bar over all runs, counted in output tokens, on a terminal only. It is drawn seldom: it shares the cores."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, refresh_per_second=1, transient=True, disable=not console.is_terminal)
    total = sum(workload.output_tokens for workload in workloads) * engines * rounds
    with bar:
        task = bar.add_task("loading", total=total)

        def watch(workload: str, engine: str, number: int) -> Any:
            bar.update(task, description=f"{workload} {engine} {number}/{rounds}")
            return lambda tokens: bar.advance(task, tokens)

        yield watch
