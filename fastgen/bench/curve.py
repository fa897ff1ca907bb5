"""The plot of a calibration: throughput and time of a pass against its tokens."""

from __future__ import annotations

from pathlib import Path

from fastgen.bench.plots import COLOURS, STYLE
from fastgen.core.calibration import Budget, Calibration
from fastgen.errors import ConfigError

__all__ = ["draw_curve"]


def draw_curve(calibration: Calibration, budget: Budget, path: Path) -> None:
    """To a PNG or SVG file, which ``plots.check`` has found to be possible.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    setting, points = calibration.setting, calibration.points
    sizes = [point.tokens for point in points]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 4.6), layout="constrained")
        figure.suptitle("Tokens in a forward pass", x=0.01, ha="left", fontsize=13, fontweight="bold")
        panels = figure.subplots(1, 2)
        rate, time = panels
        rate.plot(sizes, [point.rate for point in points], marker="o", color=COLOURS[0], linewidth=1.8)
        rate.set_title("throughput")
        rate.set_ylabel("tokens/s")
        time.plot(sizes, [1000 * point.seconds for point in points], marker="s", color=COLOURS[1], linewidth=1.8)
        time.set_title("time of a pass")
        time.set_ylabel("milliseconds")
        for axes in panels:
            axes.axvline(budget.tokens, color="black", linestyle="--", linewidth=1, label=f"budget, {budget.tokens}")
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.set_xlabel("tokens in a pass")
            axes.legend(loc="upper left")
        conditions = f"{setting.model}, {setting.dtype}; {setting.device}, threads: {setting.threads}\n{budget.reason}"
        figure.supxlabel(conditions, x=0.01, ha="left", fontsize=8, color="#555555")
        try:
            figure.savefig(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
