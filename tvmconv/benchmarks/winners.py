"""Make tables and a chart of the fastest schedules by channels, image and batch.

    tvmconv bench winners tuning_logs/nvidia-h200/winograd/layers/*-tuned.json --log tuning_logs/nvidia-h200
    tvmconv bench winners results/*-tuned.json --log results --kind winograd -o results/winners

It reads the results of `tvmconv bench tune-suite`, and logs with the times of the other schedules. It writes NAME.md,
with a line per layer, and NAME.png. With --update-page, it writes a line per network and batch into a page.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from tvmconv.benchmarks.common import add_output, show
from tvmconv.cli import options
from tvmconv.experiments.results import TUNED, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.ranking import list_log_files
from tvmconv.logs.record import Record
from tvmconv.palette import SeriesStyle, find_style
from tvmconv.reports.charts import create_figure, save_figure
from tvmconv.reports.tables import Columns, Table, format_micros, format_significant, make_table
from tvmconv.training import read_valid_records
from tvmconv.workloads import Workload
from tvmconv.workloads.conv_operator import ConvOperator

OTHER_KINDS = "others"  # kind of all schedules that have no kind of their own
PANEL_WIDTH, PANEL_HEIGHT, SMALL_FONT_POINTS = 5.0, 5.6, 7  # inches, inches, points
OTHERS_STYLE = SeriesStyle("#8c8c8c", "o")
NUM_PALETTE_COLORS = 128
PANEL_MAX_BATCHES = (1, 8, math.inf)  # largest batch of each panel
LEGEND = (
    "× library: speed-up over the library, the geometric mean over the layers. TFLOP/s count the operations of direct "
    "convolution. Errors are relative L2 errors against float64."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Files NAME-tuned.json.")
    options.add_option(parser, "--kind", "SCHEDULE", "Schedule that is compared with all others", repeat=True)
    options.add_option(parser, "--log", "LOG", "Log, or folder of logs", type=Path, repeat=True)
    add_output(parser, None, "NAME.md and NAME.png")
    options.add_page(parser)
    options.add_option(parser, "--section", "NAME", "Section of page", default="winners")


def run(args: argparse.Namespace) -> int:
    """Read results and logs, then print and write the tables."""
    sweeps = [Sweep.read(file) for file in args.files]
    records = (record for log in list_log_files(args.log) for record in read_valid_records(log))
    layers = compare_layers(sweeps, records, args.kind)
    show(make_networks_table(layers), args, args.section, LEGEND)
    if args.out:
        draw_winners(layers, args.kind, args.out.with_name(f"{args.out.name}.png"))
        sources = "\n".join(f"* {sweep.name}: {sweep.provenance}" for sweep in sweeps)
        made = f"Written by `{args.command}` from these:"
        page = "\n\n".join([make_layers_table(layers, args.kind).format_markdown(), LEGEND, made, sources])
        args.out.with_name(f"{args.out.name}.md").write_text(f"{page}\n", encoding="utf-8")
    return 0


@dataclass(frozen=True)
class LayerComparison:
    """A layer with its tuned kernel and a library's."""

    label: str  # ends with the batch
    workload: ConvOperator  # along two axes
    tuned_row: ResultRow  # the fastest kernel, as it was compared with the library
    library_row: ResultRow
    seconds_by_kind: Mapping[str, float]  # of the fastest kernel of each kind in any log

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
        return (self.library_row.seconds or math.inf) / (self.tuned_row.seconds or math.inf)


def compare_layers(sweeps: Iterable[Sweep], records: Iterable[Record], kinds: Collection[str]) -> list[LayerComparison]:
    """Return the layers of comparisons that have both a tuned kernel and cuDNN's. All schedules that are not
    among `kinds` form one kind.
    """
    layers = []
    seconds: dict[Workload, dict[str, float]] = {}
    for label, result in (labeled_result for sweep in sweeps for labeled_result in sweep.labeled_results):
        tuned_row, library_row = result.find_row(TUNED), result.find_row("cudnn")
        w = result.workload
        if isinstance(w, ConvOperator) and w.spatial_ndim == 2 and tuned_row.seconds and library_row.seconds:
            kind = _classify_schedule(tuned_row.schedule or label, kinds)
            seconds[result.workload] = {kind: tuned_row.seconds}
            layers.append(LayerComparison(label, w, tuned_row, library_row, {}))
    for record in records:
        if record.ok and (seconds_of_workload := seconds.get(record.workload)) is not None:
            kind = _classify_schedule(record.schedule, kinds)
            seconds_of_workload[kind] = min(record.cost, seconds_of_workload.get(kind, math.inf))
    return [replace(layer, seconds_by_kind=seconds[layer.workload]) for layer in layers]


