"""The chart of a suite: a bar a layer for the speed-up over a library, beside what the layer costs the network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvmconv.reports.charts import new_figure, save
from tvmconv.reports.suite import Bar, SuiteInfo, heading
from tvmconv.reports.tables import significant
from tvmconv.reports.tuned import FAILED

WIDTH, LINE, MARGINS = 11.0, 0.235, 1.6  # inches: of a chart, of a layer's line, of what is above and below the lines
BAR, SMALL = 0.7, 8  # of a line's height; points
FASTER, SLOWER, SHARE = "#4c8cbf", "#e07b39", "#8c8c8c"
COLORS = 32  # of a PNG: these, and what lies between them and white
HATCH = "////"  # of slower bars, which tells them in grey, too
MARKERS = "Dsv^"  # of the libraries behind the first
TEXT_ROOM = 0.3  # of the axis behind the longest bar, for the times
TICKS = (
    (4.0, (1, 1.1, 1.2, 1.4, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)),
    (20.0, (1, 1.4, 2, 3, 5, 7)),
    (math.inf, (1, 2, 5)),
)


def draw_suite(info: SuiteInfo, path: Path) -> None:
    """Draw a suite; the axis of speed-ups is logarithmic, on which equal factors look equal.

    Args:
        info: what to draw.
        path: the file to write; its suffix, one of `charts.FORMATS`, tells the format.
    """
    figure = new_figure(WIDTH, MARGINS + LINE * (len(info.bars) + len(info.totals)))
    costs = any(bar.share is not None for bar in info.bars)
    panels = figure.subplots(1, 2 if costs else 1, sharey=True, squeeze=False, width_ratios=[5, 1][: 1 + costs])[0]
    _draw_speedups(panels[0], info)
    if costs:
        _draw_shares(panels[1], info.bars)
    figure.suptitle(heading(info), fontsize=10)
    save(figure, path, colors=COLORS)


def _draw_speedups(axes: Any, info: SuiteInfo) -> None:
    """Bars from 1, to the right where we are faster; behind each its speed-up and both times."""
    _scale_speedups(axes, info)
    _draw_bars(axes, info, slower=False, color=FASTER)
    _draw_bars(axes, info, slower=True, color=SLOWER, hatch=HATCH)
    for number, (total, marker) in enumerate(zip(info.totals[1:], itertools.cycle(MARKERS)), 1):
        points = [(speedup, place) for place, bar in enumerate(info.bars) if (speedup := bar.speedups[number])]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, "k", linestyle="none", marker=marker, markersize=4, label=f"{info.ours} over {total.name}")
    for place, bar in enumerate(info.bars):
        behind = max(1.0, *(speedup or 1.0 for speedup in bar.speedups))
        around = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the grid
        text = axes.annotate(_times_text(bar, info.beside), (behind, place), (5, 0), textcoords="offset points")
        text.set(verticalalignment="center", fontsize=SMALL, bbox=around)
    axes.axvline(1, color="black", linewidth=1.5)
    axes.set_xlabel(f"times as fast as {info.beside}; behind the bar: {info.ours} / {info.beside} [µs]")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", fontsize=SMALL)


def _draw_bars(axes: Any, info: SuiteInfo, *, slower: bool, color: str, hatch: str = "") -> None:
    """The bars of those layers that are slower, or of those that are not."""
    there = [(place, speedup) for place, bar in enumerate(info.bars) if (speedup := bar.speedups[0])]
    chosen = {place: speedup - 1 for place, speedup in there if (speedup < 1) == slower}
    if chosen:
        label = f"{'slower' if slower else 'faster'} than {info.beside}"
        how = {"left": 1, "height": BAR, "edgecolor": "white", "label": label}
        axes.barh([*chosen], [*chosen.values()], color=color, hatch=hatch, **how)


def _scale_speedups(axes: Any, info: SuiteInfo) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    low, high = _limits([speedup for bar in info.bars for speedup in bar.speedups if speedup])
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(_ticks(low, high))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(info.bars)), [_layer_text(bar) for bar in info.bars], fontsize=SMALL)
    axes.set_ylim(len(info.bars) - 0.4, -0.6)  # the first on top
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)


def _draw_shares(axes: Any, bars: Sequence[Bar]) -> None:
    shares = [bar.share or 0.0 for bar in bars]
    drawn = axes.barh(range(len(bars)), [share * 100 for share in shares], height=BAR, color=SHARE)
    axes.bar_label(drawn, [f"{share:.1%}" for share in shares], padding=3, fontsize=SMALL)
    axes.set_xlim(0, max(shares) * 150)
    axes.set_xlabel("share of our time [%]")
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)


def _layer_text(bar: Bar) -> str:
    """The layer's name, and its number where it is not the only one."""
    return bar.label if bar.count in (None, 1) else f"{bar.label} ×{bar.count}"


def _times_text(bar: Bar, beside: str) -> str:
    """The speed-up and both times, "1.50 ×  2.00 / 3.00"; or what failed."""
    if bar.ours is None:
        return FAILED
    theirs, speedup = bar.theirs[0], bar.speedups[0]
    if theirs is None or speedup is None:
        return f"{significant(bar.ours * 1e6)} / {beside} {FAILED}"
    return f"{significant(speedup)} ×   {significant(bar.ours * 1e6)} / {significant(theirs * 1e6)}"


def _limits(speedups: Sequence[float]) -> tuple[float, float]:
    """Where the axis begins and ends: with 1 and all speed-ups in it, and room for the texts."""
    low, high = min([0.9, *speedups]), max([1.5, *speedups])
    return low / 1.05, high * (high / low) ** TEXT_ROOM


def _ticks(low: float, high: float) -> list[float]:
    """Steps of each decade on the axis, as many as do not run into each other."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    steps = next(steps for reach, steps in TICKS if high / low < reach)
    return [tick for decade in decades for step in steps if low <= (tick := step * 10.0**decade) <= high]
