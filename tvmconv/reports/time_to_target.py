"""The time that a search takes to reach a library's speed, and to nearly reach its best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.record import Record
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant
from tvmconv.workloads import Workload

NEAR_BEST_FRACTION = 0.95  # of the speed of the fastest config of all searches


def make_time_to_target_table(
    searches: Mapping[str, Iterable[Record]], comparisons: Sequence[Sweep], library: str = "cudnn"
) -> Table:
    """Return a table with one row per search and goal: how many layers reach the goal, and after how many seconds.

    Args:
        searches: Records of each search by its name. A record's seconds count from the start of its layer's search:
            from the command for the first layer, from the end of the previous layer for the others.
        comparisons: Comparisons with the library's times, of which the best counts; layers without one are left out.
        library: Name of the library in the comparisons.
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
    headers = ("goal", "search", "layers", "reached", "median [s]", "worst [s]", "seconds per layer")
    rows = [
        (goal, name, *_format_row(layers, target_seconds))
        for goal, target_seconds in goals.items()
        for name, layers in arrivals_by_search.items()
    ]
    return Table(headers, rows, left_aligned=frozenset({"goal", "search"}))


def _collect_arrivals(
    records: Iterable[Record], target_seconds: Mapping[Workload, float]
) -> dict[Workload, list[tuple[float, float]]]:
    """Return for each layer the elapsed seconds and the costs of its records."""
    layers: dict[Workload, list[tuple[float, float]]] = {}
    for record in records:
        if record.elapsed is not None and record.ok and record.workload in target_seconds:
            layers.setdefault(record.workload, []).append((record.elapsed, record.cost))
    return layers


def _format_row(
    layers: Mapping[Workload, Sequence[tuple[float, float]]], target_seconds: Mapping[Workload, float]
) -> Sequence[str]:
    """Return the numbers of layers and of those at the goal, median and latest time of that, and mean duration."""
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
