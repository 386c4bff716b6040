"""Tables of texts and of results for a terminal and for Markdown, as pure functions."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tvmconv.errors import Error, escape_unprintable
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.html import make_html_table

EMPTY_CELL = "—"
NETWORK_ROW = "all, times their number"  # label of the row with the network's time

PLAIN_NUMBERS = ("gflops", "peak_share", "bandwidth", "speedup", "error", "shared_bytes", "registers", "spills")
GAP = "  "  # between two columns
MIN_WRAPPED_WIDTH = 24  # characters of a column of text that is wrapped
MIN_COLUMNS = 2  # of a fitted table

T = TypeVar("T")
Columns = Mapping[str, Callable[[Any], str | None]]  # functions from an item to its cell, by header


@dataclass(frozen=True)
class Table:
    """A table of texts; columns are right-aligned, which suits numbers, except those in `left_aligned`."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_aligned: Collection[str] = ()
    optional: Sequence[str] = ()  # columns that a narrow terminal leaves out first, in this order

    def format_text(self, width: int | None = None) -> str:
        """Return the table with aligned columns. If it is wider than `width`, text in the last column is wrapped, or
        columns are left out: first the `optional` ones, then those on the right. The last line names them.
        """
        lines = [self._printable(line) for line in (self.headers, *self.rows)]
        if width is None or _count_characters(lines) <= width:
            return self._align(self.headers, lines)
        kept = list(self.headers)
        for header in (None, *self.optional, *reversed([name for name in self.headers if name not in self.optional])):
            if header is not None and header != self.headers[0] and len(kept) > MIN_COLUMNS:
                kept.remove(header)
            columns = [self.headers.index(name) for name in kept]
            kept_lines = [[line[column] for column in columns] for line in lines]
            if _count_characters(kept_lines) <= width:
                break
            if wrapped_lines := self._wrap(kept, kept_lines, width):
                kept_lines = wrapped_lines
                break
        left_out = ", ".join(header.strip() for header in self.headers if header not in kept)
        hint = textwrap.fill(f"(left out: {left_out}; --wide prints them)", width)
        return self._align(kept, kept_lines) + (f"\n{hint}" if left_out else "")

    def _align(self, headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
        widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
        return "\n".join(GAP.join(map(self._pad, headers, line, widths)).rstrip() for line in lines)

    def _wrap(self, headers: Sequence[str], lines: Sequence[Sequence[str]], width: int) -> list[list[str]]:
        """Return the lines with the texts of the last column wrapped; empty if it has no text, or no space."""
        is_text = headers[-1] in self.left_aligned and any(" " in line[-1] for line in lines)
        text_width = width - _count_characters([[*line[:-1], ""] for line in lines])
        if not is_text or text_width < MIN_WRAPPED_WIDTH:
            return []
        wrapped: list[list[str]] = []
        for *cells, text in lines:
            first, *others = textwrap.wrap(text, text_width, break_on_hyphens=False) or [""]
            wrapped += [[*cells, first], *([*([""] * len(cells)), other] for other in others)]
        return wrapped

    def format_csv(self) -> str:
        """Return the table as CSV. Numbers have no separators of thousands, and dashes are empty."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([header.strip() for header in self.headers])
        writer.writerows([map(_unformat_cell, line) for line in self.rows])
        return stream.getvalue()

    def list_rows(self) -> list[dict[str, str]]:
        """Return the rows as JSON has them: cells by header, as in CSV."""
        headers = [header.strip() for header in self.headers]
        return [dict(zip(headers, map(_unformat_cell, row), strict=True)) for row in self.rows]

    def format_html(self) -> str:
        """Return the table in HTML, as notebooks show it."""
        return make_html_table(self.headers, self.rows, self.left_aligned)

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


TableFormatter = Callable[[Table], str]


def _count_characters(lines: Sequence[Sequence[str]]) -> int:
    """Return the width of aligned lines."""
    return sum(max(map(len, column)) for column in zip(*lines, strict=True)) + len(GAP) * (len(lines[0]) - 1)


def _unformat_cell(cell: str) -> str:
    if cell == EMPTY_CELL:
        return ""
    return cell.replace(",", "") if re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?", cell) else cell


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


def format_speedup(before: float | None, after: float | None) -> str:
    """Return how many times as fast something has become, given two times; a dash if one is missing."""
    return format_optional(before / after if before and after else None)


def format_mean(ratios: Iterable[float | None]) -> str:
    """Return the geometric mean of the known ratios; a dash if there are none."""
    known_ratios = [ratio for ratio in ratios if ratio]
    return format_optional(statistics.geometric_mean(known_ratios) if known_ratios else None)


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


def _format_number(name: str, pair: tuple[Result, ResultRow]) -> str | None:
    return _apply(repr, getattr(pair[1], name))


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


def format_result(result: Result, formatter: TableFormatter = Table.format_text) -> str:
    """Return heading, table and notes for a terminal; `formatter` returns the table as text."""
    heading = f"{result.workload.text} on {result.device}, {result.device_name}"
    return "\n".join([heading, "", formatter(make_result_table(result)), "", *list_notes(result)])


def make_plain_table(results: Iterable[Result]) -> Table:
    """Return a table of numbers in SI units for other programs, with one row per schedule or library of each result."""
    columns: Columns = {
        "workload": lambda pair: pair[0].workload.text,
        "device": lambda pair: pair[0].device_name,
        "schedule": lambda pair: pair[1].name,
        "seconds": lambda pair: _apply(repr, pair[1].seconds),
        "spread": lambda pair: repr(pair[1].timing.spread) if pair[1].timing else None,
        **{name: partial(_format_number, name) for name in PLAIN_NUMBERS},
        "launch": lambda pair: _apply(str, pair[1].launch),
        "failure": lambda pair: pair[1].failure,
    }
    return make_table([(result, row) for result in results for row in result.rows], columns)


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
