"""The comparison of tuned kernels with libraries: times, speed-ups, network totals, and the kernels' configs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tvmconv.experiments.results import Result, ResultRow, find_common_settings
from tvmconv.experiments.run import TUNED
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.tables import (
    EMPTY_CELL,
    NETWORK_ROW,
    Table,
    format_significant,
    list_unstable_notes,
    mark_unstable,
    sum_network_seconds,
)
from tvmconv.space import format_value

FAILED = "failed"


def make_comparison_table(sweep: Sweep) -> Table:
    """Return a table with one row per layer: the tuned kernel, each library, and the kernel's speed-up over it.

    If the network's counts are known, the row before the last has the times of all its layers. The last row has the
    geometric means over the distinct layers.
    """
    results, names = sweep.results, list_compared_names(sweep)
    tuned_network_seconds = sum_network_seconds(results, sweep.counts, TUNED)
    tuned_rows = [_find_row(result, TUNED) for result in results]
    columns: dict[str, list[str]] = {sweep.axis: [*sweep.labels]}
    if sweep.counts:
        columns["times"] = [str(count) for count in sweep.counts]
    columns["schedule"] = [row.schedule or EMPTY_CELL for row in tuned_rows]
    columns[f"{TUNED} [µs]"] = [_format_time(row) for row in tuned_rows]
    footer_labels = [NETWORK_ROW] * bool(sweep.counts) + ["geometric mean"] * bool(names)
    footer: dict[str, list[str]] = {sweep.axis: footer_labels}
    if tuned_network_seconds is not None:
        footer[f"{TUNED} [µs]"] = [format_significant(tuned_network_seconds * 1e6)]
    for name in names:
        rows = [_find_row(result, name) for result in results]
        ratios = [_compute_speedup(result, name) for result in results]
        known_ratios = [ratio for ratio in ratios if ratio is not None]
        columns[f"{name} [µs]"] = [_format_time(row) for row in rows]
        columns[f"× {name}"] = [EMPTY_CELL if ratio is None else format_significant(ratio) for ratio in ratios]
        implementations = _list_implementations(results, name)
        if any(implementations):
            columns[f"{name}, how"] = [implementation or EMPTY_CELL for implementation in implementations]
        means = [format_significant(statistics.geometric_mean(known_ratios))] if known_ratios else [EMPTY_CELL]
        if sweep.counts:
            library_network_seconds = sum_network_seconds(results, sweep.counts, name)
            footer[f"{name} [µs]"] = [
                EMPTY_CELL if library_network_seconds is None else format_significant(library_network_seconds * 1e6)
            ]
            means = [
                EMPTY_CELL
                if tuned_network_seconds is None or library_network_seconds is None
                else format_significant(library_network_seconds / tuned_network_seconds),
                *means,
            ]
        footer[f"× {name}"] = means
    blank = [EMPTY_CELL] * len(footer_labels)
    footer_cells = {header: [*footer.get(header, []), *blank][: len(footer_labels)] for header in columns}
    lines = zip(*([*cells, *footer_cells[header]] for header, cells in columns.items()), strict=True)
    left_aligned = {sweep.axis, "schedule", *(f"{name}, how" for name in names)}
    return Table([*columns], [*lines], left_aligned=frozenset(left_aligned))


def list_remarks(sweep: Sweep) -> list[str]:
    """Return sentences about the comparison: where a library is faster, and what failed."""
    sentences = []
    for name in list_compared_names(sweep):
        ratios = zip(sweep.labels, (_compute_speedup(result, name) for result in sweep.results), strict=True)
        slower = [f"{label} ({ratio:.3f} ×)" for label, ratio in ratios if ratio is not None and ratio < 1]
        sentences.append(f"Slower than {name}: {', '.join(slower) or 'none'}.")
    for label, result in zip(sweep.labels, sweep.results, strict=True):
        sentences += [f"{label}: {row.name} failed: {row.failure}" for row in result.rows if row.failure]
        sentences += [f"{label}: {note}" for note in list_unstable_notes(result)]
    return sentences


def make_configs_table(sweep: Sweep) -> Table:
    """Return a table with one row per layer: the workload, the fastest schedule, and its config."""
    lines = []
    for label, result in zip(sweep.labels, sweep.results, strict=True):
        row = _find_row(result, TUNED)
        config = " ".join(f"{name}={format_value(value)}" for name, value in row.config.items())
        cells = f"`{result.workload.text}`", row.schedule or EMPTY_CELL, f"`{config}`" if config else EMPTY_CELL
        lines.append((label, *cells))
    headers = (sweep.axis, "workload", "schedule", "config")
    return Table(headers, lines, left_aligned=frozenset(headers))


def is_comparison(sweep: Sweep) -> bool:
    """Return whether a sweep has the tuned layers of a network."""
    return bool(sweep.counts) and any(row.name == TUNED for result in sweep.results for row in result.rows)


def has_other_schedules(sweep: Sweep) -> bool:
    """Return whether a sweep has schedules besides the tuned kernel."""
    return any(row.name == TUNED for result in sweep.results for row in result.rows[1:])


def list_compared_names(sweep: Sweep) -> list[str]:
    """Return the names of the rows after the tuned one."""
    return list(
        dict.fromkeys(
            name for result in sweep.results for name in _iterate_names_after_tuned([row.name for row in result.rows])
        )
    )


def _iterate_names_after_tuned(names: Sequence[str]) -> Iterator[str]:
    tuned_index = names.index(TUNED) if TUNED in names else len(names)
    yield from names[tuned_index + 1 :]


def _find_row(result: Result, name: str) -> ResultRow:
    return next((row for row in result.rows if row.name == name), ResultRow(name))


def _format_time(row: ResultRow) -> str:
    return mark_unstable(format_significant(row.timing.median * 1e6), row) if row.timing else FAILED


def _compute_speedup(result: Result, name: str) -> float | None:
    """Return the speed-up of the tuned kernel over a library; None if either failed."""
    tuned_timing, library_timing = _find_row(result, TUNED).timing, _find_row(result, name).timing
    return library_timing.median / tuned_timing.median if tuned_timing and library_timing else None


def _list_implementations(results: Sequence[Result], name: str) -> list[str]:
    """Return the implementation that a library used for each layer, without the parts that all layers share."""
    common_parts = find_common_settings(results, name)
    return [
        ", ".join(part for part in (row.library or "").split(", ") if part not in common_parts)
        for row in (_find_row(result, name) for result in results)
    ]
