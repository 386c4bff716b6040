"""The comparison of tuned kernels with libraries: times, speed-ups, network totals, and the kernels' configs."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.baselines.torch_calls import CONVERSION_NOTE
from tvmconv.experiments.results import TUNED, Result, ResultRow, find_common_settings
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.tables import (
    EMPTY_CELL,
    NETWORK_ROW,
    Table,
    format_mean,
    format_micros,
    format_optional,
    list_unstable_notes,
    make_table,
    mark_unstable,
    sum_seconds,
)
from tvmconv.space import format_value

FAILED = "failed"
SHARE = ", of the limit"  # end of the headers of `Result.compute_limit_share`


def make_comparison_table(sweep: Sweep) -> Table:
    """Return a table with one row per layer: the tuned kernel, each library, and the kernel's speed-up over it. If the
    peak rates of the device are known, the shares of the limit that `Result.compute_limit_share` describes follow, and
    the clock and the energy of a launch where they were measured. If the network's counts are known, the row before the
    last has the times of all its layers. The last row has the geometric means over the distinct layers.
    """
    results, names = sweep.results, list_compared_names(sweep)
    columns: dict[str, list[str]] = {sweep.axis: [*sweep.labels]}
    if sweep.counts:
        columns["times"] = [str(count) for count in sweep.counts]
    columns["schedule"] = [result.find_row(TUNED).schedule or EMPTY_CELL for result in results]
    columns[f"{TUNED} [µs]"] = [_format_time(result.find_row(TUNED)) for result in results]
    tuned_shares = [result.compute_limit_share(TUNED) for result in results]
    has_shares = any(tuned_shares)
    if has_shares:
        columns[f"{TUNED}{SHARE}"] = [*map(format_optional, tuned_shares)]
        columns |= _make_sensor_columns(results, TUNED)
    network_row, mean_row = {sweep.axis: NETWORK_ROW}, {sweep.axis: "geometric mean"}
    tuned_seconds = sum_network_seconds(sweep, TUNED)
    network_row[f"{TUNED} [µs]"] = format_micros(tuned_seconds)
    if has_shares:
        mean_row[f"{TUNED}{SHARE}"] = format_mean(tuned_shares)
    headers = {name: make_time_header(results, name) for name in names}
    for name in names:
        speedups = [result.compute_speedup(TUNED, name) for result in results]
        columns[headers[name]] = [_format_time(result.find_row(name)) for result in results]
        columns[f"× {name}"] = [*map(format_optional, speedups)]
        if has_shares:
            shares = [result.compute_limit_share(name) for result in results]
            columns[f"{name}{SHARE}"] = [*map(format_optional, shares)]
            mean_row[f"{name}{SHARE}"] = format_mean(shares)
            columns |= _make_sensor_columns(results, name)
        implementations = _list_implementations(results, name)
        if any(implementations):
            columns[f"{name}, how"] = [implementation or EMPTY_CELL for implementation in implementations]
        library_seconds = sum_network_seconds(sweep, name)
        network_row[headers[name]] = format_micros(library_seconds)
        if tuned_seconds and library_seconds:
            network_row[f"× {name}"] = format_optional(library_seconds / tuned_seconds)
        mean_row[f"× {name}"] = format_mean(speedups)
    lines = [*zip(*columns.values(), strict=True)]
    footer = [network_row] * bool(sweep.counts) + [mean_row] * bool(names)
    lines += [tuple(row.get(header, EMPTY_CELL) for header in columns) for row in footer]
    return Table([*columns], lines, {sweep.axis, "schedule", *(f"{name}, how" for name in names)})


def _make_sensor_columns(results: Sequence[Result], name: str) -> dict[str, list[str]]:
    """Return the clock of a row and the energy of its launch; no columns if nothing was measured."""
    runs = [result.find_row(name).sustained for result in results]
    if not any(runs):
        return {}
    return {
        f"{name} [MHz]": [f"{run.clock_hz / 1e6:,.0f}" if run else EMPTY_CELL for run in runs],
        f"{name} [mJ]": [format_optional(run.joules * 1e3 if run and run.joules else None) for run in runs],
    }


def make_time_header(results: Sequence[Result], name: str) -> str:
    """Return the header of a library's times, which says if they contain conversions of the layout."""
    has_conversions = CONVERSION_NOTE in find_common_settings(results, name)
    return f"{name}, {CONVERSION_NOTE} [µs]" if has_conversions else f"{name} [µs]"


def sum_network_seconds(sweep: Sweep, name: str) -> float | None:
    """Return the seconds of all layers of a network by one row; None if a layer has no time, or counts are unknown."""
    return sum_seconds([result.seconds.get(name) for result in sweep.results], sweep.counts)


def list_remarks(sweep: Sweep) -> list[str]:
    """Return sentences about the comparison: where a library is faster, and what failed."""
    sentences = []
    for name in list_compared_names(sweep):
        speedups = [(label, result.compute_speedup(TUNED, name)) for label, result in sweep.labeled_results]
        slower = [f"{label} ({speedup:.3f} ×)" for label, speedup in speedups if speedup and speedup < 1]
        sentences.append(f"Slower than {name}: {', '.join(slower) or 'none'}.")
    for label, result in sweep.labeled_results:
        sentences += [f"{label}: {row.name} failed: {row.failure}" for row in result.rows if row.failure]
        sentences += [f"{label}: {note}" for note in list_unstable_notes(result)]
    return sentences


def make_configs_table(sweep: Sweep) -> Table:
    """Return a table with one row per layer: the workload, the fastest schedule, and its config."""
    columns = {
        sweep.axis: lambda item: item[0],
        "workload": lambda item: f"`{item[1].workload.text}`",
        "schedule": lambda item: item[1].find_row(TUNED).schedule,
        "config": lambda item: _format_config(item[1].find_row(TUNED)),
    }
    return make_table(sweep.labeled_results, columns, columns)


def _format_config(row: ResultRow) -> str | None:
    config = " ".join(f"{name}={format_value(value)}" for name, value in row.config.items())
    return f"`{config}`" if config else None


def is_comparison(sweep: Sweep) -> bool:
    """Return whether a sweep has the tuned layers of a network."""
    return bool(sweep.counts) and sweep.has_row(TUNED)


def has_other_schedules(sweep: Sweep) -> bool:
    """Return whether a sweep has schedules besides the tuned kernel."""
    return any(row.name == TUNED for result in sweep.results for row in result.rows[1:])


def list_compared_names(sweep: Sweep) -> list[str]:
    """Return the names of the rows after the tuned one."""
    compared_names: dict[str, None] = {}
    for result in sweep.results:
        names = [row.name for row in result.rows]
        if TUNED in names:
            compared_names |= dict.fromkeys(names[names.index(TUNED) + 1 :])
    return [*compared_names]


def _format_time(row: ResultRow) -> str:
    return mark_unstable(format_micros(row.seconds), row) if row.seconds else FAILED


def _list_implementations(results: Sequence[Result], name: str) -> list[str]:
    """Return the implementation that a library used for each layer, without the parts that all layers share."""
    common_parts = find_common_settings(results, name)
    return [
        ", ".join(part for part in (result.find_row(name).library or "").split(", ") if part not in common_parts)
        for result in results
    ]
