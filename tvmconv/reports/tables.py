"""Tables of results for a terminal and for Markdown, as pure functions of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tvmconv.devices import Timing
from tvmconv.errors import Error, escape_unprintable
from tvmconv.experiments.results import Result, ResultRow

EMPTY_CELL = "—"
NETWORK_ROW = "all, times their number"  # label of the row with the network's time

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        headers: One header per column.
        rows: Rows with as many cells as there are headers.
        left_aligned: Headers of the columns that are left-aligned; the others are right-aligned, which suits numbers.

    Example:
        >>> from tvmconv.reports.tables import Table
        >>> table = Table(["layer", "time [µs]"], [["conv1", "12.5"], ["conv2", "3.1"]], frozenset({"layer"}))
        >>> print(table.format_text())
        layer  time [µs]
        conv1       12.5
        conv2        3.1
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_aligned: frozenset[str] = frozenset()

    def format_text(self) -> str:
        """Return the table with aligned columns."""
        lines = [self._printable(line) for line in (self.headers, *self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.headers))]
        return "\n".join("  ".join(map(self._pad, self.headers, line, widths)).rstrip() for line in lines)

    def format_markdown(self) -> str:
        """Return the table in GitHub's Markdown."""
        rule = [":--" if header in self.left_aligned else "--:" for header in self.headers]
        lines = (self.headers, rule, *self.rows)
        return "\n".join(f"| {' | '.join(self._printable(line))} |" for line in lines)

    @staticmethod
    def _printable(line: Sequence[str]) -> list[str]:
        """Return the cells without newlines and with unprintable characters escaped."""
        return [escape_unprintable(cell).replace("\n", "\\n") for cell in line]

    def _pad(self, header: str, cell: str, width: int) -> str:
        return cell.ljust(width) if header in self.left_aligned else cell.rjust(width)


def format_heading(result: Result) -> str:
    """Return the workload and the device of a result as one line."""
    return f"{result.workload.text} on {result.device}, {result.device_name}"


def make_result_table(result: Result) -> Table:
    """Return a table with one row per schedule or library; columns without values, such as registers on OpenCL, are
    left out.

    The throughput is in GB/s if the workload is bound by memory, else in GFLOP/s.
    """
    scale, unit = _choose_time_unit(result)
    rates: dict[str, Callable[[ResultRow], str | None]] = {
        "GFLOP/s": lambda row: _format_optional(row.gflops, format_significant),
        "of peak": lambda row: _format_optional(row.peak_share, "{:.1%}".format),
    }
    if result.is_memory_bound:
        rates = {
            "GB/s": lambda row: _format_optional(row.bandwidth, _format_gigabytes),
            "of memory's peak": lambda row: _format_optional(row.bandwidth_share, "{:.1%}".format),
        }
    columns: dict[str, Callable[[ResultRow], str | None]] = {
        "schedule": lambda row: row.name,
        f"time ± spread [{unit}]": lambda row: _format_optional(
            row.timing, lambda timing: mark_unstable(_format_time(timing, scale), row)
        ),
        **rates,
        f"× {result.rows[0].name}": lambda row: _format_optional(row.speedup, format_significant),
        "rel. error": lambda row: _format_optional(row.error, "{:.1e}".format),
        "grid × block": lambda row: _format_optional(row.launch, str),
        "shared [B]": lambda row: _format_optional(row.shared_bytes, "{:,}".format),
        "registers": lambda row: _format_optional(row.registers, str),
        "spills [B]": lambda row: _format_optional(row.spills or None, "{:,}".format),
    }
    cells = {header: [cell(row) for row in result.rows] for header, cell in columns.items()}
    filled_columns = {header: column for header, column in cells.items() if any(column)}
    rows = [[cell or EMPTY_CELL for cell in line] for line in zip(*filled_columns.values(), strict=True)]
    return Table(list(filled_columns), rows, left_aligned=frozenset({"schedule", "grid × block"}))


def list_notes(result: Result) -> list[str]:
    """Return notes below the table, one line each: how times were taken, what a library ran, what failed."""
    lines = []
    timed_rows = [(row.timing.median, row.timing.method, row.name) for row in result.rows if row.timing]
    if timed_rows:
        _, method, name = min(timed_rows)
        rounds = ", the median of rounds in turn" if any(row.rounds for row in result.rows) else ""
        lines.append(f"time: median ± half the interquartile range{rounds}; {name}: {method}")
    lines += [f"{row.name}: {row.library}" for row in result.rows if row.library]
    lines += list_unstable_notes(result)
    num_sampled = max((row.sampled for row in result.rows if row.sampled), default=None)
    if num_sampled:
        outputs = math.prod(result.workload.argument_shapes[-1])
        lines.append(f"verified: a random sample of {num_sampled:,} of {outputs:,} outputs; --verify full compares all")
    lines += [f"{row.name} failed: {row.failure}" for row in result.rows if row.failure]
    return lines


def mark_unstable(time: str, row: ResultRow) -> str:
    """Return a time, marked as unstable if the row's repetitions disagree."""
    return f"{time} unstable" if row.unstable else time


def list_unstable_notes(result: Result) -> list[str]:
    """Return one line for each row whose repetitions disagree, with their times."""
    scale, unit = _choose_time_unit(result)
    return [
        f"{row.name}: the rounds differ by more than 10 %: "
        f"{', '.join(format_significant(seconds * scale) for seconds in row.rounds)} {unit}"
        for row in result.rows
        if row.unstable
    ]


def format_result(result: Result) -> str:
    """Return heading, table and notes for a terminal."""
    return "\n".join([format_heading(result), "", make_result_table(result).format_text(), "", *list_notes(result)])


