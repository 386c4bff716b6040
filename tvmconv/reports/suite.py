"""What a chart of unrelated layers shows: how many times as fast as a library each is, and the network as a whole.

Pure functions of results; `suite_chart` draws them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tvmconv.experiments.results import Result, Row, libraries
from tvmconv.experiments.run import TUNED
from tvmconv.experiments.sweep import Sweep, counted
from tvmconv.reports import tuned
from tvmconv.reports.tables import significant, total_seconds

FASTEST = "fastest schedule"  # of a layer, where nothing was tuned
BOUNDS = ("copy",)  # what no kernel can beat is no rival, as long as there is another


@dataclass(frozen=True)
class Bar:
    """A layer: our kernel beside the libraries.

    Attributes:
        label: the layer's name.
        count: how often the network has it; None where that is not known.
        ours: seconds of our kernel; None if it failed.
        theirs: seconds of each library; None where it failed.
        share: of the network's time with our kernels, 0 to 1; None where that is not known.
    """

    label: str
    count: int | None
    ours: float | None
    theirs: tuple[float | None, ...]
    share: float | None = None

    @property
    def speedups(self) -> tuple[float | None, ...]:
        """How many times as fast as each library our kernel is; None where one of the two failed."""
        return tuple(theirs / self.ours if self.ours and theirs else None for theirs in self.theirs)


@dataclass(frozen=True)
class Total:
    """All layers beside one library.

    Attributes:
        name: of the library.
        ours: seconds of the network with our kernels; None if a layer failed, or nobody knows how often each is there.
        theirs: the same with the library's.
        mean: geometric mean of the speed-ups; None if there is none.
        layers: how many layers have a speed-up.
        slower: how many of these are slower than the library's.
    """

    name: str
    ours: float | None
    theirs: float | None
    mean: float | None
    layers: int
    slower: int

    @property
    def speedup(self) -> float | None:
        """How many times as fast as with the library's kernels the network is with ours."""
        return self.theirs / self.ours if self.ours and self.theirs else None


@dataclass(frozen=True)
class SuiteInfo:
    """What a chart of a suite shows.

    Attributes:
        title: on top of the chart.
        ours: the name of what is compared.
        bars: one a layer, the worst first: those that failed, then by the speed-up over the first library.
        totals: one a library, in the order of the bars' times.
    """

    title: str
    ours: str
    bars: tuple[Bar, ...]
    totals: tuple[Total, ...]

    @property
    def beside(self) -> str:
        """The library that the bars are about."""
        return self.totals[0].name


def suite_info(title: str, sweep: Sweep) -> SuiteInfo | None:
    """The layers of a suite beside libraries, or beside the naive schedule if there is no library.

    Args:
        title: on top of the chart.
        sweep: tuned kernels and libraries; or schedules, of which each layer's fastest counts.

    Returns:
        None if there is nothing to compare with.
    """
    sweep = counted(sweep)
    is_tuned = any(row.name == TUNED for result in sweep.results for row in result.rows)
    names = _rivals(sweep, is_tuned=is_tuned)
    if not names:
        return None
    counts: Sequence[int | None] = sweep.counts or [None] * len(sweep.labels)
    times = [_times(result, names, is_tuned=is_tuned) for result in sweep.results]
    network = total_seconds([ours for ours, _ in times], sweep.counts)
    bars = [
        Bar(label, count, ours, theirs, ours * count / network if ours and count and network else None)
        for label, count, (ours, theirs) in zip(sweep.labels, counts, times, strict=True)
    ]
    totals = tuple(_total(name, place, bars, sweep.counts) for place, name in enumerate(names))
    return SuiteInfo(title, TUNED if is_tuned else FASTEST, tuple(sorted(bars, key=_badness)), totals)


def heading(info: SuiteInfo) -> str:
    """The title, and a line a library of what comes of all layers."""
    return "\n".join([info.title, *(total_text(info, total) for total in info.totals)])


def total_text(info: SuiteInfo, total: Total) -> str:
    """What comes of all layers beside one library, in one line."""
    parts = []
    if total.ours and total.theirs and total.speedup:
        times = f"{info.ours} {significant(total.ours * 1e6)} µs, {total.name} {significant(total.theirs * 1e6)} µs"
        parts.append(f"all layers: {times}: {significant(total.speedup)} × as fast")
    if total.mean:
        over = "" if parts else f" over {total.name}"
        parts.append(f"geometric mean{over} {significant(total.mean)} ×")
    parts.append(f"{total.slower} of {total.layers} slower")
    if failed := len(info.bars) - total.layers:
        parts.append(f"{failed} {tuned.FAILED}")
    return "; ".join(parts)


def _rivals(sweep: Sweep, *, is_tuned: bool) -> list[str]:
    """The libraries, those first that may be beaten; without one the naive schedule."""
    found = tuned.compared_with(sweep) if is_tuned else libraries(sweep.results)
    first = sweep.results[0].rows[0].name
    return sorted(found, key=lambda name: name in BOUNDS) or [first] * (first != TUNED)


def _times(result: Result, names: Sequence[str], *, is_tuned: bool) -> tuple[float | None, tuple[float | None, ...]]:
    """Seconds of our kernel, and of each of what it is compared with."""
    own = [row for row in result.rows if (row.name == TUNED if is_tuned else row.name not in names or not row.library)]
    ours = min((seconds for row in own if (seconds := _seconds(row))), default=None)
    rows = {row.name: row for row in result.rows}
    return ours, tuple(_seconds(rows.get(name, Row(name))) for name in names)


def _seconds(row: Row) -> float | None:
    return row.timing.median if row.timing else None


def _total(name: str, place: int, bars: Sequence[Bar], counts: Sequence[int]) -> Total:
    known = [speedup for bar in bars if (speedup := bar.speedups[place])]
    return Total(
        name,
        total_seconds([bar.ours for bar in bars], counts),
        total_seconds([bar.theirs[place] for bar in bars], counts),
        statistics.geometric_mean(known) if known else None,
        len(known),
        sum(speedup < 1 for speedup in known),
    )


def _badness(bar: Bar) -> tuple[bool, float]:
    """What bars are sorted by: no time of ours first, no time of the library's last."""
    return bar.ours is not None, bar.speedups[0] or math.inf
