"""The fastest kind of schedule per layer: tables, and a chart over channels, image sizes and batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tvmconv.experiments.results import ResultRow
from tvmconv.experiments.run import TUNED
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.record import Record
from tvmconv.reports.charts import create_figure, save_figure
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant
from tvmconv.workloads import Conv2d, Workload

OTHER_KINDS = "others"  # kind of all schedules that have no kind of their own
PANEL_WIDTH, PANEL_HEIGHT, SMALL_FONT_POINTS = 5.0, 5.6, 7  # inches, inches, points
MARKER_STYLES = ("s", "#2f6fab"), ("D", "#6a9f58"), ("o", "#e07b39"), ("^", "#8c5fa8"), ("v", "#7f7f7f")
NUM_PALETTE_COLORS = 128
PANEL_MAX_BATCHES = (1, 8, math.inf)  # largest batch of each panel


@dataclass(frozen=True)
class LayerComparison:
    """A layer with its tuned kernel and a library's.

    Attributes:
        label: Label of the layer, which ends with its batch.
        workload: The layer's workload.
        tuned_row: The fastest kernel, as it was compared with the library.
        library_row: The library's row.
        seconds_by_kind: Seconds of the fastest kernel of each kind in any log.
    """

    label: str
    workload: Conv2d
    tuned_row: ResultRow
    library_row: ResultRow
    seconds_by_kind: Mapping[str, float]

    @property
    def winner(self) -> str:
        """The fastest kind."""
        return min(self.seconds_by_kind, key=self.seconds_by_kind.__getitem__)

    @property
    def lead_ratio(self) -> float | None:
        """Time of the second-fastest kind over that of the fastest; None if there is only one."""
        first_seconds, *remaining_seconds = sorted(self.seconds_by_kind.values())
        return remaining_seconds[0] / first_seconds if remaining_seconds else None

    @property
    def speedup(self) -> float:
        """Speed-up over the library."""
        return _get_seconds(self.library_row) / _get_seconds(self.tuned_row)


def compare_layers(
    sweeps: Iterable[Sweep], records: Iterable[Record], kinds: Collection[str], library: str = "cudnn"
) -> list[LayerComparison]:
    """Return the layers of comparisons that have both a tuned kernel and the library's.

    Args:
        sweeps: The comparisons.
        records: Measurements of these layers.
        kinds: Schedules that are kinds of their own; all others form one kind.
        library: Name of the library in the comparisons.
    """
    compared_rows = []
    for label, result in (
        (label, result) for sweep in sweeps for label, result in zip(sweep.labels, sweep.results, strict=True)
    ):
        rows = {row.name: row for row in result.rows if row.timing}
        if isinstance(result.workload, Conv2d) and {TUNED, library} <= rows.keys():
            compared_rows.append((label, result.workload, rows[TUNED], rows[library]))
    seconds: dict[Workload, dict[str, float]] = {}
    for label, workload, tuned_row, _ in compared_rows:
        seconds[workload] = {_classify_schedule(tuned_row.schedule or label, kinds): _get_seconds(tuned_row)}
    for record in records:
        if record.ok and (seconds_of_workload := seconds.get(record.workload)) is not None:
            kind = _classify_schedule(record.schedule, kinds)
            seconds_of_workload[kind] = min(record.cost, seconds_of_workload.get(kind, math.inf))
    return [
        LayerComparison(label, compared_workload, tuned_row, library_row, seconds[compared_workload])
        for label, compared_workload, tuned_row, library_row in compared_rows
    ]


def make_layers_table(layers: Sequence[LayerComparison], kinds: Sequence[str]) -> Table:
    """Return a table with one row per layer: the fastest kernel and the library's, their errors, times by kind."""
    headers = (
        "layer",
        "workload",
        "schedule",
        "tvmconv [µs]",
        "library [µs]",
        "×",
        "TFLOP/s",
        "error",
        "library's error",
    )
    shown_kinds = [*kinds, OTHER_KINDS]
    rows = [
        (
            layer.label,
            f"`{layer.workload.text}`",
            layer.tuned_row.schedule or EMPTY_CELL,
            _format_microseconds(_get_seconds(layer.tuned_row)),
            _format_microseconds(_get_seconds(layer.library_row)),
            format_significant(layer.speedup),
            format_significant((layer.tuned_row.gflops or 0) / 1e3),
            *(f"{row.error:.1e}" for row in (layer.tuned_row, layer.library_row)),
            *(_format_microseconds(layer.seconds_by_kind.get(kind)) for kind in shown_kinds),
        )
        for layer in layers
    ]
    return Table((*headers, *(f"{kind} [µs]" for kind in shown_kinds)), rows, left_aligned=frozenset(headers[:3]))


