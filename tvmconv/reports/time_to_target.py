"""How soon a search is as fast as a library, and nearly as fast as it will ever be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.record import Record
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant
from tvmconv.workloads import Workload

NEAR_BEST_FRACTION = 0.95  # of the speed of the fastest config that any of the searches found


def make_time_to_target_table(
    searches: Mapping[str, Iterable[Record]], comparisons: Sequence[Sweep], library: str = "cudnn"
) -> Table:
    """One line a search for each of two goals: how many layers reach it, and after how many seconds.

    Args:
        searches: the records of each search, by what to call it. A record's seconds are since the search of its layer
            began: since the command for the first layer, since the layer before ended for the others.
        comparisons: comparisons that tell how fast the library is, of several its best; layers in none are left out.
        library: its name in the comparisons.
    """
    library_seconds: dict[Workload, float] = {}
    for result in (result for sweep in comparisons for result in sweep.results):
        for row in result.rows:
            if row.name == library and row.timing:
                library_seconds[result.workload] = min(
                    row.timing.median, library_seconds.get(result.workload, math.inf)
                )
    arrivals_by_search = {name: _collect_arrivals(records, library_seconds) for name, records in searches.items()}
    workload_arrivals = [costs for layers in arrivals_by_search.values() for costs in layers.items()]
    near_best_seconds = {workload: math.inf for workload in library_seconds}
    for workload, arrivals in workload_arrivals:
        near_best_seconds[workload] = min(
            near_best_seconds[workload], *(cost / NEAR_BEST_FRACTION for _, cost in arrivals)
        )
    goals = {f"{library}'s speed": library_seconds, f"{NEAR_BEST_FRACTION:.0%} of the best": near_best_seconds}
    headers = ("goal", "search", "layers", "reached", "median [s]", "worst [s]", "seconds a layer")
    rows = [
        (goal, name, *_format_row(layers, target_seconds))
        for goal, target_seconds in goals.items()
        for name, layers in arrivals_by_search.items()
    ]
    return Table(headers, rows, left_aligned=frozenset({"goal", "search"}))


def _collect_arrivals(
    records: Iterable[Record], target_seconds: Mapping[Workload, float]
) -> dict[Workload, list[tuple[float, float]]]:
    """Of each layer when its records came in, and what they cost, in seconds."""
    layers: dict[Workload, list[tuple[float, float]]] = {}
    for record in records:
        if record.elapsed is not None and record.ok and record.workload in target_seconds:
            layers.setdefault(record.workload, []).append((record.elapsed, record.cost))
    return layers


def _format_row(
    layers: Mapping[Workload, Sequence[tuple[float, float]]], target_seconds: Mapping[Workload, float]
) -> Sequence[str]:
    """How many layers there are and reach what is wanted, when in the median and at the latest, and when they ended."""
    first_seconds = [
        min((elapsed for elapsed, cost in arrivals if cost <= target_seconds[workload]), default=math.inf)
        for workload, arrivals in layers.items()
    ]
    reached_seconds = [seconds for seconds in first_seconds if seconds < math.inf]
    median = statistics.median(first_seconds) if first_seconds else math.inf
    last_seconds = [max(elapsed for elapsed, _ in arrivals) for arrivals in layers.values()]
    return (
        str(len(layers)),
        str(len(reached_seconds)),
        format_significant(median) if median < math.inf else EMPTY_CELL,
        format_significant(max(reached_seconds)) if reached_seconds else EMPTY_CELL,
        format_significant(statistics.fmean(last_seconds)) if last_seconds else EMPTY_CELL,
    )
