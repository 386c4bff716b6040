"""Results as tables, for a terminal and for Markdown. Pure functions of results: no device is touched here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tvmconv.devices import Timing
from tvmconv.errors import Error, printable
from tvmconv.experiments.results import Result, Row

NOTHING = "—"
ALL = "all, times their number"  # what a network takes

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        headers: one a column.
        rows: as many cells each as there are headers.
        left: headers of the columns that are aligned to the left; numbers read best to the right.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: frozenset[str] = frozenset()

    def text(self) -> str:
        """The table in aligned columns."""
        lines = [self._printable(line) for line in (self.headers, *self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.headers))]
        return "\n".join("  ".join(map(self._pad, self.headers, line, widths)).rstrip() for line in lines)

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        rule = [":--" if header in self.left else "--:" for header in self.headers]
        lines = (self.headers, rule, *self.rows)
        return "\n".join(f"| {' | '.join(self._printable(line))} |" for line in lines)

    @staticmethod
    def _printable(line: Sequence[str]) -> list[str]:
        """Return the cells without newlines, and with what is not printable escaped."""
        return [printable(cell).replace("\n", "\\n") for cell in line]

    def _pad(self, header: str, cell: str, width: int) -> str:
        return cell.ljust(width) if header in self.left else cell.rjust(width)


def heading(result: Result) -> str:
    """What was computed, and where."""
    return f"{result.workload.text} on {result.device}, {result.device_name}"


def result_table(result: Result) -> Table:
    """One line a row of the result; columns that would be empty, such as registers on OpenCL, are left out.

    The rate is that of what limits the workload: GB/s if it is bound by memory, else GFLOP/s.
    """
    scale, unit = _time_unit(result)
    rates: dict[str, Callable[[Row], str | None]] = {
        "GFLOP/s": lambda row: _shown(row.gflops, significant),
        "of peak": lambda row: _shown(row.peak_share, "{:.1%}".format),
    }
    if result.memory_bound:
        rates = {
            "GB/s": lambda row: _shown(row.bandwidth, _gigabytes),
            "of memory's peak": lambda row: _shown(row.bandwidth_share, "{:.1%}".format),
        }
    columns: dict[str, Callable[[Row], str | None]] = {
        "schedule": lambda row: row.name,
        f"time ± spread [{unit}]": lambda row: _shown(row.timing, lambda timing: flagged(_time(timing, scale), row)),
        **rates,
        f"× {result.rows[0].name}": lambda row: _shown(row.speedup, significant),
        "rel. error": lambda row: _shown(row.error, "{:.1e}".format),
        "grid × block": lambda row: _shown(row.launch, str),
        "shared [B]": lambda row: _shown(row.shared_bytes, "{:,}".format),
        "registers": lambda row: _shown(row.registers, str),
        "spills [B]": lambda row: _shown(row.spills or None, "{:,}".format),
    }
    cells = {header: [cell(row) for row in result.rows] for header, cell in columns.items()}
    filled = {header: column for header, column in cells.items() if any(column)}
    rows = [[cell or NOTHING for cell in line] for line in zip(*filled.values(), strict=True)]
    return Table(list(filled), rows, left=frozenset({"schedule", "grid × block"}))


def notes(result: Result) -> list[str]:
    """What the table has no room for, one line each: how the times were taken, what a library ran, what failed."""
    lines = []
    timed = [(row.timing.median, row.timing.method, row.name) for row in result.rows if row.timing]
    if timed:
        _, method, name = min(timed)
        rounds = ", the median of rounds in turn" if any(row.rounds for row in result.rows) else ""
        lines.append(f"time: median ± half the interquartile range{rounds}; {name}: {method}")
    lines += [f"{row.name}: {row.library}" for row in result.rows if row.library]
    lines += unstable_notes(result)
    sampled = max((row.sampled for row in result.rows if row.sampled), default=None)
    if sampled:
        outputs = math.prod(result.workload.argument_shapes[-1])
        lines.append(f"verified: a random sample of {sampled:,} of {outputs:,} outputs; --verify full compares all")
    lines += [f"{row.name} failed: {row.failure}" for row in result.rows if row.failure]
    return lines


def flagged(time: str, row: Row) -> str:
    """A time, with a word behind it where the row's rounds did not agree."""
    return f"{time} unstable" if row.unstable else time


def unstable_notes(result: Result) -> list[str]:
    """The rounds of each row whose rounds did not agree, one line each."""
    scale, unit = _time_unit(result)
    return [
        f"{row.name}: the rounds differ by more than 10 %: "
        f"{', '.join(significant(seconds * scale) for seconds in row.rounds)} {unit}"
        for row in result.rows
        if row.unstable
    ]


def result_text(result: Result) -> str:
    """Heading, table and notes, for a terminal."""
    return "\n".join([heading(result), "", result_table(result).text(), "", *notes(result)])