def make_networks_table(comparisons: Sequence[LayerComparison]) -> Table:
    """Return a table with one row per network and batch; a layer's label begins with its network."""
    headers = ("network", "batch", "layers", "×", "least ×", "slower", "most TFLOP/s", "largest error", "library's")

    def key(layer: LayerComparison) -> tuple[str, int]:
        return layer.label.partition(" ")[0], layer.workload.N

    groups = [(*name, list(layers)) for name, layers in groupby(sorted(comparisons, key=key), key)]
    rows = [(network, str(batch), *_summarize_layers(layers)) for network, batch, layers in groups]
    return Table(headers, [*rows, ("all", "", *_summarize_layers(comparisons))], left_aligned=frozenset(headers[:1]))


def _summarize_layers(layers: Sequence[LayerComparison]) -> tuple[str, ...]:
    ratios = [layer.speedup for layer in layers]
    errors = (
        max(row.error or 0 for row in rows)
        for rows in zip(
            *((compared_layer.tuned_row, compared_layer.library_row) for compared_layer in layers), strict=True
        )
    )
    return (
        str(len(layers)),
        format_significant(statistics.geometric_mean(ratios)),
        format_significant(min(ratios)),
        str(sum(ratio < 1 for ratio in ratios)),
        format_significant(max(layer.tuned_row.gflops or 0 for layer in layers) / 1e3),
        *(f"{error:.1e}" for error in errors),
    )


def draw_winners(layers: Sequence[LayerComparison], kinds: Sequence[str], path: Path) -> None:
    """Draw one panel per range of batches: channels on the x axis, side of the output on the y axis, markers by winner.

    The number at each marker is the ratio of the second-fastest kind's time; several layers at one position show the
    least.

    Args:
        layers: The layers.
        kinds: Schedules that are kinds of their own, as for `compare_layers`.
        path: File to write; its suffix, one of `charts.FORMATS`, selects the format.
    """
    panels = {
        max_batch: panel_layers
        for max_batch in PANEL_MAX_BATCHES
        if (panel_layers := [layer for layer in layers if _select_panel(layer) == max_batch])
    }
    figure = create_figure(PANEL_WIDTH * len(panels), PANEL_HEIGHT)
    panel_axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, panel_layers in zip(panel_axes, panels.values(), strict=True):
        _draw_panel(axes, panel_layers, (*kinds, OTHER_KINDS))
    panel_axes[0].set_ylabel("side of the output [pixels]")
    panel_axes[0].legend(loc="lower left", fontsize=SMALL_FONT_POINTS + 1)
    figure.suptitle("The fastest kind of schedule, and how many times as long the next one takes", fontsize=11)
    save_figure(figure, path, colors=NUM_PALETTE_COLORS)


def _draw_panel(axes: Any, panel_layers: Sequence[LayerComparison], kinds: Sequence[str]) -> None:
    for kind, (marker, color) in zip(kinds, MARKER_STYLES, strict=False):
        points = [_compute_position(layer.workload) for layer in panel_layers if layer.winner == kind]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, linestyle="none", marker=marker, color=color, markersize=5, alpha=0.8, label=kind)
    min_lead_by_position: dict[tuple[float, float], float] = {}
    for layer in panel_layers:
        position = _compute_position(layer.workload)
        min_lead_by_position[position] = min(layer.lead_ratio or math.inf, min_lead_by_position.get(position, math.inf))
    for position, lead in min_lead_by_position.items():
        if lead < math.inf:
            text = format_significant(lead, 2)
            axes.annotate(text, position, (1, 5), textcoords="offset points", fontsize=SMALL_FONT_POINTS, rotation=50)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log", base=2)
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.set_title("batch " + ", ".join(map(str, sorted({layer.workload.N for layer in panel_layers}))), fontsize=10)
    axes.set_xlabel("channels: root of inputs' times outputs'")


def _select_panel(layer: LayerComparison) -> float:
    """Return the largest batch of a layer's panel."""
    return next(max_batch for max_batch in PANEL_MAX_BATCHES if max_batch >= layer.workload.N)


def _compute_position(workload: Conv2d) -> tuple[float, float]:
    return math.sqrt(workload.C * workload.O), math.sqrt(workload.P * workload.Q)


def _classify_schedule(schedule: str, kinds: Collection[str]) -> str:
    return schedule if schedule in kinds else OTHER_KINDS


def _get_seconds(row: ResultRow) -> float:
    return row.timing.median if row.timing else math.inf


def _format_microseconds(seconds: float | None) -> str:
    return format_significant(seconds * 1e6) if seconds else EMPTY_CELL
