"""What a chart of unrelated layers shows: how many times as fast as a library each is, and the network as a whole.

Pure functions of results; `suite_chart` draws them.
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

FASTEST_SCHEDULE = "fastest schedule"  # of a layer, where nothing was tuned
BOUND_NAMES = ("copy",)  # what no kernel can beat is no rival, as long as there is another


@dataclass(frozen=True)
class LayerBar:
    """A layer: our kernel beside the libraries.

    Attributes:
        label: the layer's name.
        count: how often the network has it; None where that is not known.
        kernel_seconds: seconds of our kernel; None if it failed.
        library_seconds: seconds of each library; None where it failed.
        time_fraction: of the network's time with our kernels, 0 to 1; None where that is not known.
    """

    label: str
    count: int | None
    kernel_seconds: float | None
    library_seconds: tuple[float | None, ...]
    time_fraction: float | None = None

    @property
    def speedups(self) -> tuple[float | None, ...]:
        """How many times as fast as each library our kernel is; None where one of the two failed."""
        return tuple(
            library_time / self.kernel_seconds if self.kernel_seconds and library_time else None
            for library_time in self.library_seconds
        )


@dataclass(frozen=True)
class LibraryTotal:
    """All layers beside one library.

    Attributes:
        name: of the library.
        kernel_seconds: seconds of the network with our kernels; None if a layer failed, or nobody knows how often each
            is there.
        library_seconds: the same with the library's.
        mean_speedup: geometric mean of the speed-ups; None if there is none.
        num_layers: how many layers have a speed-up.
        num_slower: how many of these are slower than the library's.
    """

    name: str
    kernel_seconds: float | None
    library_seconds: float | None
    mean_speedup: float | None
    num_layers: int
    num_slower: int

    @property
    def speedup(self) -> float | None:
        """How many times as fast as with the library's kernels the network is with ours."""
        return self.library_seconds / self.kernel_seconds if self.kernel_seconds and self.library_seconds else None


@dataclass(frozen=True)
class SuiteInfo:
    """What a chart of a suite shows.

    Attributes:
        title: on top of the chart.
        kernel_name: the name of what is compared.
        bars: one a layer, the worst first: those that failed, then by the speed-up over the first library.
        totals: one a library, in the order of the bars' times.
    """

    title: str
    kernel_name: str
    bars: tuple[LayerBar, ...]
    totals: tuple[LibraryTotal, ...]

    @property
    def library_name(self) -> str:
        """The library that the bars are about."""
        return self.totals[0].name


def compute_suite_info(title: str, sweep: Sweep) -> SuiteInfo | None:
    """The layers of a suite beside libraries, or beside the naive schedule if there is no library.

    Args:
        title: on top of the chart.
        sweep: tuned kernels and libraries; or schedules, of which each layer's fastest counts.

    Returns:
        None if there is nothing to compare with.
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
    """The title, and a line a library of what comes of all layers."""
    return "\n".join([info.title, *(format_total(info, total) for total in info.totals)])


def format_total(info: SuiteInfo, total: LibraryTotal) -> str:
    """What comes of all layers beside one library, in one line."""
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
    """The libraries, those first that may be beaten; without one the naive schedule."""
    library_names = library_comparison.list_compared_names(sweep) if is_tuned else list_libraries(sweep.results)
    first_name = sweep.results[0].rows[0].name
    return sorted(library_names, key=lambda name: name in BOUND_NAMES) or [first_name] * (first_name != TUNED)


def _get_layer_times(
    result: Result, names: Sequence[str], *, is_tuned: bool
) -> tuple[float | None, tuple[float | None, ...]]:
    """Seconds of our kernel, and of each of what it is compared with."""
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
    """What bars are sorted by: no time of ours first, no time of the library's last."""
    return bar.kernel_seconds is not None, bar.speedups[0] or math.inf
