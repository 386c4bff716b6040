"""What is predicted without any trial, beside the untuned default, the best of a search, and a library."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields

from tvmconv.experiments.run import PREDICTED, TUNED, UNTUNED
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.attainable import attainable
from tvmconv.reports.networks import Kind, kind_of, order, suite_name
from tvmconv.reports.tables import NOTHING, Table, network_seconds, significant

MUCH_SLOWER, SLOWER = 0.8, 0.97  # of the library's speed
WANTED = 1.5  # times that, which not every layer leaves room for
OURS = (PREDICTED, UNTUNED, TUNED)


def predictions(sweeps: Sequence[Sweep], library: str = "cudnn") -> Table:
    """One line a network that was measured with what is predicted: speeds over a library, geometric means of layers."""
    headers = (
        "suite",
        *(each.name for each in fields(Kind)),
        "layers",
        *(f"{name} ×" for name in OURS),
        "attainable ×",
        f"attainable < {WANTED}",
        f"{PREDICTED} < {MUCH_SLOWER}",
        *(f"{name} [µs]" for name in (*OURS, library)),
    )
    lines = []
    for sweep in sweeps:
        if any(row.name == PREDICTED for result in sweep.results for row in result.rows):
            kind = kind_of(sweep)
            ratios = {name: _ratios(sweep, name, library) for name in OURS}
            means = [_mean(ratios[name]) for name in OURS]
            most = [ratio for ratio in (attainable(result, library) for result in sweep.results) if ratio]
            little = str(sum(ratio < WANTED for ratio in most)) if most else NOTHING
            much_slower = sum(ratio < MUCH_SLOWER for ratio in ratios[PREDICTED])
            totals = [network_seconds(sweep.results, sweep.counts, name) for name in (*OURS, library)]
            micros = [NOTHING if total is None else significant(total * 1e6) for total in totals]
            said = (suite_name(sweep, kind), kind.dtype, kind.layout, kind.batch, str(len(sweep.results)))
            lines.append((order(sweep, kind), (*said, *means, _mean(most), little, str(much_slower), *micros)))
    lines.sort(key=lambda line: line[0])
    return Table(headers, [line for _, line in lines], left=frozenset({"suite", "dtype", "layout"}))


def slower_layers(sweeps: Sequence[Sweep], library: str = "cudnn") -> Table:
    """One line a layer whose tuned kernel is slower than a library, of networks that were measured with predictions.

    Slower by more than two such timings differ by: below `SLOWER` of its speed.
    """
    lines = []
    for sweep in sweeps:
        if not any(row.name == PREDICTED for result in sweep.results for row in result.rows):
            continue
        kind = kind_of(sweep)
        for result in sweep.results:
            rows = {row.name: row for row in result.rows if row.timing}
            if TUNED not in rows or library not in rows:
                continue
            ours, theirs = (timing.median for name in (TUNED, library) if (timing := rows[name].timing))
            if theirs / ours < SLOWER:
                most = attainable(result, library)
                told = suite_name(sweep, kind), kind.dtype, kind.batch, result.workload.text
                schedule = rows[TUNED].schedule or NOTHING
                share = significant(theirs / ours), significant(most) if most else NOTHING
                lines.append(((order(sweep, kind), theirs / ours), (*told, schedule, *share)))
    lines.sort(key=lambda line: line[0])
    headers = ("suite", "dtype", "batch", "layer", "schedule", f"{TUNED} ×", "attainable ×")
    return Table(headers, [line for _, line in lines], left=frozenset({"suite", "dtype", "layer", "schedule"}))


def _mean(ratios: Sequence[float]) -> str:
    return significant(statistics.geometric_mean(ratios)) if ratios else NOTHING


def _ratios(sweep: Sweep, name: str, library: str) -> list[float]:
    """How many times as fast as the library a row of each layer is, where both ran."""
    found = []
    for result in sweep.results:
        times = {row.name: row.timing.median for row in result.rows if row.timing}
        if name in times and library in times:
            found.append(times[library] / times[name])
    return found
