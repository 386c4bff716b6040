"""Charts: first the numbers that they show (`sweep_info`, `history_info`, pure), then the drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.experiment import Result

if TYPE_CHECKING:
    from tvmconv.tuning.history import HistoryInfo

FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Line:
    """The rates of one schedule or library.

    Attributes:
        name: of the schedule or the library.
        x: where on the axis.
        y: GFLOP/s there.
        is_library: whether it is a library, to compare with.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    is_library: bool


@dataclass(frozen=True)
class SweepInfo:
    """What a chart of a sweep shows.

    Attributes:
        title: on top of the chart.
        axis: what the x axis is, such as "channels".
        ticks: positions on the x axis.
        labels: one a tick.
        log_x: whether positions are numbers to be shown on a logarithmic axis, not places in a list.
        lines: one a schedule or library.
    """

    title: str
    axis: str
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log_x: bool
    lines: tuple[Line, ...]


def sweep_info(title: str, axis: str, labels: Sequence[str], results: Sequence[Result]) -> SweepInfo:
    """GFLOP/s over the workloads of a sweep, one line a schedule; rows without a time are left out.

    Args:
        title: on top of the chart.
        axis: what the labels are, such as "channels".
        labels: one for each result; if all are numbers, they are the positions on the axis, too.
        results: one a workload.
    """
    log_x = all(label.isdigit() for label in labels)
    ticks = tuple(float(label) if log_x else float(place) for place, label in enumerate(labels))
    points: dict[str, list[tuple[float, float]]] = {}
    libraries = set()
    for tick, result in zip(ticks, results, strict=True):
        for row in result.rows:
            if row.gflops is not None:
                points.setdefault(row.name, []).append((tick, row.gflops))
            if row.library:
                libraries.add(row.name)
    lines = []
    for name, line in points.items():
        x, y = zip(*line, strict=True)
        lines.append(Line(name, x, y, name in libraries))
    return SweepInfo(title, axis, ticks, tuple(labels), log_x, tuple(lines))


def draw_sweep(info: SweepInfo, path: Path) -> None:
    """Draw a sweep.

    Args:
        info: what to draw.
        path: the file to write; its suffix, one of `FORMATS`, tells the format.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = _figure(9 if info.log_x else max(9, 0.5 * len(info.ticks)))
    axes = figure.add_subplot()
    for line in info.lines:
        color, style, marker = ("black", "--", "s") if line.is_library else (None, "-", "o")
        axes.plot(
            line.x, line.y, color=color, linestyle=style, marker=marker, markersize=5, linewidth=2, label=line.name
        )
    if info.log_x:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.set_xticks(info.ticks, info.labels)
    if not info.log_x:
        axes.tick_params("x", rotation=90)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(info.axis)
    axes.set_ylabel("GFLOP/s")
    axes.set_title(info.title)
    axes.grid(alpha=0.4)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)
    figure.savefig(path, dpi=150)


def draw_history(info: HistoryInfo, path: Path) -> None:
    """Draw the best rate of searches over their trials, and over their time where the logs tell it.

    Args:
        info: what to draw.
        path: the file to write; its suffix, one of `FORMATS`, tells the format.
    """
    timed = [history for history in info.histories if history.elapsed]
    figure = _figure(12 if timed else 9)
    panels = figure.subplots(1, 2 if timed else 1, sharey=True, squeeze=False)[0]
    colors = {history.name: f"C{place}" for place, history in enumerate(info.histories)}
    for history in info.histories:
        trials = range(1, len(history.best) + 1)
        panels[0].step(trials, history.best, where="post", color=colors[history.name], label=history.summary)
    panels[0].set_xlabel("trials")
    panels[0].set_ylabel("GFLOP/s of the best so far")
    for history in timed:
        panels[1].step(history.elapsed, history.best, where="post", color=colors[history.name])
        panels[1].set_xlabel("seconds of tuning")
    for axes in panels:
        for place, (name, rate) in enumerate(info.compared):
            style = ("--", ":", "-.")[place % 3]
            axes.axhline(rate, color="black", linestyle=style, linewidth=1, label=name if axes is panels[0] else None)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.4)
    figure.suptitle(info.title)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def _figure(width: float) -> Any:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
