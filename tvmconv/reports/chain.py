"""Tables of chains of kernels: the time of all layers together, and of each layer."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.experiments.chain import CUDNN_GRAPH, GRAPH, OVERLAPPING, ChainLayer
from tvmconv.experiments.kernel_metrics import KernelMetricsFile
from tvmconv.reports.tables import EMPTY_CELL, Columns, Table, format_micros, format_optional, make_table

SEPARATE_SUM, CUDNN_SEPARATE_SUM = "sum", "cudnn sum"
TITLES = {
    SEPARATE_SUM: "each alone, summed",
    GRAPH: "one graph",
    OVERLAPPING: "one graph, overlapping",
    CUDNN_SEPARATE_SUM: "cuDNN, each alone, summed",
    CUDNN_GRAPH: "cuDNN, one graph",
}
LIBRARY_COUNTERPARTS = {SEPARATE_SUM: CUDNN_SEPARATE_SUM, GRAPH: CUDNN_GRAPH, OVERLAPPING: CUDNN_GRAPH}
SEPARATE_COUNTERPARTS = {GRAPH: SEPARATE_SUM, OVERLAPPING: SEPARATE_SUM, CUDNN_GRAPH: CUDNN_SEPARATE_SUM}
LEGEND = (
    "Alone: launches of one kernel in a graph, hot cache. One graph: every layer once, each with its own weights. "
    "Overlapping: kernels with programmatic dependent launch begin before the previous kernel has ended. Input: the "
    "output of the previous layer, or a separate array."
)


def make_totals_table(metrics: KernelMetricsFile[ChainLayer]) -> Table:
    """Return a table of the time of all layers, each alone and in one graph, by tvmconv and by cuDNN."""
    layers = metrics.kernels
    seconds = {SEPARATE_SUM: sum(layer.seconds for layer in layers)}
    if all(layer.cudnn is not None for layer in layers):
        seconds[CUDNN_SEPARATE_SUM] = sum(layer.cudnn or 0 for layer in layers)
    seconds |= {name: median for name, (median, _) in metrics.totals.items()}
    rows = []
    for name in filter(seconds.__contains__, TITLES):
        separate_seconds = seconds.get(SEPARATE_COUNTERPARTS.get(name, ""))
        library_seconds = seconds.get(LIBRARY_COUNTERPARTS.get(name, ""))
        overlap_note = f" ({sum(layer.overlaps for layer in layers)} of {len(layers)})" if name == OVERLAPPING else ""
        spread = f" ± {metrics.totals[name][1]:.1%}" if name in metrics.totals else ""
        difference = separate_seconds and (seconds[name] - separate_seconds) * 1e6 / len(layers)
        rows.append(
            (
                TITLES[name] + overlap_note,
                format_micros(seconds[name]) + spread,
                EMPTY_CELL if difference is None else f"{difference:+.2f}",
                format_optional(library_seconds and library_seconds / seconds[name]),
            )
        )
    headers = (f"{len(layers)} layers", "time [µs]", "over the sum, per layer [µs]", "× cuDNN")
    return Table(headers, rows, headers[:1])


def make_layers_table(layers: Sequence[ChainLayer]) -> Table:
    """Return a table with one row per layer, in their order."""
    columns: Columns = {
        "layer": lambda layer: layer.layer,
        "schedule": lambda layer: layer.schedule,
        "config": lambda layer: layer.origin,
        "input": lambda layer: "the layer before's" if layer.linked else "its own",
        "overlaps": lambda layer: "yes" if layer.overlaps else None,
        "alone [µs]": lambda layer: format_micros(layer.seconds),
        "cuDNN [µs]": lambda layer: format_micros(layer.cudnn),
        "cuDNN, how": lambda layer: layer.how or None,
    }
    return make_table(layers, columns, {"layer", "schedule", "config", "input", "overlaps", "cuDNN, how"})
