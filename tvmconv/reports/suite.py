"""The contents of a chart of a network's layers: the speed-up of each over a library, and the network's total.

These are pure functions of results; `suite_chart` draws them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tvmconv.experiments.results import Result, ResultRow, list_libraries
from tvmconv.experiments.run import TUNED
from tvmconv.experiments.sweep import Sweep, fill_counts
from tvmconv.reports import library_comparison
from tvmconv.reports.tables import format_significant, sum_seconds

FASTEST_SCHEDULE = "fastest schedule"  # name of the compared kernels if nothing was tuned
BOUND_NAMES = ("copy",)  # lower bounds that no kernel can beat; libraries come before them


@dataclass(frozen=True)
class LayerBar:
    """A layer: tvmconv's kernel and the libraries.

    Attributes:
        label: Name of the layer.
        count: Number of such layers in the network; None if unknown.
        kernel_seconds: Seconds of tvmconv's kernel; None if it failed.
        library_seconds: Seconds of each library; None where it failed.
        time_fraction: Fraction of the network's time with tvmconv's kernels, 0 to 1; None if unknown.
    """

    label: str
    count: int | None
    kernel_seconds: float | None
    library_seconds: tuple[float | None, ...]
    time_fraction: float | None = None

    @property
    def speedups(self) -> tuple[float | None, ...]:
        """Speed-up of tvmconv's kernel over each library; None where one of the two failed."""
        return tuple(
            library_time / self.kernel_seconds if self.kernel_seconds and library_time else None
            for library_time in self.library_seconds
        )


@dataclass(frozen=True)
class LibraryTotal:
    """The total of all layers compared with one library.

    Attributes:
        name: Name of the library.
        kernel_seconds: Seconds of the network with tvmconv's kernels; None if a layer failed or a count is unknown.
        library_seconds: Seconds of the network with the library's kernels; None likewise.
        mean_speedup: Geometric mean of the speed-ups; None if there are none.
        num_layers: Number of layers with a speed-up.
        num_slower: Number of layers that are slower than the library's.
    """

    name: str
    kernel_seconds: float | None
    library_seconds: float | None
    mean_speedup: float | None
    num_layers: int
    num_slower: int

    @property
    def speedup(self) -> float | None:
        """Speed-up of the network with tvmconv's kernels over the library."""
        return self.library_seconds / self.kernel_seconds if self.kernel_seconds and self.library_seconds else None


@dataclass(frozen=True)
class SuiteInfo:
    """The contents of a chart of a suite.

    Attributes:
        title: Title of the chart.
        kernel_name: Name of the compared kernels.
        bars: One bar per layer, the worst first: failed ones, then by speed-up over the first library.
        totals: One total per library, in the order of the bars' times.
    """

    title: str
    kernel_name: str
    bars: tuple[LayerBar, ...]
    totals: tuple[LibraryTotal, ...]

    @property
    def library_name(self) -> str:
        """Name of the library that the bars show."""
        return self.totals[0].name


def compute_suite_info(title: str, sweep: Sweep) -> SuiteInfo | None:
    """Return the layers of a suite compared with libraries, or with the naive schedule if there is no library.

    Args:
        title: Title of the chart.
        sweep: Tuned kernels and libraries, or schedules, of which the fastest per layer counts.

    Returns:
        The contents of the chart; None if there is nothing to compare with.
    """
    sweep = fill_counts(sweep)
    is_tuned = any(row.name == TUNED for result in sweep.results for row in result.rows)
    names = _select_libraries(sweep, is_tuned=is_tuned)
    if not names:
        return None
    counts: Sequence[int | None] = sweep.counts or [None] * len(sweep.labels)
    times = [_get_layer_times(result, names, is_tuned=is_tuned) for result in sweep.results]
    network_time = sum_seconds([kernel_seconds for kernel_seconds, _ in times], sweep.counts)
    bars = [
        LayerBar(
            label,
            count,
            kernel_seconds,
            library_seconds,
            kernel_seconds * count / network_time if kernel_seconds and count and network_time else None,
        )
        for label, count, (kernel_seconds, library_seconds) in zip(sweep.labels, counts, times, strict=True)
    ]
    totals = tuple(_compute_total(name, library_index, bars, sweep.counts) for library_index, name in enumerate(names))
    return SuiteInfo(title, TUNED if is_tuned else FASTEST_SCHEDULE, tuple(sorted(bars, key=_sort_key)), totals)


def format_heading(info: SuiteInfo) -> str:
    """Return the title, and one line per library with the totals."""
    return "\n".join([info.title, *(format_total(info, total) for total in info.totals)])


def format_total(info: SuiteInfo, total: LibraryTotal) -> str:
    """Return the totals of one library in one line."""
    texts = []
    if total.kernel_seconds and total.library_seconds and total.speedup:
        times_text = (
            f"{info.kernel_name} {format_significant(total.kernel_seconds * 1e6)} µs, "
            f"{total.name} {format_significant(total.library_seconds * 1e6)} µs"
        )
        texts.append(f"all layers: {times_text}: {format_significant(total.speedup)} × as fast")
    if total.mean_speedup:
        library_text = "" if texts else f" over {total.name}"
        texts.append(f"geometric mean{library_text} {format_significant(total.mean_speedup)} ×")
    texts.append(f"{total.num_slower} of {total.num_layers} slower")
    if failed := len(info.bars) - total.num_layers:
        texts.append(f"{failed} {library_comparison.FAILED}")
    return "; ".join(texts)


def _select_libraries(sweep: Sweep, *, is_tuned: bool) -> list[str]:
    """Return the libraries, lower bounds last; without a library the naive schedule."""
    library_names = library_comparison.list_compared_names(sweep) if is_tuned else list_libraries(sweep.results)
    first_name = sweep.results[0].rows[0].name
    return sorted(library_names, key=lambda name: name in BOUND_NAMES) or [first_name] * (first_name != TUNED)


def _get_layer_times(
    result: Result, names: Sequence[str], *, is_tuned: bool
) -> tuple[float | None, tuple[float | None, ...]]:
    """Return the seconds of tvmconv's kernel and of each library."""
    kernel_rows = [
        row for row in result.rows if (row.name == TUNED if is_tuned else row.name not in names or not row.library)
    ]
    kernel_seconds = min((seconds for row in kernel_rows if (seconds := _get_seconds(row))), default=None)
    rows_by_name = {row.name: row for row in result.rows}
    return kernel_seconds, tuple(_get_seconds(rows_by_name.get(name, ResultRow(name))) for name in names)


def _get_seconds(row: ResultRow) -> float | None:
    return row.timing.median if row.timing else None


def _compute_total(name: str, library_index: int, bars: Sequence[LayerBar], counts: Sequence[int]) -> LibraryTotal:
    known_speedups = [speedup for bar in bars if (speedup := bar.speedups[library_index])]
    return LibraryTotal(
        name,
        sum_seconds([bar.kernel_seconds for bar in bars], counts),
        sum_seconds([bar.library_seconds[library_index] for bar in bars], counts),
        statistics.geometric_mean(known_speedups) if known_speedups else None,
        len(known_speedups),
        sum(speedup < 1 for speedup in known_speedups),
    )


def _sort_key(bar: LayerBar) -> tuple[bool, float]:
    """Return the sort key of a bar: failed kernels first, failed libraries last."""
    return bar.kernel_seconds is not None, bar.speedups[0] or math.inf
