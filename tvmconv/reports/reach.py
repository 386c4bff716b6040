"""How soon a search is as fast as a library, and nearly as fast as it will ever be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.record import Record
from tvmconv.reports.tables import NOTHING, Table, significant
from tvmconv.workloads import Workload

NEARLY = 0.95  # of the speed of the fastest config that any of the searches found


def reach(searches: Mapping[str, Iterable[Record]], beside: Sequence[Sweep], library: str = "cudnn") -> Table:
    """One line a search for each of two goals: how many layers reach it, and after how many seconds.

    Args:
        searches: the records of each search, by what to call it. A record's seconds are since the search of its layer
            began: since the command for the first layer, since the layer before ended for the others.
        beside: comparisons that tell how fast the library is, of several its best; layers in none are left out.
        library: its name in the comparisons.
    """
    theirs: dict[Workload, float] = {}
    for result in (result for sweep in beside for result in sweep.results):
        for row in result.rows:
            if row.name == library and row.timing:
                theirs[result.workload] = min(row.timing.median, theirs.get(result.workload, math.inf))
    found = {name: _arrivals(records, theirs) for name, records in searches.items()}
    every = [costs for layers in found.values() for costs in layers.items()]
    nearly = {workload: math.inf for workload in theirs}
    for workload, arrivals in every:
        nearly[workload] = min(nearly[workload], *(cost / NEARLY for _, cost in arrivals))
    goals = {f"{library}'s speed": theirs, f"{NEARLY:.0%} of the best": nearly}
    headers = ("goal", "search", "layers", "reached", "median [s]", "worst [s]", "seconds a layer")
    rows = [(goal, name, *_line(layers, wanted)) for goal, wanted in goals.items() for name, layers in found.items()]
    return Table(headers, rows, left=frozenset({"goal", "search"}))


def _arrivals(records: Iterable[Record], known: Mapping[Workload, float]) -> dict[Workload, list[tuple[float, float]]]:
    """Of each layer when its records came in, and what they cost, in seconds."""
    layers: dict[Workload, list[tuple[float, float]]] = {}
    for record in records:
        if record.elapsed is not None and record.ok and record.workload in known:
            layers.setdefault(record.workload, []).append((record.elapsed, record.cost))
    return layers


def _line(layers: Mapping[Workload, Sequence[tuple[float, float]]], wanted: Mapping[Workload, float]) -> Sequence[str]:
    """How many layers there are and reach what is wanted, when in the median and at the latest, and when they ended."""
    soonest = [
        min((elapsed for elapsed, cost in arrivals if cost <= wanted[workload]), default=math.inf)
        for workload, arrivals in layers.items()
    ]
    reached = [seconds for seconds in soonest if seconds < math.inf]
    median = statistics.median(soonest) if soonest else math.inf
    ends = [max(elapsed for elapsed, _ in arrivals) for arrivals in layers.values()]
    return (
        str(len(layers)),
        str(len(reached)),
        significant(median) if median < math.inf else NOTHING,
        significant(max(reached)) if reached else NOTHING,
        significant(statistics.fmean(ends)) if ends else NOTHING,
    )