def make_layers_table(layers: Sequence[LayerComparison], kinds: Sequence[str]) -> Table:
    """Return a table with one row per layer: the fastest kernel and the library's, their errors, times by kind."""
    columns: Columns = {
        "layer": lambda layer: layer.label,
        "workload": lambda layer: f"`{layer.workload.text}`",
        "schedule": lambda layer: layer.tuned_row.schedule,
        "tvmconv [µs]": lambda layer: format_micros(layer.tuned_row.seconds),
        "library [µs]": lambda layer: format_micros(layer.library_row.seconds),
        "× library": lambda layer: format_significant(layer.speedup),
        "TFLOP/s": lambda layer: format_significant((layer.tuned_row.gflops or 0) / 1e3),
        "error": lambda layer: f"{layer.tuned_row.error:.1e}",
        "library's error": lambda layer: f"{layer.library_row.error:.1e}",
        **{
            f"{kind} [µs]": partial(lambda kind, layer: format_micros(layer.seconds_by_kind.get(kind)), kind)
            for kind in (*kinds, OTHER_KINDS)
        },
    }
    return make_table(layers, columns, {"layer", "workload", "schedule"})


def make_networks_table(comparisons: Sequence[LayerComparison]) -> Table:
    """Return a table with one row per network, kind of gradient and batch; a layer's label begins with its network."""
    groups: defaultdict[tuple[str, int], list[LayerComparison]] = defaultdict(list)
    for layer in comparisons:
        kind = "" if layer.workload.kind == "conv" else f" {layer.workload.kind}"
        groups[f"{layer.label.partition(' ')[0]}{kind}", layer.workload.N].append(layer)
    rows = [(network, str(batch), layers) for (network, batch), layers in sorted(groups.items(), key=itemgetter(0))]
    columns: Columns = {
        "network": lambda row: row[0],
        "batch": lambda row: row[1],
        "layers": lambda row: str(len(row[2])),
        "× library": lambda row: format_significant(statistics.geometric_mean(layer.speedup for layer in row[2])),
        "least × library": lambda row: format_significant(min(layer.speedup for layer in row[2])),
        "slower": lambda row: str(sum(layer.speedup < 1 for layer in row[2])),
        "most TFLOP/s": lambda row: format_significant(max(layer.tuned_row.gflops or 0 for layer in row[2]) / 1e3),
        "largest error": lambda row: f"{max(layer.tuned_row.error or 0 for layer in row[2]):.1e}",
        "library's": lambda row: f"{max(layer.library_row.error or 0 for layer in row[2]):.1e}",
    }
    return make_table([*rows, ("all", "", comparisons)], columns, {"network"})


def draw_winners(layers: Sequence[LayerComparison], kinds: Sequence[str], path: Path) -> None:
    """Draw one panel per range of batches: channels on the x axis, side of the output on the y axis, markers by winner.
    The number at each marker is the ratio of the second-fastest kind's time; several layers at one position show the
    least. The file's suffix, one of `charts.FORMATS`, selects the format.
    """
    panels: defaultdict[float, list[LayerComparison]] = defaultdict(list)
    for layer in layers:
        panels[next(max_batch for max_batch in PANEL_MAX_BATCHES if max_batch >= layer.workload.N)].append(layer)
    figure = create_figure(PANEL_WIDTH * len(panels), PANEL_HEIGHT)
    panel_axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, max_batch in zip(panel_axes, sorted(panels), strict=True):
        _draw_panel(axes, panels[max_batch], (*kinds, OTHER_KINDS))
    panel_axes[0].set_ylabel("side of the output [pixels]")
    panel_axes[0].legend(loc="lower left", fontsize=SMALL_FONT_POINTS + 1)
    figure.suptitle("The fastest kind of schedule, and how many times as long the next one takes", fontsize=11)
    save_figure(figure, path, colors=NUM_PALETTE_COLORS)


def _draw_panel(axes: Any, panel_layers: Sequence[LayerComparison], kinds: Sequence[str]) -> None:
    for kind in kinds:
        style = OTHERS_STYLE if kind == OTHER_KINDS else find_style(kind)
        points = [_compute_position(layer.workload) for layer in panel_layers if layer.winner == kind]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, linestyle="none", marker=style.marker, color=style.color, markersize=5, alpha=0.8, label=kind)
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


def _compute_position(workload: ConvOperator) -> tuple[float, float]:
    return math.sqrt(workload.C * workload.O), math.sqrt(math.prod(workload.output_size))


def _classify_schedule(schedule: str, kinds: Collection[str]) -> str:
    return schedule if schedule in kinds else OTHER_KINDS
