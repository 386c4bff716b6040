"""Chains of kernels as tables: what the layers take together, and each of them. Pure functions of readings."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.experiments.chain import CUDNN_GRAPH, GRAPH, OVERLAPPING, Link
from tvmconv.experiments.readings import Readings
from tvmconv.reports.tables import NOTHING, Table, significant

SUM, CUDNN_SUM = "sum", "cudnn sum"
TITLES = {
    SUM: "each alone, summed",
    GRAPH: "one graph",
    OVERLAPPING: "one graph, overlapping",
    CUDNN_SUM: "cuDNN, each alone, summed",
    CUDNN_GRAPH: "cuDNN, one graph",
}
BESIDE = {SUM: CUDNN_SUM, GRAPH: CUDNN_GRAPH, OVERLAPPING: CUDNN_GRAPH}
BEHIND = {GRAPH: SUM, OVERLAPPING: SUM, CUDNN_GRAPH: CUDNN_SUM}
LEGEND = (
    "Alone: launches of one kernel in a graph, hot cache. One graph: every layer once, each with weights of its own. "
    "Overlapping: kernels that wait by themselves for the one before them begin before it has ended. Input: what the "
    "layer before wrote, or an array of its own."
)


def totals_table(measured: Readings[Link]) -> Table:
    """What all layers take together, each alone and in one graph: a line each, ours and cuDNN's."""
    links = measured.kernels
    seconds = {SUM: sum(link.seconds for link in links)}
    if all(link.cudnn is not None for link in links):
        seconds[CUDNN_SUM] = sum(link.cudnn or 0 for link in links)
    seconds |= {name: median for name, (median, _) in measured.totals.items()}
    rows = []
    for name, what in TITLES.items():
        if name not in seconds:
            continue
        alone, beside = seconds.get(BEHIND.get(name, "")), seconds.get(BESIDE.get(name, ""))
        spread = measured.totals.get(name)
        early = f" ({sum(link.overlaps for link in links)} of {len(links)})" if name == OVERLAPPING else ""
        rows.append(
            (
                what + early,
                significant(seconds[name] * 1e6) + (f" ± {spread[1]:.1%}" if spread else ""),
                NOTHING if alone is None else f"{(seconds[name] - alone) * 1e6 / len(links):+.2f}",
                NOTHING if beside is None else significant(beside / seconds[name]),
            )
        )
    return Table(
        (f"{len(links)} layers", "time [µs]", "over the sum, a layer [µs]", "× cuDNN"),
        rows,
        frozenset([f"{len(links)} layers"]),
    )


def layers_table(links: Sequence[Link]) -> Table:
    """The layers in their order, a line each."""
    columns = {
        "layer": [link.layer for link in links],
        "schedule": [link.schedule for link in links],
        "config": [link.origin for link in links],
        "input": ["the layer before's" if link.linked else "its own" for link in links],
        "overlaps": ["yes" if link.overlaps else NOTHING for link in links],
        "alone [µs]": [significant(link.seconds * 1e6) for link in links],
        "cuDNN [µs]": [NOTHING if link.cudnn is None else significant(link.cudnn * 1e6) for link in links],
        "cuDNN, how": [link.how or NOTHING for link in links],
    }
    rows = [*zip(*columns.values(), strict=True)]
    return Table([*columns], rows, frozenset(("layer", "schedule", "config", "input", "overlaps", "cuDNN, how")))
