"""Plots of a benchmark's record: throughput against latency, effective throughput, token latency, passes over time.

Colours are Okabe and Ito's, which the colour-blind tell apart; markers and hatches repeat what colours say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.bench.record import PassColumns, Record, Row
from fastgen.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check", "draw"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
PROMPT_COLOUR, DECODE_COLOUR = "#56B4E9", "#D55E00"
SHARES = ("p50", "p90", "p95", "p99", "max")
MOST_PANELS = 6
GAP_LABEL = "seconds between tokens (logarithmic)"

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "savefig.dpi": 150,
}


def check(path: Path) -> None:
    """
    Raises:
        ConfigError: matplotlib is not installed, or the file's ending names no format there is.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"cannot draw to {path}: the file must end in .png or .svg")
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install '.[bench]' in your checkout of fastgen")


def draw(record: Record, path: Path) -> list[Path]:
    """Every plot that the record has figures for, as ``path`` with the plot's name before the ending.

    Returns:
        The files written.

    Raises:
        ConfigError: a file cannot be written.
    """
    import matplotlib

    kinds: dict[str, Callable[[Record], Figure | None]] = {
        "throughput-latency": _throughput_latency,
        "effective-throughput": _effective_throughput,
        "token-latency": _token_latency,
        "passes": _passes_over_time,
    }
    written = []
    with matplotlib.rc_context(STYLE):
        for name, make in kinds.items():
            figure = make(record)
            if figure is None:
                continue
            file = path.with_name(f"{path.stem}-{name}{path.suffix}")
            try:
                figure.savefig(file)
            except OSError as error:
                raise ConfigError(f"cannot write {file}: {error.strerror or error}") from None
            written.append(file)
    return written


# ---- the four plots ------------------------------------------------------------------------------------------------


def _throughput_latency(record: Record) -> Figure | None:
    """A curve an engine, a point a load."""
    if len(_loads(record.rows)) == 1:
        return None
    series = _by_engine(record.rows)
    figure, (axes,) = _panels(record, "Latency against throughput", 1, width=8.6, height=4.6)
    for number, (engine, rows) in enumerate(series.items()):
        x = [row.summary["request_rate"].median for row in rows]
        y = [row.summary["latency_mean"].median for row in rows]
        spread = _spread(rows, "latency_mean")
        axes.errorbar(x, y, yerr=spread, capsize=2, label=engine, **_line(number))
        for row, at_x, at_y in zip(rows, x, y, strict=True):
            axes.annotate(
                f"{_load(row):g}",
                (at_x, at_y),
                xytext=(5, 5),
                textcoords="offset points",
                fontsize=8,
                color=_colour(number),
            )
    axes.set_xlabel("throughput, requests/s")
    axes.set_ylabel("mean latency of a request, s")
    axes.set_title(f"{record.rows[0].workload.title}; numbers at points: {_load_name(record.rows[0])}")
    _from_zero(axes)
    _legend(figure, axes)
    return figure


def _effective_throughput(record: Record) -> Figure | None:
    """Requests a second that kept the SLA; a panel an SLA, or bars if there was one load."""
    rows = [row for row in record.rows if all(f"sla_{sla.rate:g}_effective" in row.summary for sla in record.slas)]
    if not record.slas or not rows:
        return None
    series = _by_engine(rows)
    promise = f"first token within prompt/{record.slas[0].prompt_rate:g} s"
    if len(_loads(rows)) == 1:
        figure, (axes,) = _panels(record, "Effective throughput", 1, width=8.6, height=4.6)
        names = [f"sla_{sla.rate:g}_effective" for sla in record.slas]
        _bars(axes, series, names, [f"{sla.rate:g} tokens/s" for sla in record.slas])
        axes.set_xlabel(f"service level: moving average of token gaps, and {promise}")
        axes.set_ylabel("requests/s within the service level")
        axes.set_title(_heading(rows[0]))
        _legend(figure, axes)
        return figure
    figure, panels = _panels(record, f"Effective throughput ({promise})", len(record.slas), share_y=True)
    for axes, sla in zip(panels, record.slas, strict=True):
        _curves(axes, series, f"sla_{sla.rate:g}_effective")
        axes.set_title(f"tokens at {sla.rate:g}/s")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("requests/s within the service level")
    _legend(figure, panels[0])
    return figure


