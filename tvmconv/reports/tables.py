"""Tables of texts and of results for a terminal and for Markdown, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tvmconv.errors import Error, escape_unprintable
from tvmconv.experiments.results import Result, ResultRow

EMPTY_CELL = "—"
NETWORK_ROW = "all, times their number"  # label of the row with the network's time

T = TypeVar("T")
Columns = Mapping[str, Callable[[Any], str | None]]  # functions from an item to its cell, by header


@dataclass(frozen=True)
class Table:
    """A table of texts; columns are right-aligned, which suits numbers, except those in `left_aligned`."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_aligned: Collection[str] = ()

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


def make_table(items: Iterable[Any], columns: Columns, left_aligned: Collection[str] = ()) -> Table:
    """Return a table with one row per item; a column's function returns None for a dash."""
    rows = [[column(item) for column in columns.values()] for item in items]
    cells = [tuple(EMPTY_CELL if cell is None else cell for cell in row) for row in rows]
    return Table([*columns], cells, left_aligned)


def format_significant(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits; integer digits are never rounded: 0.123, 1.50, 17,858."""
    decimals = max(0, digits - 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{decimals}f}"


def format_optional(value: float | None, scale: float = 1) -> str:
    """Return a number times a scale with three significant digits; a dash for None."""
    return EMPTY_CELL if value is None else format_significant(value * scale)


def format_micros(seconds: float | None) -> str:
    """Return microseconds with three significant digits; a dash for None."""
    return format_optional(seconds, 1e6)


def sum_seconds(seconds: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """Return the seconds of all layers, each times its count; None if a time or the counts are missing."""
    known_seconds = [layer_seconds for layer_seconds in seconds if layer_seconds is not None]
    if not counts or len(known_seconds) < len(seconds):
        return None
    return sum(layer_seconds * count for layer_seconds, count in zip(known_seconds, counts, strict=True))


def make_result_table(result: Result) -> Table:
    """Return a table with one row per schedule or library; columns without values, such as registers on OpenCL, are
    left out. The throughput is in GB/s if the workload is bound by memory, else in GFLOP/s.
    """
    scale, unit = _choose_time_unit(result)
    rates: Columns = {
        "GFLOP/s": lambda row: _apply(format_significant, row.gflops),
        "of peak": lambda row: _apply("{:.1%}".format, row.peak_share),
    }
    if result.is_memory_bound:
        rates = {
            "GB/s": lambda row: _apply(format_gigabytes, row.bandwidth),
            "of memory's peak": lambda row: _apply("{:.1%}".format, row.bandwidth_share),
        }
    columns: Columns = {
        "schedule": lambda row: row.name,
        f"time ± spread [{unit}]": lambda row: _format_timing(row, scale),
        **rates,
        f"× {result.rows[0].name}": lambda row: _apply(format_significant, row.speedup),
        "rel. error": lambda row: _apply("{:.1e}".format, row.error),
        "grid × block": lambda row: _apply(str, row.launch),
        "shared [B]": lambda row: _apply("{:,}".format, row.shared_bytes),
        "registers": lambda row: _apply(str, row.registers),
        "spills [B]": lambda row: _apply("{:,}".format, row.spills or None),
    }
    filled_columns = {header: cell for header, cell in columns.items() if any(map(cell, result.rows))}
    return make_table(result.rows, filled_columns, {"schedule", "grid × block"})


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
    heading = f"{result.workload.text} on {result.device}, {result.device_name}"
    return "\n".join([heading, "", make_result_table(result).format_text(), "", *list_notes(result)])


def mark_unstable(time: str, row: ResultRow) -> str:
    """Return a time, marked as unstable if the row's repetitions disagree."""
    return f"{time} unstable" if row.unstable else time


def format_gigabytes(bandwidth: float) -> str:
    """Return a bandwidth in GB/s."""
    return format_significant(bandwidth / 1e9)


def _choose_time_unit(result: Result) -> tuple[float, str]:
    """Return the units per second and their name: ms if even the fastest row takes one, else µs."""
    return (1e3, "ms") if min(result.seconds.values(), default=0) >= 1e-3 else (1e6, "µs")


def _format_timing(row: ResultRow, scale: float) -> str | None:
    if row.timing is None:
        return None
    return mark_unstable(f"{format_significant(row.timing.median * scale)} ± {row.timing.spread:.1%}", row)


def _apply(format_value: Callable[[T], str], value: T | None) -> str | None:
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
