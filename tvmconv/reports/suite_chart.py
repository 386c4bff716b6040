"""The chart of a suite: one bar per layer with its speed-up over a library, and its fraction of the network's time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvmconv.reports.charts import create_figure, save_figure
from tvmconv.reports.library_comparison import FAILED
from tvmconv.reports.suite import LayerBar, SuiteInfo, format_heading
from tvmconv.reports.tables import format_significant

CHART_WIDTH, LINE_HEIGHT, MARGIN_HEIGHT = 11.0, 0.235, 1.6  # inches; one line per layer
BAR_HEIGHT, SMALL_FONT_POINTS = 0.7, 8  # fraction of a line's height, points
FASTER_COLOR, SLOWER_COLOR, FRACTION_COLOR = "#4c8cbf", "#e07b39", "#8c8c8c"
NUM_PALETTE_COLORS = 32  # palette of a PNG: the colors above and their blends with white
SLOWER_HATCH = "////"  # distinguishes slower bars in grayscale, too
MARKERS = "Dsv^"  # of libraries after the first
TEXT_SPACE_FRACTION = 0.3  # fraction of the axis after the longest bar, for the times
TICKS_BY_RANGE = (
    (4.0, (1, 1.1, 1.2, 1.4, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)),
    (20.0, (1, 1.4, 2, 3, 5, 7)),
    (math.inf, (1, 2, 5)),
)


def draw_suite(info: SuiteInfo, path: Path) -> None:
    """Draw a suite; the axis of speed-ups is logarithmic, so that equal factors look equal.

    Args:
        info: Contents of the chart.
        path: File to write; its suffix, one of `charts.FORMATS`, selects the format.
    """
    figure = create_figure(CHART_WIDTH, MARGIN_HEIGHT + LINE_HEIGHT * (len(info.bars) + len(info.totals)))
    has_time_fractions = any(bar.time_fraction is not None for bar in info.bars)
    panels = figure.subplots(
        1, 2 if has_time_fractions else 1, sharey=True, squeeze=False, width_ratios=[5, 1][: 1 + has_time_fractions]
    )[0]
    _draw_speedups(panels[0], info)
    if has_time_fractions:
        _draw_time_fractions(panels[1], info.bars)
    figure.suptitle(format_heading(info), fontsize=10)
    save_figure(figure, path, colors=NUM_PALETTE_COLORS)


def _draw_speedups(axes: Any, info: SuiteInfo) -> None:
    """Draw bars from 1, to the right if the kernel is faster, each followed by its speed-up and both times."""
    _scale_speedups(axes, info)
    _draw_bars(axes, info, is_slower=False, color=FASTER_COLOR)
    _draw_bars(axes, info, is_slower=True, color=SLOWER_COLOR, hatch=SLOWER_HATCH)
    for library_index, (total, marker) in enumerate(zip(info.totals[1:], itertools.cycle(MARKERS)), 1):
        points = [
            (speedup, bar_index) for bar_index, bar in enumerate(info.bars) if (speedup := bar.speedups[library_index])
        ]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(
            x, y, "k", linestyle="none", marker=marker, markersize=4, label=f"{info.kernel_name} over {total.name}"
        )
    for bar_index, bar in enumerate(info.bars):
        text_x = max(1.0, *(speedup or 1.0 for speedup in bar.speedups))
        text_box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the grid
        text = axes.annotate(
            _format_times(bar, info.library_name), (text_x, bar_index), (5, 0), textcoords="offset points"
        )
        text.set(verticalalignment="center", fontsize=SMALL_FONT_POINTS, bbox=text_box)
    axes.axvline(1, color="black", linewidth=1.5)
    axes.set_xlabel(
        f"times as fast as {info.library_name}; next to the bar: {info.kernel_name} / {info.library_name} [µs]"
    )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", fontsize=SMALL_FONT_POINTS)


def _draw_bars(axes: Any, info: SuiteInfo, *, is_slower: bool, color: str, hatch: str = "") -> None:
    """Draw the bars of the slower layers, or of the others."""
    indexed_speedups = [(bar_index, speedup) for bar_index, bar in enumerate(info.bars) if (speedup := bar.speedups[0])]
    selected_bars = {bar_index: speedup - 1 for bar_index, speedup in indexed_speedups if (speedup < 1) == is_slower}
    if selected_bars:
        label = f"{'slower' if is_slower else 'faster'} than {info.library_name}"
        bar_style = {"left": 1, "height": BAR_HEIGHT, "edgecolor": "white", "label": label}
        axes.barh([*selected_bars], [*selected_bars.values()], color=color, hatch=hatch, **bar_style)


def _scale_speedups(axes: Any, info: SuiteInfo) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis_min, axis_max = _compute_axis_limits([speedup for bar in info.bars for speedup in bar.speedups if speedup])
    axes.set_xscale("log")
    axes.set_xlim(axis_min, axis_max)
    axes.set_xticks(_compute_ticks(axis_min, axis_max))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(info.bars)), [_format_layer(bar) for bar in info.bars], fontsize=SMALL_FONT_POINTS)
    axes.set_ylim(len(info.bars) - 0.4, -0.6)  # the first on top
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)


def _draw_time_fractions(axes: Any, bars: Sequence[LayerBar]) -> None:
    time_fractions = [bar.time_fraction or 0.0 for bar in bars]
    bar_container = axes.barh(
        range(len(bars)), [fraction * 100 for fraction in time_fractions], height=BAR_HEIGHT, color=FRACTION_COLOR
    )
    axes.bar_label(
        bar_container, [f"{fraction:.1%}" for fraction in time_fractions], padding=3, fontsize=SMALL_FONT_POINTS
    )
    axes.set_xlim(0, max(time_fractions) * 150)
    axes.set_xlabel("fraction of the network's time [%]")
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)


def _format_layer(bar: LayerBar) -> str:
    """Return the layer's name, with its count unless it is 1."""
    return bar.label if bar.count in (None, 1) else f"{bar.label} ×{bar.count}"


def _format_times(bar: LayerBar, library_name: str) -> str:
    """Return the speed-up and both times, "1.50 ×  2.00 / 3.00", or what failed."""
    if bar.kernel_seconds is None:
        return FAILED
    library_seconds, speedup = bar.library_seconds[0], bar.speedups[0]
    if library_seconds is None or speedup is None:
        return f"{format_significant(bar.kernel_seconds * 1e6)} / {library_name} {FAILED}"
    return (
        f"{format_significant(speedup)} ×   {format_significant(bar.kernel_seconds * 1e6)} / "
        f"{format_significant(library_seconds * 1e6)}"
    )


def _compute_axis_limits(speedups: Sequence[float]) -> tuple[float, float]:
    """Return the limits of the axis, which includes 1, all speed-ups, and space for the texts."""
    min_speedup, max_speedup = min([0.9, *speedups]), max([1.5, *speedups])
    return min_speedup / 1.05, max_speedup * (max_speedup / min_speedup) ** TEXT_SPACE_FRACTION


def _compute_ticks(axis_min: float, axis_max: float) -> list[float]:
    """Return the ticks of each decade on the axis, as many as do not overlap."""
    decades = range(math.floor(math.log10(axis_min)), math.ceil(math.log10(axis_max)))
    decade_steps = next(decade_steps for max_ratio, decade_steps in TICKS_BY_RANGE if axis_max / axis_min < max_ratio)
    return [
        value
        for decade in decades
        for decade_step in decade_steps
        if axis_min <= (value := decade_step * 10.0**decade) <= axis_max
    ]
