"""Tuned kernels beside libraries: who is faster where, what that makes of the network, and which configs these are."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tvmconv.experiments.results import Result, Row, in_common
from tvmconv.experiments.run import TUNED
from tvmconv.experiments.sweep import Sweep
from tvmconv.knobs import format_value
from tvmconv.reports.tables import ALL, NOTHING, Table, flagged, network_seconds, significant, unstable_notes

FAILED = "failed"


def comparison(sweep: Sweep) -> Table:
    """One line a layer: the tuned kernel, each library, and how many times as fast as that the kernel is.

    Where the network's counts are known, the last line but one has the times of all its layers; the last one has the
    geometric means over the distinct layers.
    """
    results, names = sweep.results, compared_with(sweep)
    mine = network_seconds(results, sweep.counts, TUNED)
    ours = [_row(result, TUNED) for result in results]
    columns: dict[str, list[str]] = {sweep.axis: [*sweep.labels]}
    if sweep.counts:
        columns["times"] = [str(count) for count in sweep.counts]
    columns["schedule"] = [row.schedule or NOTHING for row in ours]
    columns[f"{TUNED} [µs]"] = [_time(row) for row in ours]
    ends = [ALL] * bool(sweep.counts) + ["geometric mean"] * bool(names)
    footer: dict[str, list[str]] = {sweep.axis: ends}
    if mine is not None:
        footer[f"{TUNED} [µs]"] = [significant(mine * 1e6)]
    for name in names:
        rows = [_row(result, name) for result in results]
        ratios = [_ratio(result, name) for result in results]
        known = [ratio for ratio in ratios if ratio is not None]
        columns[f"{name} [µs]"] = [_time(row) for row in rows]
        columns[f"× {name}"] = [NOTHING if ratio is None else significant(ratio) for ratio in ratios]
        ways = _ways(results, name)
        if any(ways):
            columns[f"{name}, how"] = [way or NOTHING for way in ways]
        means = [significant(statistics.geometric_mean(known))] if known else [NOTHING]
        if sweep.counts:
            theirs = network_seconds(results, sweep.counts, name)
            footer[f"{name} [µs]"] = [NOTHING if theirs is None else significant(theirs * 1e6)]
            means = [NOTHING if mine is None or theirs is None else significant(theirs / mine), *means]
        footer[f"× {name}"] = means
    blank = [NOTHING] * len(ends)
    below = {header: [*footer.get(header, []), *blank][: len(ends)] for header in columns}
    lines = zip(*([*cells, *below[header]] for header, cells in columns.items()), strict=True)
    left = {sweep.axis, "schedule", *(f"{name}, how" for name in names)}
    return Table([*columns], [*lines], left=frozenset(left))


def remarks(sweep: Sweep) -> list[str]:
    """Sentences beside the comparison: where a library is faster, and what failed."""
    said = []
    for name in compared_with(sweep):
        ratios = zip(sweep.labels, (_ratio(result, name) for result in sweep.results), strict=True)
        slower = [f"{label} ({ratio:.3f} ×)" for label, ratio in ratios if ratio is not None and ratio < 1]
        said.append(f"Slower than {name}: {', '.join(slower) or 'none'}.")
    for label, result in zip(sweep.labels, sweep.results, strict=True):
        said += [f"{label}: {row.name} failed: {row.failure}" for row in result.rows if row.failure]
        said += [f"{label}: {note}" for note in unstable_notes(result)]
    return said


def configs(sweep: Sweep) -> Table:
    """One line a layer: the workload, the schedule that won, and its config."""
    lines = []
    for label, result in zip(sweep.labels, sweep.results, strict=True):
        row = _row(result, TUNED)
        config = " ".join(f"{name}={format_value(value)}" for name, value in row.config.items())
        cells = f"`{result.workload.text}`", row.schedule or NOTHING, f"`{config}`" if config else NOTHING
        lines.append((label, *cells))
    headers = (sweep.axis, "workload", "schedule", "config")
    return Table(headers, lines, left=frozenset(headers))


def is_comparison(sweep: Sweep) -> bool:
    """Whether it is of a network's tuned layers."""
    return bool(sweep.counts) and any(row.name == TUNED for result in sweep.results for row in result.rows)


def has_ladder(sweep: Sweep) -> bool:
    """Whether there are schedules beside what was tuned."""
    return any(row.name == TUNED for result in sweep.results for row in result.rows[1:])


def compared_with(sweep: Sweep) -> list[str]:
    """The names of the rows behind the tuned one."""
    return list(dict.fromkeys(name for result in sweep.results for name in _behind([row.name for row in result.rows])))


def _behind(names: Sequence[str]) -> Iterator[str]:
    place = names.index(TUNED) if TUNED in names else len(names)
    yield from names[place + 1 :]


def _row(result: Result, name: str) -> Row:
    return next((row for row in result.rows if row.name == name), Row(name))


def _time(row: Row) -> str:
    return flagged(significant(row.timing.median * 1e6), row) if row.timing else FAILED


def _ratio(result: Result, name: str) -> float | None:
    """How many times as fast as the library the tuned kernel is."""
    ours, theirs = _row(result, TUNED).timing, _row(result, name).timing
    return theirs.median / ours.median if ours and theirs else None


def _ways(results: Sequence[Result], name: str) -> list[str]:
    """What a library ran for each, as far as that is not the same for all."""
    same = in_common(results, name)
    return [
        ", ".join(what for what in (row.library or "").split(", ") if what not in same)
        for row in (_row(result, name) for result in results)
    ]