def make_sweep_table(axis: str, labels: Sequence[str], results: Sequence[Result], counts: Sequence[int] = ()) -> Table:
    """Return a table with one row per workload and one column per schedule: µs and the speed-up over the first.

    If the network's counts are known, the last row has the times of all its layers.

    Args:
        axis: Header of the labels, such as "channels".
        labels: One label per workload.
        results: One result per label.
        counts: Number of layers of the network by label; empty if unknown.
    """
    names = _list_row_names(results)
    lines = []
    for label, result in zip(labels, results, strict=True):
        rows = {row.name: row for row in result.rows}
        lines.append([label, *(_format_sweep_cell(rows.get(name), reference_name=names[0]) for name in names)])
    if counts:
        lines.append([NETWORK_ROW, *_format_network_cells(results, counts, names)])
    return Table([axis, *(f"{name} [µs]" for name in names)], lines, left_aligned=frozenset({axis}))


def make_bandwidth_table(labels: Sequence[str], results: Sequence[Result]) -> Table:
    """Return a table with one column per size and one row per schedule: GB/s and the fraction of the memory's peak.

    Args:
        labels: One label per size.
        results: One result per label.
    """
    rows_by_result = [{row.name: row for row in result.rows} for result in results]
    lines = [
        [name, *(_format_bandwidth_cell(rows_by_name.get(name)) for rows_by_name in rows_by_result)]
        for name in _list_row_names(results)
    ]
    headers = [f"{label} {'cold' if result.is_cold else 'hot'}" for label, result in zip(labels, results, strict=True)]
    return Table(["GB/s", *headers], lines, left_aligned=frozenset({"GB/s"}))


def _list_row_names(results: Sequence[Result]) -> list[str]:
    """Return the names of all rows in order; results with speed-ups come first, so that their reference leads."""
    sorted_results = sorted(results, key=lambda result: not any(row.speedup for row in result.rows))
    return list(dict.fromkeys(row.name for result in sorted_results for row in result.rows))


def _format_sweep_cell(row: ResultRow | None, reference_name: str) -> str:
    if row is None:
        return EMPTY_CELL
    if row.timing is None:
        return "failed"
    time = format_significant(row.timing.median * 1e6)
    return f"{time} ({format_significant(row.speedup)}×)" if row.speedup and row.name != reference_name else time


def _format_network_cells(results: Sequence[Result], counts: Sequence[int], names: Sequence[str]) -> list[str]:
    """Return the cells of the network's row, with a dash where a layer has no time."""
    totals = [sum_network_seconds(results, counts, name) for name in names]
    first_total = totals[0] if any(row.speedup for result in results for row in result.rows) else None
    cells = []
    for index, total in enumerate(totals):
        speedup_text = f" ({format_significant(first_total / total)}×)" if first_total and total and index else ""
        cells.append(format_significant(total * 1e6) + speedup_text if total else EMPTY_CELL)
    return cells


def sum_network_seconds(results: Sequence[Result], counts: Sequence[int], name: str) -> float | None:
    """Return the seconds of all layers of a network by one schedule or library; None if a layer has no time.

    Args:
        results: One result per layer.
        counts: Number of layers by result.
        name: Name of the rows.
    """
    timings = [{row.name: row.timing for row in result.rows}.get(name) for result in results]
    return sum_seconds([timing.median if timing else None for timing in timings], counts)


def sum_seconds(seconds: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """Return the seconds of all layers, each times its count; None if a time or the counts are missing."""
    known_seconds = [layer_seconds for layer_seconds in seconds if layer_seconds is not None]
    if not counts or len(known_seconds) < len(seconds):
        return None
    return sum(layer_seconds * count for layer_seconds, count in zip(known_seconds, counts, strict=True))


def _format_bandwidth_cell(row: ResultRow | None) -> str:
    if row is None:
        return EMPTY_CELL
    if row.bandwidth is None:
        return "failed"
    fraction_text = "" if row.bandwidth_share is None else f" ({row.bandwidth_share:.1%})"
    return _format_gigabytes(row.bandwidth) + fraction_text


def _format_gigabytes(bandwidth: float) -> str:
    return format_significant(bandwidth / 1e9)


def format_significant(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits; integer digits are never rounded: 0.123, 1.50, 17,858."""
    decimals = max(0, digits - 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{decimals}f}"


def _choose_time_unit(result: Result) -> tuple[float, str]:
    """Return the units per second and their name: ms if even the fastest row takes one, else µs."""
    medians = [row.timing.median for row in result.rows if row.timing]
    return (1e3, "ms") if medians and min(medians) >= 1e-3 else (1e6, "µs")


def _format_time(timing: Timing, scale: float) -> str:
    return f"{format_significant(timing.median * scale)} ± {timing.spread:.1%}"


def _format_optional(value: T | None, format_value: Callable[[T], str]) -> str | None:
    return None if value is None else format_value(value)


def replace_section(page: str, name: str, section: str) -> str:
    """Return a Markdown page with the text between its lines `<!-- NAME -->` and `<!-- /NAME -->` replaced.

    Raises:
        Error: The page does not have these two lines once each, in this order.
    """
    start_marker, end_marker = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    text_before, start_match, text_after_start = page.partition(start_marker)
    _, end_match, text_after = text_after_start.partition(end_marker)
    if not start_match or not end_match or start_marker in text_after or end_marker in text_after:
        raise Error(f"the page needs one line {start_marker.strip()} and after it one line {end_marker.strip()}")
    return f"{text_before}{start_marker}{section.strip()}\n{end_marker}{text_after}"