def _token_latency(record: Record) -> Figure | None:
    """Percentiles of the gaps between tokens: side by side for one load, curves for several."""
    rows = [row for row in record.rows if "gap_p50" in row.summary]
    if not rows:
        return None
    if len(_loads(rows)) > 1:
        shares = ("p50", "p95", "p99")
        figure, panels = _panels(record, "Time between tokens", len(shares), share_y=True)
        for axes, share in zip(panels, shares, strict=True):
            _curves(axes, _by_engine(rows), f"gap_{share}")
            axes.set_title(_percentile(share))
            _plain_log(axes)
        panels[0].set_ylabel(GAP_LABEL)
        _legend(figure, panels[0])
        return figure
    titles = list(dict.fromkeys(row.workload.title for row in rows))
    figure, panels = _panels(record, "Time between tokens", len(titles), width=8.0 if len(titles) == 1 else 5.0)
    for axes, title in zip(panels, titles, strict=True):
        here = [row for row in rows if row.workload.title == title]
        _points(axes, _by_engine(here), [f"gap_{share}" for share in SHARES], [_percentile(share) for share in SHARES])
        _plain_log(axes)
        axes.set_title(_heading(here[0]))
        axes.set_xlabel("percentile of all gaps")
    panels[0].set_ylabel(GAP_LABEL)
    _legend(figure, panels[0])
    return figure


def _passes_over_time(record: Record) -> Figure | None:
    """What each forward pass carried, held against the token budget; a panel an engine, under its heaviest load."""
    heaviest: dict[tuple[str, str], Row] = {}
    for row in record.rows:
        if row.rounds[-1].passes is not None:
            best = heaviest.setdefault((row.workload.name, row.engine), row)
            if (_load(row) or 0) > (_load(best) or 0):
                heaviest[row.workload.name, row.engine] = row
    rows = list(heaviest.values())[:MOST_PANELS]
    if not rows:
        return None
    figure, panels = _panels(record, "Tokens in each forward pass", len(rows), stacked=True)
    for axes, row in zip(panels, rows, strict=True):
        last = row.rounds[-1]
        assert last.passes is not None
        times, decode, prompt = _steps(last.passes)
        total = [a + b for a, b in zip(decode, prompt, strict=True)]
        axes.fill_between(times, decode, step="post", color=DECODE_COLOUR, linewidth=0, label="generated tokens")
        axes.fill_between(times, decode, total, step="post", color=PROMPT_COLOUR, linewidth=0, label="prompt tokens")
        if last.budget is not None:
            axes.axhline(last.budget, color="black", linestyle="--", linewidth=1, label=f"budget, {last.budget}")
        axes.set_title(f"{row.engine}: {_heading(row)}")
        axes.set_ylabel("tokens")
        axes.set_ylim(0, 1.08 * max([last.budget or 0, *total]))
        axes.legend(loc="lower left", bbox_to_anchor=(0.58, 1.0), ncols=3, fontsize=8, borderpad=0.1)
    panels[-1].set_xlabel("seconds since the run began")
    panels[-1].set_xlim(left=0, right=max(max(axes.dataLim.xmax for axes in panels), 1e-9))
    return figure


# ---- parts ---------------------------------------------------------------------------------------------------------


