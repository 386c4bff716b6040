"""Tuners compared on recorded spaces: tables, JSON and a chart. First the numbers, pure, then the drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvmconv.reports.charts import new_figure, save
from tvmconv.reports.tables import Table
from tvmconv.searching.replay import Recording
from tvmconv.searching.simulate import Run, Summary, checkpoints

MOST_PANELS = 9  # of a chart; of more spaces it has one panel, for all searches


@dataclass(frozen=True)
class Comparison:
    """Tuners on one recorded space.

    Attributes:
        name: of the space.
        recording: the space.
        summaries: one a tuner, all with as many trials and seeds.
    """

    name: str
    recording: Recording
    summaries: Sequence[Summary]

    @property
    def seeds(self) -> int:
        """Searches by each tuner."""
        return len(self.summaries[0].runs)

    @property
    def trials(self) -> int:
        """Measurements of each search."""
        return len(self.summaries[0].runs[0].shares)

    def text(self) -> str:
        """A heading, and a table with one line a tuner."""
        heading = (
            f"{self.name}: {len(self.recording.space.listed):,} configs, {self.recording.failed:,} of them failed, "
            f"the best takes {self.recording.best * 1e3:.4g} ms; share of its speed over {self.seeds} seeds"
        )
        return f"{heading}\n\n{shares_table(self.summaries, self.trials).text()}"

    def to_json(self) -> dict[str, Any]:
        """The table's numbers, and the share that each seed reached."""
        counts = checkpoints(self.trials)
        return {
            "file": self.name,
            "configs": len(self.recording.space.listed),
            "failed": self.recording.failed,
            "best_seconds": self.recording.best,
            "trials": self.trials,
            "seeds": self.seeds,
            "tuners": [
                {
                    "tuner": summary.tuner,
                    "seconds": summary.seconds,
                    "shares": {str(n): summary.after(n).tolist() for n in counts},
                    "mean_share": {str(n): float(summary.after(n).mean()) for n in counts},
                }
                for summary in self.summaries
            ],
        }


def shares_table(summaries: Sequence[Summary], trials: int) -> Table:
    """Mean ± standard deviation of the shares over the searches, one line a tuner."""
    counts = checkpoints(trials)
    headers = ("tuner", *(f"after {n}" for n in counts), "tuner [s]")
    rows = [[summary.tuner, *(_share(summary, n) for n in counts), f"{summary.seconds:.2f}"] for summary in summaries]
    return Table(headers, rows, left=frozenset({"tuner"}))


def _share(summary: Summary, trials: int) -> str:
    shares = summary.after(trials)
    return f"{shares.mean():.3f} ± {shares.std():.3f}"


def means(comparisons: Sequence[Comparison]) -> list[Summary]:
    """For each tuner, for each seed the mean over the spaces: the deviation is that of the mean, not of the spaces."""
    return [_mean(several) for several in zip(*(each.summaries for each in comparisons), strict=True)]


def _mean(summaries: Sequence[Summary]) -> Summary:
    runs = zip(*(summary.runs for summary in summaries), strict=True)
    return Summary(summaries[0].tuner, [Run.mean(each) for each in runs])


@dataclass(frozen=True)
class Curve:
    """How one tuner's searches went.

    Attributes:
        tuner: its name.
        mean: the mean share after each trial: float (trials,).
        quartiles: the first and the third: float (2, trials).
    """

    tuner: str
    mean: np.ndarray
    quartiles: np.ndarray


def curves(summaries: Sequence[Summary]) -> list[Curve]:
    """The mean and the quartiles over the searches of each tuner."""
    found = []
    for summary in summaries:
        shares = np.stack([run.shares for run in summary.runs])
        found.append(Curve(summary.tuner, shares.mean(axis=0), np.quantile(shares, (0.25, 0.75), axis=0)))
    return found


def panels(comparisons: Sequence[Comparison]) -> Mapping[str, list[Curve]]:
    """What a chart of comparisons shows, by the titles: a panel a space, or, where they are many, one of their mean."""
    if len(comparisons) > MOST_PANELS:
        return {f"mean of {len(comparisons)} spaces": curves(means(comparisons))}
    return {each.name: curves(each.summaries) for each in comparisons}


def draw(shown: Mapping[str, list[Curve]], path: Path) -> None:
    """Draw the share of the optimum's speed over the trials: lines for means, bands between the quartiles.

    Args:
        shown: what `panels` says.
        path: the file to write; its suffix, one of `charts.FORMATS`, tells the format.
    """
    columns = math.ceil(math.sqrt(len(shown)))
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(max(8.0, 4.5 * columns), 1.5 + 3.5 * rows)
    places = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes, (title, lines) in zip(places, shown.items(), strict=False):
        for place, curve in enumerate(lines):
            trials = np.arange(1, len(curve.mean) + 1)
            axes.plot(trials, curve.mean, color=f"C{place}", linewidth=2, label=curve.tuner)
            axes.fill_between(trials, *curve.quartiles, color=f"C{place}", alpha=0.15, linewidth=0)
        axes.set_title(_short(title), fontsize="medium")
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("measurements")
        axes.set_ylabel("share of the optimum's speed")
        axes.label_outer()
        axes.grid(alpha=0.4)
    for axes in list(figure.axes)[len(shown) :]:
        axes.set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def _short(title: str, most: int = 48) -> str:
    """The end of a long title, which tells a space from others in its folder."""
    return title if len(title) <= most else f"…{title[-most:]}"
