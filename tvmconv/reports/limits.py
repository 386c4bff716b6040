"""A chart of layers: the share of the physical limit that kernels and libraries reach, and the energy of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tvmconv.experiments.results import TUNED, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.charts import create_figure, save_figure
from tvmconv.reports.library_comparison import list_compared_names
from tvmconv.reports.suite import (
    CHART_WIDTH,
    FASTER_COLOR,
    LINE_HEIGHT,
    MARGIN_HEIGHT,
    NUM_PALETTE_COLORS,
    SLOWER_COLOR,
    SMALL_FONT_POINTS,
)
from tvmconv.reports.tables import format_mean

MARKERS, COLORS = "oDsv^", (FASTER_COLOR, SLOWER_COLOR, "#8c8c8c", "#5a9367", "#9b6fb0")
Values = tuple[float | None, ...]  # by layer


@dataclass(frozen=True)
class LimitsInfo:
    """The contents of the chart; values are those of the layers, in the order of the labels."""

    title: str
    labels: tuple[str, ...]  # the layer with the largest share of a tuned kernel last
    shares: dict[str, Values]  # of the limit, by row
    millijoules: dict[str, Values]  # of a launch, by row


def compute_limits_info(title: str, sweep: Sweep) -> LimitsInfo | None:
    """Return the shares of a comparison; None if clock and energy were not measured, or the limit is unknown."""
    shares = [result.compute_limit_share(TUNED) for result in sweep.results]
    has_sensors = any(row.sustained for result in sweep.results for row in result.rows)
    if not has_sensors or not any(shares):
        return None
    order = sorted(range(len(shares)), key=lambda index: shares[index] or 0.0)
    results, names = [sweep.results[index] for index in order], [TUNED, *list_compared_names(sweep)]
    return LimitsInfo(
        title,
        tuple(sweep.labels[index] for index in order),
        {name: tuple(result.compute_limit_share(name) for result in results) for name in names},
        {name: tuple(_get_millijoules(result.find_row(name)) for result in results) for name in names},
    )


def _get_millijoules(row: ResultRow) -> float | None:
    joules = row.sustained.joules if row.sustained else None
    return None if joules is None else joules * 1e3


def draw_limits(info: LimitsInfo, path: Path) -> None:
    """Draw shares beside energies, with a line for each layer."""
    figure = create_figure(CHART_WIDTH, MARGIN_HEIGHT + LINE_HEIGHT * len(info.labels))
    panels = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    texts = "share of the limit at the clock of the run", "energy of a launch [mJ]"
    for axes, values, text in zip(panels, (info.shares, info.millijoules), texts, strict=True):
        for (name, row_values), marker, color in zip(values.items(), MARKERS, COLORS, strict=False):
            points = [(value, index) for index, value in enumerate(row_values) if value]
            x, y = zip(*points, strict=True) if points else ((), ())
            label = f"{name} (mean {format_mean(row_values)})" if values is info.shares else name
            axes.plot(x, y, marker, color=color, markersize=5, label=label)
        axes.set_xlabel(text)
        axes.grid(alpha=0.4)
        axes.set_axisbelow(True)
    panels[0].axvline(1, color="black", linewidth=1.5)
    panels[0].set_xlim(left=0)
    panels[0].legend(loc="lower right", fontsize=SMALL_FONT_POINTS)
    panels[1].set_xscale("log")
    panels[1].xaxis.set_major_formatter(lambda value, _: f"{value:g}")  # no mathematical text is parsed
    panels[1].xaxis.set_minor_formatter(lambda *_: "")
    panels[0].set_yticks(range(len(info.labels)), info.labels, fontsize=SMALL_FONT_POINTS)
    panels[0].set_ylim(-0.6, len(info.labels) - 0.4)
    figure.suptitle(info.title, fontsize=10)
    save_figure(figure, path, colors=NUM_PALETTE_COLORS)
