"""The comparison of tuners on recorded spaces: tables and JSON as pure functions, and the chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvmconv.reports.charts import create_figure, save_figure
from tvmconv.reports.tables import Table
from tvmconv.search.recorded_space import RecordedSpaceRunner, SimulatedSearch, SimulationSummary, select_checkpoints

MAX_TITLE_CHARACTERS = 48
MAX_PANELS = 9  # with more spaces than this, a chart has one panel with their mean


@dataclass(frozen=True)
class TunerComparison:
    """The searches of several tuners on one recorded space."""

    name: str
    recording: RecordedSpaceRunner
    summaries: Sequence[SimulationSummary]  # one per tuner, all with the same numbers of trials and seeds

    @property
    def num_seeds(self) -> int:
        """Number of searches by each tuner."""
        return len(self.summaries[0].searches)

    @property
    def num_trials(self) -> int:
        """Number of measurements in each search."""
        return len(self.summaries[0].searches[0].relative_throughput)

    @property
    def heading(self) -> str:
        """Line above the table: the space, the best config and the number of seeds."""
        return (
            f"{self.name}: {len(self.recording.space.enumerated_legal):,} configs, "
            f"{self.recording.num_failed:,} of them failed, "
            f"the best takes {self.recording.best_seconds * 1e3:.4g} ms; relative throughput of {self.num_seeds} seeds"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the table's numbers and the relative throughput of each seed."""
        counts = select_checkpoints(self.num_trials)
        return {
            "file": self.name,
            "configs": len(self.recording.space.enumerated_legal),
            "failed": self.recording.num_failed,
            "best_seconds": self.recording.best_seconds,
            "trials": self.num_trials,
            "seeds": self.num_seeds,
            "tuners": [
                {
                    "tuner": summary.tuner,
                    "seconds": summary.mean_seconds,
                    "shares": {str(n): summary.get_throughput_after(n).tolist() for n in counts},
                    "mean_share": {str(n): float(summary.get_throughput_after(n).mean()) for n in counts},
                }
                for summary in self.summaries
            ],
        }


def make_relative_throughput_table(summaries: Sequence[SimulationSummary], trials: int) -> Table:
    """Return a table of the mean ± standard deviation of the relative throughput, one row per tuner."""
    counts = select_checkpoints(trials)
    headers = ("tuner", *(f"after {n}" for n in counts), "tuner [s]")
    rows = [
        [summary.tuner, *(_format_relative_throughput(summary, n) for n in counts), f"{summary.mean_seconds:.2f}"]
        for summary in summaries
    ]
    return Table(headers, rows, left_aligned=frozenset({"tuner"}))


def _format_relative_throughput(summary: SimulationSummary, trials: int) -> str:
    relative_throughput = summary.get_throughput_after(trials)
    return f"{relative_throughput.mean():.3f} ± {relative_throughput.std():.3f}"


def compute_mean_summaries(comparisons: Sequence[TunerComparison]) -> list[SimulationSummary]:
    """Return each tuner's mean over the spaces for each seed; its deviation is that of the mean."""
    means = []
    for summaries in zip(*(comparison.summaries for comparison in comparisons), strict=True):
        searches_by_seed = zip(*(summary.searches for summary in summaries), strict=True)
        means.append(SimulationSummary(summaries[0].tuner, [*map(SimulatedSearch.average, searches_by_seed)]))
    return means


@dataclass(frozen=True)
class TunerCurve:
    """The course of one tuner's searches: its relative throughput after each trial."""

    tuner: str
    mean: np.ndarray  # float (trials,)
    quartiles: np.ndarray  # first and third, float (2, trials)


def compute_curves(summaries: Sequence[SimulationSummary]) -> list[TunerCurve]:
    """Return the mean and the quartiles over the searches of each tuner."""
    tuner_curves = []
    for summary in summaries:
        throughput = np.stack([search.relative_throughput for search in summary.searches])
        quartiles = np.quantile(throughput, (0.25, 0.75), axis=0)
        tuner_curves.append(TunerCurve(summary.tuner, throughput.mean(axis=0), quartiles))
    return tuner_curves


def compute_panels(comparisons: Sequence[TunerComparison]) -> Mapping[str, list[TunerCurve]]:
    """Return the curves of a chart by panel title: one panel per space, or one of the mean if there are many spaces."""
    if len(comparisons) > MAX_PANELS:
        return {f"mean of {len(comparisons)} spaces": compute_curves(compute_mean_summaries(comparisons))}
    return {comparison.name: compute_curves(comparison.summaries) for comparison in comparisons}


def draw_panels(curves_by_title: Mapping[str, list[TunerCurve]], path: Path) -> None:
    """Draw relative throughput over trials: lines for means, bands between the quartiles. The panels are those of
    `compute_panels`. The file's suffix, one of `charts.FORMATS`, selects the format.
    """
    columns = math.ceil(math.sqrt(len(curves_by_title)))
    rows = math.ceil(len(curves_by_title) / columns)
    figure = create_figure(max(8.0, 4.5 * columns), 1.5 + 3.5 * rows)
    panel_axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for panel, (title, lines) in zip(panel_axes, curves_by_title.items(), strict=False):
        for index, curve in enumerate(lines):
            trials = np.arange(1, len(curve.mean) + 1)
            panel.plot(trials, curve.mean, color=f"C{index}", linewidth=2, label=curve.tuner)
            panel.fill_between(trials, *curve.quartiles, color=f"C{index}", alpha=0.15, linewidth=0)
        # The end of a long title distinguishes a space from others in its folder.
        is_short = len(title) <= MAX_TITLE_CHARACTERS
        panel.set_title(title if is_short else f"…{title[-MAX_TITLE_CHARACTERS:]}", fontsize="medium")
        panel.set_ylim(0, 1.02)
        panel.set_xlabel("measurements")
        panel.set_ylabel("relative throughput")
        panel.label_outer()
        panel.grid(alpha=0.4)
    for panel in list(figure.axes)[len(curves_by_title) :]:
        panel.set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)
