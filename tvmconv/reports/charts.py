"""Charts of sweeps and searches: pure functions that compute the shown numbers, and functions that draw them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.experiments.results import Result, ResultRow, list_libraries
from tvmconv.palette import SeriesStyle, find_style

if TYPE_CHECKING:
    from tvmconv.reports.history import HistoryInfo

FORMATS = (".png", ".svg", ".pdf")
LIBRARY_LINE_STYLES = ("--", ":", "-.")  # libraries are drawn in black
SERIES_LINE_STYLES = ("-", (0, (4, 1)), (0, (1, 1)))  # of series of one schedule
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
    """Draw a sweep as `plot_sweep` does. The file's suffix, one of `FORMATS`, selects the format."""
    figure = create_figure(compute_sweep_width(info))
    plot_sweep(info, figure.add_subplot())
    save_figure(figure, path)


def compute_sweep_width(info: SweepInfo) -> float:
    """Return the width of a sweep's figure in inches."""
    return 9 if info.is_log_x else max(9, 0.5 * len(info.ticks))


def plot_sweep(info: SweepInfo, axes: Any) -> None:
    """Draw a sweep on axes of Matplotlib, with lines if the axis has numbers and with markers only between named
    layers. GFLOP/s are on a logarithmic axis, so that equal factors look equal. GB/s start at zero, as fractions of the
    peak.
    """
    library_styles = itertools.cycle(LIBRARY_LINE_STYLES)
    drawn_styles: Counter[SeriesStyle] = Counter()
    for series in info.series:
        style, line_style = find_style(series.name), SERIES_LINE_STYLES[drawn_styles[find_style(series.name)] % 3]
        color, marker = style.color, style.marker
        if series.is_library:
            color, line_style, marker = "black", next(library_styles), "s"
        else:
            drawn_styles[style] += 1
        (line,) = axes.plot(series.x, series.y, color=color, marker=marker, label=series.name)
        line.set(linestyle=line_style if info.is_log_x else "none", markersize=6, linewidth=2)
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
    finding = describe_winner(info)
    axes.set_title(f"{finding}\n{info.title}" if finding else info.title)
    axes.grid(alpha=0.4)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)


def describe_winner(info: SweepInfo) -> str:
    """Return a sentence that names the fastest schedule for most workloads; "" with fewer than two schedules.

    Examples:
        >>> series = [ChartSeries("a", (1, 2), (3, 9), False), ChartSeries("b", (1, 2), (1, 8), False)]
        >>> describe_winner(SweepInfo("title", "channels", (1, 2), ("1", "2"), True, tuple(series)))
        'a is the fastest schedule for 2 of 2 workloads'
    """
    schedules = [series for series in info.series if not series.is_library]
    winners: Counter[str] = Counter()
    for tick in info.ticks:
        rates = {series.name: series.y[series.x.index(tick)] for series in schedules if tick in series.x}
        if rates:
            winners[max(rates, key=lambda name: rates[name])] += 1
    if len(schedules) < 2 or not winners:
        return ""
    name, count = winners.most_common(1)[0]
    return f"{name} is the fastest schedule for {count} of {winners.total()} workloads"


def _scale_rates(axes: Any, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter

    if unit == BYTES:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(_format_tick))
    else:
        scale_logarithmically(axes.yaxis)


def scale_logarithmically(axis: Any) -> None:
    """Give an axis of Matplotlib a logarithmic scale, with plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_format_tick))


def _format_tick(value: float, _: int) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def draw_history(info: HistoryInfo, path: Path) -> None:
    """Draw the best throughput of searches over their trials, and over their time if the logs have it. The file's
    suffix, one of `FORMATS`, selects the format.
    """
    has_times = any(curve.elapsed for curve in info.curves)
    figure = create_figure(12 if has_times else 9)
    panels = figure.subplots(1, 2 if has_times else 1, sharey=True, squeeze=False)[0]
    for panel, is_over_time in zip(panels, (False, True), strict=False):
        plot_history(info, panel, is_over_time=is_over_time)
    if has_times:
        panels[1].set_ylabel("")
    figure.suptitle(make_history_title(info))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save_figure(figure, path)


def make_history_title(info: HistoryInfo) -> str:
    """Return a sentence that names the best result of the searches, and their workload."""
    best = max((record for _, record in info.results), key=lambda record: record.gflops, default=None)
    finding = f"{best.schedule} reaches {best.gflops:,.0f} GFLOP/s" if best and best.gflops >= 1 else ""
    return f"{finding}\n{info.title}" if finding else info.title


def plot_history(info: HistoryInfo, axes: Any, *, is_over_time: bool = False) -> None:
    """Draw the best throughput of searches on axes of Matplotlib, over trials or over seconds of tuning; searches
    without times are left out of the latter.
    """
    drawn_styles: Counter[SeriesStyle] = Counter()
    for curve in info.curves:
        style = find_style(curve.name)
        x = curve.elapsed if is_over_time else range(1, len(curve.best_gflops) + 1)
        if x:
            line_style = SERIES_LINE_STYLES[drawn_styles[style] % 3]
            options = {"where": "post", "color": style.color, "linestyle": line_style, "linewidth": 1.8}
            axes.step(x, curve.best_gflops, label=curve.summary, **options)
        drawn_styles[style] += 1
    axes.set_xlabel("seconds of tuning" if is_over_time else "trials")
    axes.set_ylabel("GFLOP/s of the best trial so far")
    for name, record in info.results:
        color = find_style(record.schedule).color
        axes.axhline(record.gflops, color=color, linestyle=RESULT_LINE_STYLE, linewidth=1, label=f"result: {name}")
    for (name, rate), line_style in zip(info.targets, itertools.cycle(LIBRARY_LINE_STYLES)):
        axes.axhline(rate, color="black", linestyle=line_style, linewidth=1, label=name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.4)


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