def _panels(
    record: Record,
    title: str,
    count: int,
    *,
    width: float = 4.2,
    height: float = 4.2,
    share_y: bool = False,
    stacked: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels beside each other, or above each other over one time axis; conditions below."""
    from matplotlib.figure import Figure

    size = (10.0, 1.0 + 2.2 * count) if stacked else (max(6.0, width * count), height)
    figure = Figure(figsize=size, layout="constrained")
    shape = (count, 1) if stacked else (1, count)
    made = figure.subplots(*shape, squeeze=False, sharey=share_y, sharex=stacked)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    info = record.machine
    conditions = f"{record.model}, {record.dtype}; {info.get('processor')}, threads: {info.get('threads')}"
    if record.scaling:
        conditions += f"\nscaled: {record.scaling}"
    figure.supxlabel(conditions, x=0.01, ha="left", fontsize=8, color="#555555")
    return figure, list(made.flat)


def _curves(axes: Axes, series: dict[str, list[Row]], figure: str) -> None:
    for number, (engine, rows) in enumerate(series.items()):
        x = [_load(row) or 0 for row in rows]
        y = [row.summary[figure].median for row in rows]
        axes.errorbar(x, y, yerr=_spread(rows, figure), capsize=2, label=engine, **_line(number))
    some = next(iter(series.values()))
    axes.set_xscale("log", base=2)
    ticks = sorted({_load(row) or 0 for rows in series.values() for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(_load_name(some[0]))


def _bars(axes: Axes, series: dict[str, list[Row]], figures: Sequence[str], labels: Sequence[str]) -> None:
    width = 0.8 / len(series)
    for number, (engine, rows) in enumerate(series.items()):
        x = [place - 0.4 + width * (number + 0.5) for place in range(len(figures))]
        found = [rows[0].summary[name] for name in figures]
        y = [one.median for one in found]
        errors = [[one.median - one.low for one in found], [one.high - one.median for one in found]]
        axes.bar(
            x,
            y,
            width,
            yerr=errors,
            capsize=2,
            label=engine,
            color=_colour(number),
            hatch=_of(HATCHES, number),
            edgecolor="white",
        )
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(visible=False, axis="x")


def _points(axes: Axes, series: dict[str, list[Row]], figures: Sequence[str], labels: Sequence[str]) -> None:
    """As `_bars`, for an axis without a zero."""
    step = 0.6 / len(series)
    for number, (engine, rows) in enumerate(series.items()):
        x = [place + step * (number - (len(series) - 1) / 2) for place in range(len(figures))]
        found = [rows[0].summary[name] for name in figures]
        errors = [[one.median - one.low for one in found], [one.high - one.median for one in found]]
        look = _line(number) | {"linestyle": "none"}
        axes.errorbar(x, [one.median for one in found], yerr=errors, capsize=2, label=engine, **look)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.5, len(labels) - 0.5)


def _spread(rows: Sequence[Row], figure: str) -> list[list[float]]:
    found = [row.summary[figure] for row in rows]
    return [[one.median - one.low for one in found], [one.high - one.median for one in found]]


def _steps(passes: PassColumns) -> tuple[list[float], list[int], list[int]]:
    """Corners of a step curve; between passes that do not follow on each other it goes down to zero."""
    times: list[float] = []
    decode: list[int] = []
    prompt: list[int] = []
    for index, (start, seconds) in enumerate(zip(passes.start, passes.seconds, strict=True)):
        times.append(start)
        decode.append(passes.decode[index])
        prompt.append(passes.prompt[index])
        end = start + seconds
        last = index + 1 == len(passes.start)
        if last or passes.start[index + 1] - end > max(0.01, seconds):
            times.append(end)
            decode.append(0)
            prompt.append(0)
    return times, decode, prompt


def _by_engine(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by engine, each in the order of its loads."""
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(row.engine, []).append(row)
    return {engine: sorted(some, key=lambda row: _load(row) or 0) for engine, some in series.items()}


def _load(row: Row) -> float | None:
    """Clients, or arrivals a second."""
    return row.workload.clients if row.workload.clients is not None else row.workload.rate


def _loads(rows: Sequence[Row]) -> set[float | None]:
    return {_load(row) for row in rows}


def _load_name(row: Row) -> str:
    return "clients" if row.workload.clients is not None else "arrivals/s"


def _heading(row: Row) -> str:
    load = _load(row)
    if load is None:
        return row.workload.title
    return f"{row.workload.title}, " + ("1 client" if row.workload.clients == 1 else f"{load:g} {_load_name(row)}")


def _line(number: int) -> dict[str, Any]:
    return {"color": _colour(number), "marker": _of(MARKERS, number), "linewidth": 1.8, "markersize": 6}


def _colour(number: int) -> str:
    return _of(COLOURS, number)


def _of(choices: Sequence[str], number: int) -> str:
    return choices[number % len(choices)]


def _percentile(share: str) -> str:
    return share.upper() if share != "max" else "greatest"


def _legend(figure: Figure, axes: Axes) -> None:
    """Beside the panels, off the data."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")


def _plain_log(axes: Axes) -> None:
    """Logarithmic, with 0.03 instead of 3 x 10^-2, and enough marks to read a value off."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _from_zero(axes: Axes) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
