"""Tables of chains of kernels: the time of all layers together, and of each layer."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.experiments.chain import CUDNN_GRAPH, GRAPH, OVERLAPPING, ChainLayer
from tvmconv.experiments.kernel_metrics import KernelMetricsFile
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant

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
    for name, title in TITLES.items():
        if name not in seconds:
            continue
        separate_seconds, library_seconds = (
            seconds.get(SEPARATE_COUNTERPARTS.get(name, "")),
            seconds.get(LIBRARY_COUNTERPARTS.get(name, "")),
        )
        total = metrics.totals.get(name)
        overlap_note = f" ({sum(layer.overlaps for layer in layers)} of {len(layers)})" if name == OVERLAPPING else ""
        rows.append(
            (
                title + overlap_note,
                format_significant(seconds[name] * 1e6) + (f" ± {total[1]:.1%}" if total else ""),
                EMPTY_CELL
                if separate_seconds is None
                else f"{(seconds[name] - separate_seconds) * 1e6 / len(layers):+.2f}",
                EMPTY_CELL if library_seconds is None else format_significant(library_seconds / seconds[name]),
            )
        )
    return Table(
        (f"{len(layers)} layers", "time [µs]", "over the sum, per layer [µs]", "× cuDNN"),
        rows,
        frozenset([f"{len(layers)} layers"]),
    )


def make_layers_table(layers: Sequence[ChainLayer]) -> Table:
    """Return a table with one row per layer, in their order."""
    columns = {
        "layer": [layer.layer for layer in layers],
        "schedule": [layer.schedule for layer in layers],
        "config": [layer.origin for layer in layers],
        "input": ["the layer before's" if layer.linked else "its own" for layer in layers],
        "overlaps": ["yes" if layer.overlaps else EMPTY_CELL for layer in layers],
        "alone [µs]": [format_significant(layer.seconds * 1e6) for layer in layers],
        "cuDNN [µs]": [
            EMPTY_CELL if layer.cudnn is None else format_significant(layer.cudnn * 1e6) for layer in layers
        ],
        "cuDNN, how": [layer.how or EMPTY_CELL for layer in layers],
    }
    rows = [*zip(*columns.values(), strict=True)]
    return Table([*columns], rows, frozenset(("layer", "schedule", "config", "input", "overlaps", "cuDNN, how")))