def sweep_table(axis: str, labels: Sequence[str], results: Sequence[Result], counts: Sequence[int] = ()) -> Table:
    """Several workloads, one a line, with a column a schedule: µs and, in parentheses, the speed-up over the first.

    Where the network's counts are known, the last line has the times of all its layers.

    Args:
        axis: header of the labels, such as "channels".
        labels: what tells each workload from the others.
        results: one for each label.
        counts: how often the network has each workload; empty where nobody asks.
    """
    names = _names(results)
    lines = []
    for label, result in zip(labels, results, strict=True):
        rows = {row.name: row for row in result.rows}
        lines.append([label, *(_sweep_cell(rows.get(name), over=names[0]) for name in names)])
    if counts:
        lines.append([ALL, *_network_cells(results, counts, names)])
    return Table([axis, *(f"{name} [µs]" for name in names)], lines, left=frozenset({axis}))


def bandwidth_table(labels: Sequence[str], results: Sequence[Result]) -> Table:
    """Several sizes, one a column, with a line a schedule: GB/s and, in parentheses, the share of the memory's peak.

    Args:
        labels: what tells each size from the others.
        results: one for each label.
    """
    rows = [{row.name: row for row in result.rows} for result in results]
    lines = [[name, *(_bandwidth_cell(there.get(name)) for there in rows)] for name in _names(results)]
    headers = [f"{label} {'cold' if result.cold else 'hot'}" for label, result in zip(labels, results, strict=True)]
    return Table(["GB/s", *headers], lines, left=frozenset({"GB/s"}))


def _names(results: Sequence[Result]) -> list[str]:
    """The names of all rows in their order; those of results with speed-ups come first, as does what these are over."""
    ordered = sorted(results, key=lambda result: not any(row.speedup for row in result.rows))
    return list(dict.fromkeys(row.name for result in ordered for row in result.rows))


def _sweep_cell(row: Row | None, over: str) -> str:
    if row is None:
        return NOTHING
    if row.timing is None:
        return "failed"
    time = significant(row.timing.median * 1e6)
    return f"{time} ({significant(row.speedup)}×)" if row.speedup and row.name != over else time


def _network_cells(results: Sequence[Result], counts: Sequence[int], names: Sequence[str]) -> list[str]:
    """What `_sweep_cell` says of a workload, of the network; a dash without a time of every layer."""
    totals = [network_seconds(results, counts, name) for name in names]
    first = totals[0] if any(row.speedup for result in results for row in result.rows) else None
    cells = []
    for place, total in enumerate(totals):
        over = f" ({significant(first / total)}×)" if first and total and place else ""
        cells.append(significant(total * 1e6) + over if total else NOTHING)
    return cells


def network_seconds(results: Sequence[Result], counts: Sequence[int], name: str) -> float | None:
    """Seconds of all layers of a network by one schedule or library; None if there is not a time for each.

    Args:
        results: one a layer.
        counts: how often the network has each.
        name: of the rows.
    """
    timings = [{row.name: row.timing for row in result.rows}.get(name) for result in results]
    return total_seconds([timing.median if timing else None for timing in timings], counts)


def total_seconds(seconds: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """Seconds of all layers, each as often as it is there; None if a time is missing, or there are no counts."""
    known = [each for each in seconds if each is not None]
    if not counts or len(known) < len(seconds):
        return None
    return sum(each * count for each, count in zip(known, counts, strict=True))


def _bandwidth_cell(row: Row | None) -> str:
    if row is None:
        return NOTHING
    if row.bandwidth is None:
        return "failed"
    share = "" if row.bandwidth_share is None else f" ({row.bandwidth_share:.1%})"
    return _gigabytes(row.bandwidth) + share


def _gigabytes(bandwidth: float) -> str:
    return significant(bandwidth / 1e9)


def significant(value: float, digits: int = 3) -> str:
    """A positive number to so many significant digits, whole digits never rounded: 0.123, 1.50, 17,858."""
    decimals = max(0, digits - 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{decimals}f}"


def _time_unit(result: Result) -> tuple[float, str]:
    """Units a second, and their name: ms if even the fastest row takes one, else µs."""
    medians = [row.timing.median for row in result.rows if row.timing]
    return (1e3, "ms") if medians and min(medians) >= 1e-3 else (1e6, "µs")


def _time(timing: Timing, scale: float) -> str:
    return f"{significant(timing.median * scale)} ± {timing.spread:.1%}"


def _shown(value: T | None, form: Callable[[T], str]) -> str | None:
    return None if value is None else form(value)


def with_section(page: str, name: str, section: str) -> str:
    """A Markdown page with the text between its lines `<!-- NAME -->` and `<!-- /NAME -->` replaced.

    Raises:
        Error: the page does not have these two lines once each, in this order.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed or begin in after or end in after:
        raise Error(f"the page needs one line {begin.strip()} and after it one line {end.strip()}")
    return f"{before}{begin}{section.strip()}\n{end}{after}"
