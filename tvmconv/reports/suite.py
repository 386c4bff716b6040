"""A network's layers beside a library: speed-ups of the layers and of the network, as numbers and as a chart."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmconv.experiments.results import TUNED, Result, list_libraries
from tvmconv.experiments.sweep import Sweep, fill_counts
from tvmconv.reports.charts import create_figure, save_figure
from tvmconv.reports.library_comparison import FAILED, list_compared_names
from tvmconv.reports.tables import format_micros, format_significant, sum_seconds

FASTEST_SCHEDULE = "fastest schedule"  # name of the compared kernels if nothing was tuned
BOUND_NAMES = ("copy",)  # lower bounds that no kernel can beat; libraries come before them
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


@dataclass(frozen=True)
class LayerBar:
    """A layer: the seconds of tvmconv's kernel and of each library, None where it failed."""

    label: str
    count: int | None  # number of such layers in the network; None if unknown
    kernel_seconds: float | None
    library_seconds: tuple[float | None, ...]
    time_fraction: float | None = None  # of the network's time with tvmconv's kernels; None if unknown

    @property
    def speedups(self) -> tuple[float | None, ...]:
        """Speed-up of tvmconv's kernel over each library; None where one of the two failed."""
        return tuple(
            library_time / self.kernel_seconds if self.kernel_seconds and library_time else None
            for library_time in self.library_seconds
        )


@dataclass(frozen=True)
class LibraryTotal:
    """The total of all layers compared with one library."""

    name: str
    kernel_seconds: float | None  # of the network; None if a layer failed or a count is unknown
    library_seconds: float | None  # likewise
    mean_speedup: float | None  # geometric mean over the layers
    num_layers: int  # with a speed-up
    num_slower: int

    @property
    def speedup(self) -> float | None:
        """Speed-up of the network with tvmconv's kernels over the library."""
        return self.library_seconds / self.kernel_seconds if self.kernel_seconds and self.library_seconds else None


@dataclass(frozen=True)
class SuiteInfo:
    """The contents of a chart of a suite."""

    title: str
    kernel_name: str
    bars: tuple[LayerBar, ...]  # the worst first: failed ones, then by speed-up over the first library
    totals: tuple[LibraryTotal, ...]  # in the order of the bars' times

    @property
    def library_name(self) -> str:
        """Name of the library that the bars show."""
        return self.totals[0].name


def compute_suite_info(title: str, sweep: Sweep) -> SuiteInfo | None:
    """Return the layers of a suite compared with libraries, or with the naive schedule if there is no library. The
    compared kernels are the tuned ones, or else the fastest schedule of each layer. None: nothing to compare with.
    """
    sweep = fill_counts(sweep)
    is_tuned = sweep.has_row(TUNED)
    names = list_compared_names(sweep) if is_tuned else list_libraries(sweep.results)
    if not names and sweep.results[0].rows[0].name == TUNED:
        return None
    names = sorted(names, key=lambda name: name in BOUND_NAMES) or [sweep.results[0].rows[0].name]
    counts: Sequence[int | None] = sweep.counts or [None] * len(sweep.labels)
    kernel_times = [_find_kernel_seconds(result, names, is_tuned=is_tuned) for result in sweep.results]
    network_time = sum_seconds(kernel_times, sweep.counts)
    bars = [
        LayerBar(
            label,
            count,
            kernel_seconds,
            tuple(result.seconds.get(name) for name in names),
            kernel_seconds * count / network_time if kernel_seconds and count and network_time else None,
        )
        for (label, result), count, kernel_seconds in zip(sweep.labeled_results, counts, kernel_times, strict=True)
    ]
    totals = tuple(_compute_total(name, index, bars, sweep.counts) for index, name in enumerate(names))
    # Failed kernels come first, failed libraries last.
    bars.sort(key=lambda bar: (bar.kernel_seconds is not None, bar.speedups[0] or math.inf))
    return SuiteInfo(title, TUNED if is_tuned else FASTEST_SCHEDULE, tuple(bars), totals)


def _find_kernel_seconds(result: Result, names: Sequence[str], *, is_tuned: bool) -> float | None:
    """Return the seconds of the tuned kernel, or of the fastest one; None if there is none."""
    if is_tuned:
        return result.seconds.get(TUNED)
    rows = [row for row in result.rows if row.name not in names or not row.library]
    return min((row.seconds for row in rows if row.seconds), default=None)


