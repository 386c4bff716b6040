"""Charts of sweeps and searches: pure functions that compute the shown numbers, and functions that draw them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.experiments.results import Result, ResultRow, list_libraries

if TYPE_CHECKING:
    from tvmconv.reports.history import HistoryInfo

FORMATS = (".png", ".svg", ".pdf")
LIBRARY_LINE_STYLES = ("--", ":", "-.")  # libraries are drawn in black
RESULT_LINE_STYLE = (0, (8, 3))
DOTS_PER_INCH, NUM_PALETTE_COLORS = 150, 64  # of a PNG
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
FLOPS, BYTES = "GFLOP/s", "GB/s"


@dataclass(frozen=True)
class ChartSeries:
    """The throughput of one schedule or library, in the chart's unit."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    is_library: bool


@dataclass(frozen=True)
class SweepInfo:
    """The contents of a chart of a sweep: throughput, in `FLOPS` or `BYTES`, over an axis with one label per tick."""

    title: str
    axis: str
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    is_log_x: bool  # whether positions are numbers on a logarithmic axis instead of indices
    series: tuple[ChartSeries, ...]
    unit: str = FLOPS
    peak_rate: float | None = None  # of the device's memory; None if it is unknown or irrelevant


def compute_sweep_info(title: str, axis: str, labels: Sequence[str], results: Sequence[Result]) -> SweepInfo:
    """Return GFLOP/s over the workloads of a sweep, one series per schedule; rows without a time are left out. Labels
    that are all numbers are the positions on the axis.
    """
    is_log_x = all(label.isdigit() for label in labels)
    ticks = tuple(float(label) if is_log_x else float(index) for index, label in enumerate(labels))
    series = _collect_series(ticks, results, lambda row: row.gflops)
    return SweepInfo(title, axis, ticks, tuple(labels), is_log_x, series)


def compute_size_info(title: str, results: Sequence[Result]) -> SweepInfo:
    """Return throughput over the elements of the input, one series per schedule; rows without a time are left out. The
    throughput is in GB/s, with the memory's peak, if memory bounds all workloads, else in GFLOP/s.
    """
    sorted_results = sorted(results, key=_count_elements)
    ticks = tuple(map(_count_elements, sorted_results))
    labels = tuple(
        f"{_format_power(_count_elements(result))}\n{'cold' if result.is_cold else 'hot'}" for result in sorted_results
    )
    axis = "elements; hot: in the L2 cache, cold: not"
    if not all(result.is_memory_bound for result in results):
        series = _collect_series(ticks, sorted_results, lambda row: row.gflops)
        return SweepInfo(title, axis, ticks, labels, True, series)
    series = _collect_series(ticks, sorted_results, lambda row: None if row.bandwidth is None else row.bandwidth / 1e9)
    peak = results[0].peak_bandwidth
    return SweepInfo(title, axis, ticks, labels, True, series, BYTES, peak / 1e9 if peak else None)


def _count_elements(result: Result) -> float:
    return float(math.prod(result.workload.argument_shapes[0]))


def _format_power(elements: float) -> str:
    """Return 65536 as 2¹⁶, and numbers that are not powers of two in digits."""
    mantissa, exponent = math.frexp(elements)
    return f"2{str(exponent - 1).translate(SUPERSCRIPTS)}" if mantissa == 0.5 else f"{elements:,.0f}"


def _collect_series(
    ticks: Sequence[float], results: Sequence[Result], rate: Callable[[ResultRow], float | None]
) -> tuple[ChartSeries, ...]:
    points: dict[str, list[tuple[float, float]]] = {}
    for tick, result in zip(ticks, results, strict=True):
        for row in result.rows:
            if (value := rate(row)) is not None:
                points.setdefault(row.name, []).append((tick, value))
    libraries = list_libraries(results)
    return tuple(
        ChartSeries(name, tuple(x for x, _ in pairs), tuple(y for _, y in pairs), name in libraries)
        for name, pairs in points.items()
    )


def draw_sweep(info: SweepInfo, path: Path) -> None:
    """Draw a sweep, with lines if the axis has numbers and with markers only between named layers. GFLOP/s are on a
    logarithmic axis, so that equal factors look equal. GB/s start at zero, as fractions of the peak. The file's suffix,
    one of `FORMATS`, selects the format.
    """
    figure = create_figure(9 if info.is_log_x else max(9, 0.5 * len(info.ticks)))
    axes = figure.add_subplot()
    library_styles = itertools.cycle(LIBRARY_LINE_STYLES)
    for series in info.series:
        color, style, marker = ("black", next(library_styles), "s") if series.is_library else (None, "-", "o")
        (line,) = axes.plot(series.x, series.y, color=color, marker=marker, label=series.name)
        line.set(linestyle=style if info.is_log_x else "none", markersize=5, linewidth=2)
    if info.peak_rate is not None:
        label = f"memory's peak, {info.peak_rate:,.0f} {info.unit}"
        axes.axhline(info.peak_rate, color="black", linewidth=1, linestyle=(0, (8, 4)), label=label)
    if info.is_log_x:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.set_xticks(info.ticks, info.labels)
    if not info.is_log_x:
        axes.tick_params("x", rotation=90)
    _scale_rates(axes, info.unit)
    axes.set_xlabel(info.axis)
    axes.set_ylabel(info.unit)
    axes.set_title(info.title)
    axes.grid(alpha=0.4)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)
    save_figure(figure, path)


def _scale_rates(axes: Any, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if unit == BYTES:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))


def draw_history(info: HistoryInfo, path: Path) -> None:
    """Draw the best throughput of searches over their trials, and over their time if the logs have it. The file's
    suffix, one of `FORMATS`, selects the format.
    """
    has_times = any(curve.elapsed for curve in info.curves)
    figure = create_figure(12 if has_times else 9)
    panels = figure.subplots(1, 2 if has_times else 1, sharey=True, squeeze=False)[0]
    for index, curve in enumerate(info.curves):
        style = {"where": "post", "color": f"C{index}"}
        panels[0].step(range(1, len(curve.best_gflops) + 1), curve.best_gflops, label=curve.summary, **style)
        if curve.elapsed:
            panels[1].step(curve.elapsed, curve.best_gflops, **style)
    panels[0].set_ylabel("GFLOP/s of the best trial so far")
    for panel, x_label in zip(panels, ("trials", "seconds of tuning"), strict=False):
        panel.set_xlabel(x_label)
        for name, record in info.results:
            label = f"result: {name}" if panel is panels[0] else None
            panel.axhline(record.gflops, color="C3", linestyle=RESULT_LINE_STYLE, linewidth=1, label=label)
        for (name, rate), line_style in zip(info.targets, itertools.cycle(LIBRARY_LINE_STYLES)):
            label = name if panel is panels[0] else None
            panel.axhline(rate, color="black", linestyle=line_style, linewidth=1, label=label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.4)
    figure.suptitle(info.title)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path, colors: int = NUM_PALETTE_COLORS) -> None:
    """Write a figure; a PNG gets a palette of `colors` colors, which takes a third of the bytes. Texts are shown
    literally: Matplotlib would otherwise read file names between two `$` as formulas.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    if path.suffix != ".png":
        figure.savefig(path)
        return
    from PIL import Image

    figure.set_dpi(DOTS_PER_INCH)
    figure.canvas.draw()
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    image.quantize(colors).save(path, optimize=True, dpi=(DOTS_PER_INCH, DOTS_PER_INCH))


def create_figure(width: float, height: float = 5.5) -> Any:
    """Return a figure that needs no display; width and height are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
