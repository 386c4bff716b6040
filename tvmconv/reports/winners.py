"""Which kind of schedule wins on which layers: tables and a chart over channels, images and batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tvmconv.experiments.results import Row
from tvmconv.experiments.run import TUNED
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.record import Record
from tvmconv.reports.charts import new_figure, save
from tvmconv.reports.tables import NOTHING, Table, significant
from tvmconv.workloads import Conv2d, Workload

OTHERS = "others"  # the kind of all schedules that are named in none
WIDTH, HEIGHT, SMALL = 5.0, 5.6, 7  # inches of a panel, points
STYLES = ("s", "#2f6fab"), ("D", "#6a9f58"), ("o", "#e07b39"), ("^", "#8c5fa8"), ("v", "#7f7f7f")
COLORS = 128
BATCHES = (1, 8, math.inf)  # the most of each panel


@dataclass(frozen=True)
class Contest:
    """A layer.

    Attributes:
        label: of the layer, ending with its batch.
        workload: the layer.
        ours: the fastest kernel, as it was compared with the library.
        theirs: the library's.
        seconds: of the fastest kernel of each kind in any log.
    """

    label: str
    workload: Conv2d
    ours: Row
    theirs: Row
    seconds: Mapping[str, float]

    @property
    def winner(self) -> str:
        """The fastest kind."""
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def lead(self) -> float | None:
        """How many times as long the next kind takes; None where there is no other."""
        first, *rest = sorted(self.seconds.values())
        return rest[0] / first if rest else None

    @property
    def speedup(self) -> float:
        """Over the library."""
        return _seconds(self.theirs) / _seconds(self.ours)


def contests(
    sweeps: Iterable[Sweep], records: Iterable[Record], kinds: Collection[str], library: str = "cudnn"
) -> list[Contest]:
    """The layers of comparisons that have both a tuned kernel and the library's.

    Args:
        sweeps: the comparisons.
        records: what was measured of these layers.
        kinds: schedules that are kinds of their own; all others are one.
        library: its name in the comparisons.
    """
    found = []
    for label, result in ((label, result) for s in sweeps for label, result in zip(s.labels, s.results, strict=True)):
        rows = {row.name: row for row in result.rows if row.timing}
        if isinstance(result.workload, Conv2d) and {TUNED, library} <= rows.keys():
            found.append((label, result.workload, rows[TUNED], rows[library]))
    seconds: dict[Workload, dict[str, float]] = {}
    for label, workload, ours, _ in found:
        seconds[workload] = {_kind(ours.schedule or label, kinds): _seconds(ours)}
    for record in records:
        if record.ok and (known := seconds.get(record.workload)) is not None:
            kind = _kind(record.schedule, kinds)
            known[kind] = min(record.cost, known.get(kind, math.inf))
    return [Contest(label, w, ours, theirs, seconds[w]) for label, w, ours, theirs in found]


def layers_table(found: Sequence[Contest], kinds: Sequence[str]) -> Table:
    """A line a layer: what won, its time and error beside the library's, and the best time of each kind."""
    headers = ("layer", "workload", "schedule", "ours [µs]", "library [µs]", "×", "TFLOP/s", "error", "library's error")
    shown = [*kinds, OTHERS]
    rows = [
        (
            each.label,
            f"`{each.workload.text}`",
            each.ours.schedule or NOTHING,
            _micros(_seconds(each.ours)),
            _micros(_seconds(each.theirs)),
            significant(each.speedup),
            significant((each.ours.gflops or 0) / 1e3),
            *(f"{row.error:.1e}" for row in (each.ours, each.theirs)),
            *(_micros(each.seconds.get(kind)) for kind in shown),
        )
        for each in found
    ]
    return Table((*headers, *(f"{kind} [µs]" for kind in shown)), rows, left=frozenset(headers[:3]))


def networks_table(found: Sequence[Contest]) -> Table:
    """A line a network and batch; a layer's label begins with its network."""
    headers = ("network", "batch", "layers", "×", "least ×", "slower", "most TFLOP/s", "largest error", "library's")

    def key(each: Contest) -> tuple[str, int]:
        return each.label.partition(" ")[0], each.workload.N

    groups = [(*name, list(layers)) for name, layers in groupby(sorted(found, key=key), key)]
    rows = [(network, str(batch), *_summary(layers)) for network, batch, layers in groups]
    return Table(headers, [*rows, ("all", "", *_summary(found))], left=frozenset(headers[:1]))


def _summary(layers: Sequence[Contest]) -> tuple[str, ...]:
    ratios = [each.speedup for each in layers]
    errors = (max(row.error or 0 for row in rows) for rows in zip(*((e.ours, e.theirs) for e in layers), strict=True))
    return (
        str(len(layers)),
        significant(statistics.geometric_mean(ratios)),
        significant(min(ratios)),
        str(sum(ratio < 1 for ratio in ratios)),
        significant(max(each.ours.gflops or 0 for each in layers) / 1e3),
        *(f"{error:.1e}" for error in errors),
    )


def draw(found: Sequence[Contest], kinds: Sequence[str], path: Path) -> None:
    """A panel for each size of batch: channels across, the output's side up, the winners' marks.

    Beside each mark is how many times as long the next kind takes; of several layers in one place the least.

    Args:
        found: the layers.
        kinds: as for `contests`.
        path: the file to write; its suffix, one of `charts.FORMATS`, tells the format.
    """
    panels = {most: inside for most in BATCHES if (inside := [each for each in found if _panel(each) == most])}
    figure = new_figure(WIDTH * len(panels), HEIGHT)
    drawn = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, inside in zip(drawn, panels.values(), strict=True):
        _draw_panel(axes, inside, (*kinds, OTHERS))
    drawn[0].set_ylabel("side of the output [pixels]")
    drawn[0].legend(loc="lower left", fontsize=SMALL + 1)
    figure.suptitle("The fastest kind of schedule, and how many times as long the next one takes", fontsize=11)
    save(figure, path, colors=COLORS)


def _draw_panel(axes: Any, inside: Sequence[Contest], kinds: Sequence[str]) -> None:
    for kind, (marker, color) in zip(kinds, STYLES, strict=False):
        points = [_place(each.workload) for each in inside if each.winner == kind]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, linestyle="none", marker=marker, color=color, markersize=5, alpha=0.8, label=kind)
    leads: dict[tuple[float, float], float] = {}
    for each in inside:
        place = _place(each.workload)
        leads[place] = min(each.lead or math.inf, leads.get(place, math.inf))
    for place, lead in leads.items():
        if lead < math.inf:
            text = significant(lead, 2)
            axes.annotate(text, place, (1, 5), textcoords="offset points", fontsize=SMALL, rotation=50)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log", base=2)
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.set_title("batch " + ", ".join(map(str, sorted({each.workload.N for each in inside}))), fontsize=10)
    axes.set_xlabel("channels: root of inputs' times outputs'")


def _panel(each: Contest) -> float:
    """The most images of a layer's panel."""
    return next(most for most in BATCHES if most >= each.workload.N)


def _place(w: Conv2d) -> tuple[float, float]:
    return math.sqrt(w.C * w.O), math.sqrt(w.P * w.Q)


def _kind(schedule: str, kinds: Collection[str]) -> str:
    return schedule if schedule in kinds else OTHERS


def _seconds(row: Row) -> float:
    return row.timing.median if row.timing else math.inf


def _micros(seconds: float | None) -> str:
    return significant(seconds * 1e6) if seconds else NOTHING