def _compute_total(name: str, library_index: int, bars: Sequence[LayerBar], counts: Sequence[int]) -> LibraryTotal:
    known_speedups = [speedup for bar in bars if (speedup := bar.speedups[library_index])]
    return LibraryTotal(
        name,
        sum_seconds([bar.kernel_seconds for bar in bars], counts),
        sum_seconds([bar.library_seconds[library_index] for bar in bars], counts),
        statistics.geometric_mean(known_speedups) if known_speedups else None,
        len(known_speedups),
        sum(speedup < 1 for speedup in known_speedups),
    )


def format_heading(info: SuiteInfo) -> str:
    """Return the title, and one line per library with the totals."""
    return "\n".join([info.title, *(format_total(info, total) for total in info.totals)])


def format_total(info: SuiteInfo, total: LibraryTotal) -> str:
    """Return the totals of one library in one line."""
    texts = []
    if total.speedup:
        times_text = (
            f"{info.kernel_name} {format_micros(total.kernel_seconds)} µs, "
            f"{total.name} {format_micros(total.library_seconds)} µs"
        )
        texts.append(f"all layers: {times_text}: {format_significant(total.speedup)} × as fast")
    if total.mean_speedup:
        library_text = "" if texts else f" over {total.name}"
        texts.append(f"geometric mean{library_text} {format_significant(total.mean_speedup)} ×")
    texts.append(f"{total.num_slower} of {total.num_layers} slower")
    if failed := len(info.bars) - total.num_layers:
        texts.append(f"{failed} {FAILED}")
    return "; ".join(texts)


def draw_suite(info: SuiteInfo, path: Path) -> None:
    """Draw a suite; the axis of speed-ups is logarithmic, so that equal factors look equal. The file's suffix, one of
    `charts.FORMATS`, selects the format.
    """
    figure = create_figure(CHART_WIDTH, compute_suite_height(info))
    has_time_fractions = any(bar.time_fraction is not None for bar in info.bars)
    width_ratios = [5, 1] if has_time_fractions else [5]
    panels = figure.subplots(1, len(width_ratios), sharey=True, squeeze=False, width_ratios=width_ratios)[0]
    plot_speedups(panels[0], info)
    if has_time_fractions:
        _draw_time_fractions(panels[1], info.bars)
    figure.suptitle(format_heading(info), fontsize=10)
    save_figure(figure, path, colors=NUM_PALETTE_COLORS)


def compute_suite_height(info: SuiteInfo) -> float:
    """Return the height of a suite's figure in inches."""
    return MARGIN_HEIGHT + LINE_HEIGHT * (len(info.bars) + len(info.totals))


def plot_speedups(axes: Any, info: SuiteInfo) -> None:
    """Draw bars from 1, to the right if the kernel is faster, each followed by its speed-up and both times."""
    _scale_speedups(axes, info)
    _draw_bars(axes, info, is_slower=False, color=FASTER_COLOR)
    _draw_bars(axes, info, is_slower=True, color=SLOWER_COLOR, hatch=SLOWER_HATCH)
    for library_index, (total, marker) in enumerate(zip(info.totals[1:], itertools.cycle(MARKERS)), 1):
        points = [(speedup, index) for index, bar in enumerate(info.bars) if (speedup := bar.speedups[library_index])]
        x, y = zip(*points, strict=True) if points else ((), ())
        label = f"{info.kernel_name} over {total.name}"
        axes.plot(x, y, "k", linestyle="none", marker=marker, markersize=4, label=label)
    text_box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the grid
    for bar_index, bar in enumerate(info.bars):
        position = max(1.0, *(speedup or 1.0 for speedup in bar.speedups)), bar_index
        text = axes.annotate(_format_times(bar, info.library_name), position, (5, 0), textcoords="offset points")
        text.set(verticalalignment="center", fontsize=SMALL_FONT_POINTS, bbox=text_box)
    axes.axvline(1, color="black", linewidth=1.5)
    names = f"{info.kernel_name} / {info.library_name}"
    axes.set_xlabel(f"times as fast as {info.library_name}; next to the bar: {names} [µs]")
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
    fractions = [bar.time_fraction or 0.0 for bar in bars]
    container = axes.barh(range(len(bars)), [100 * each for each in fractions], height=BAR_HEIGHT, color=FRACTION_COLOR)
    axes.bar_label(container, [f"{each:.1%}" for each in fractions], padding=3, fontsize=SMALL_FONT_POINTS)
    axes.set_xlim(0, max(fractions) * 150)
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
    speedup = bar.speedups[0]
    if speedup is None:
        return f"{format_micros(bar.kernel_seconds)} / {library_name} {FAILED}"
    times = f"{format_micros(bar.kernel_seconds)} / {format_micros(bar.library_seconds[0])}"
    return f"{format_significant(speedup)} ×   {times}"


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
