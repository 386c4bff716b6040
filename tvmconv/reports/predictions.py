"""Predictions without any trial, compared with the untuned default, the best of a search, and a library."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields

from tvmconv.experiments.run import PREDICTED, TUNED, UNTUNED
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.networks import NetworkVariant, find_variant, make_sort_key, make_suite_name
from tvmconv.reports.roofline_headroom import compute_roofline_headroom
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant, sum_network_seconds

MUCH_SLOWER_RATIO, SLOWER_RATIO = 0.8, 0.97  # speed-ups over the library
TARGET_SPEEDUP = 1.5  # over the library; the roofline of some layers is below it
OUR_ROWS = (PREDICTED, UNTUNED, TUNED)


def make_predictions_table(sweeps: Sequence[Sweep], library: str = "cudnn") -> Table:
    """Return a table with one row per network with predictions: geometric-mean speed-ups over a library."""
    headers = (
        "suite",
        *(variant_field.name for variant_field in fields(NetworkVariant)),
        "layers",
        *(f"{name} ×" for name in OUR_ROWS),
        "attainable ×",
        f"attainable < {TARGET_SPEEDUP}",
        f"{PREDICTED} < {MUCH_SLOWER_RATIO}",
        *(f"{name} [µs]" for name in (*OUR_ROWS, library)),
    )
    lines = []
    for sweep in sweeps:
        if any(row.name == PREDICTED for result in sweep.results for row in result.rows):
            variant = find_variant(sweep)
            ratios = {name: _compute_speedups(sweep, name, library) for name in OUR_ROWS}
            means = [_format_mean(ratios[name]) for name in OUR_ROWS]
            headrooms = [
                ratio for ratio in (compute_roofline_headroom(result, library) for result in sweep.results) if ratio
            ]
            num_limited = str(sum(ratio < TARGET_SPEEDUP for ratio in headrooms)) if headrooms else EMPTY_CELL
            num_much_slower = sum(ratio < MUCH_SLOWER_RATIO for ratio in ratios[PREDICTED])
            totals = [sum_network_seconds(sweep.results, sweep.counts, name) for name in (*OUR_ROWS, library)]
            micros = [EMPTY_CELL if total is None else format_significant(total * 1e6) for total in totals]
            sweep_cells = (
                make_suite_name(sweep, variant),
                variant.dtype,
                variant.layout,
                variant.batch,
                str(len(sweep.results)),
            )
            lines.append(
                (
                    make_sort_key(sweep, variant),
                    (*sweep_cells, *means, _format_mean(headrooms), num_limited, str(num_much_slower), *micros),
                )
            )
    lines.sort(key=lambda line: line[0])
    return Table(headers, [line for _, line in lines], left_aligned=frozenset({"suite", "dtype", "layout"}))


def make_slower_layers_table(sweeps: Sequence[Sweep], library: str = "cudnn") -> Table:
    """Return a table with one row per layer whose tuned kernel is slower than a library, of networks with predictions.

    A layer counts as slower below `SLOWER_RATIO` of the library's speed, which exceeds the noise of two such timings.
    """
    lines = []
    for sweep in sweeps:
        if not any(row.name == PREDICTED for result in sweep.results for row in result.rows):
            continue
        variant = find_variant(sweep)
        for result in sweep.results:
            rows = {row.name: row for row in result.rows if row.timing}
            if TUNED not in rows or library not in rows:
                continue
            tuned_seconds, library_seconds = (
                timing.median for name in (TUNED, library) if (timing := rows[name].timing)
            )
            if library_seconds / tuned_seconds < SLOWER_RATIO:
                headroom = compute_roofline_headroom(result, library)
                layer_cells = make_suite_name(sweep, variant), variant.dtype, variant.batch, result.workload.text
                schedule = rows[TUNED].schedule or EMPTY_CELL
                ratio_cells = (
                    format_significant(library_seconds / tuned_seconds),
                    format_significant(headroom) if headroom else EMPTY_CELL,
                )
                lines.append(
                    (
                        (make_sort_key(sweep, variant), library_seconds / tuned_seconds),
                        (*layer_cells, schedule, *ratio_cells),
                    )
                )
    lines.sort(key=lambda line: line[0])
    headers = ("suite", "dtype", "batch", "layer", "schedule", f"{TUNED} ×", "attainable ×")
    return Table(headers, [line for _, line in lines], left_aligned=frozenset({"suite", "dtype", "layer", "schedule"}))


def _format_mean(ratios: Sequence[float]) -> str:
    return format_significant(statistics.geometric_mean(ratios)) if ratios else EMPTY_CELL


def _compute_speedups(sweep: Sweep, name: str, library: str) -> list[float]:
    """Return the speed-ups of a row over the library, for the layers where both ran."""
    speedups = []
    for result in sweep.results:
        times = {row.name: row.timing.median for row in result.rows if row.timing}
        if name in times and library in times:
            speedups.append(times[library] / times[name])
    return speedups
