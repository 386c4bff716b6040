"""What is predicted without any trial, beside the untuned default, the best of a search, and a library."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields

from tvmconv.experiments.run import PREDICTED, TUNED, UNTUNED
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.networks import Kind, kind_of, order, suite_name
from tvmconv.reports.tables import NOTHING, Table, network_seconds, significant

MUCH_SLOWER = 0.8  # of the library's speed
OURS = (PREDICTED, UNTUNED, TUNED)


def predictions(sweeps: Sequence[Sweep], library: str = "cudnn") -> Table:
    """One line a network that was measured with what is predicted: speeds over a library, geometric means of layers."""
    headers = (
        "suite",
        *(each.name for each in fields(Kind)),
        "layers",
        *(f"{name} ×" for name in OURS),
        f"{PREDICTED} < {MUCH_SLOWER}",
        *(f"{name} [µs]" for name in (*OURS, library)),
    )
    lines = []
    for sweep in sweeps:
        if any(row.name == PREDICTED for result in sweep.results for row in result.rows):
            kind = kind_of(sweep)
            ratios = {name: _ratios(sweep, name, library) for name in OURS}
            means = [significant(statistics.geometric_mean(ratios[name])) if ratios[name] else NOTHING for name in OURS]
            much_slower = sum(ratio < MUCH_SLOWER for ratio in ratios[PREDICTED])
            totals = [network_seconds(sweep.results, sweep.counts, name) for name in (*OURS, library)]
            micros = [NOTHING if total is None else significant(total * 1e6) for total in totals]
            said = (suite_name(sweep, kind), kind.dtype, kind.layout, kind.batch, str(len(sweep.results)))
            lines.append((order(sweep, kind), (*said, *means, str(much_slower), *micros)))
    lines.sort(key=lambda line: line[0])
    return Table(headers, [line for _, line in lines], left=frozenset({"suite", "dtype", "layout"}))


def _ratios(sweep: Sweep, name: str, library: str) -> list[float]:
    """How many times as fast as the library a row of each layer is, where both ran."""
    found = []
    for result in sweep.results:
        times = {row.name: row.timing.median for row in result.rows if row.timing}
        if name in times and library in times:
            found.append(times[library] / times[name])
    return found
