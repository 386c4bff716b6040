"""The trials of a search as the numbers of a chart: importance of knobs, failures, and a representative selection."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tvmconv.logs.record import Record
from tvmconv.measure.results import ErrorKind
from tvmconv.space import Value

MAX_SHOWN_TRIALS = 300  # largest number of drawn trials
MIN_TRIALS = 10  # fewer trials say nothing about a knob


@dataclass(frozen=True)
class KnobImportance:
    """The fraction of the differences in time that a knob explains. It is epsilon squared of the logarithms of the
    times by the knob's values, 0 to 1: the variance that they explain minus what as many values would explain by chance
    (Kelley, PNAS 21, 1935).
    """

    knob: str
    explained_fraction: float
    num_values: int  # that were tried


def compute_knob_importances(records: Sequence[Record]) -> list[KnobImportance]:
    """Return the importance of each knob of one search, the largest first; the list is empty for few trials. All
    records have times.
    """
    importances: list[KnobImportance] = []
    if len(records) < MIN_TRIALS:
        return importances
    for knob in records[0].config:
        groups: defaultdict[Value | None, list[float]] = defaultdict(list)
        for record in records:
            groups[record.config.get(knob)].append(math.log2(record.cost))
        if 1 < len(groups) <= len(records) // 2:
            importances.append(KnobImportance(knob, _epsilon_squared(list(groups.values())), len(groups)))
    return sorted(importances, key=lambda importance: -importance.explained_fraction)


def _epsilon_squared(groups: Sequence[Sequence[float]]) -> float:
    all_values = [value for group in groups for value in group]
    total_variance = statistics.pvariance(all_values) * len(all_values) / (len(all_values) - 1)
    within_variance = sum(statistics.pvariance(group) * len(group) for group in groups) / (
        len(all_values) - len(groups)
    )
    return max(0.0, 1 - within_variance / total_variance) if total_variance else 0.0


@dataclass(frozen=True)
class TrialFailure:
    """Trials that failed with one kind of error, such as "compile device", with the message of the first of them."""

    kind: str
    count: int
    message: str


def group_failures(records: Sequence[Record]) -> list[TrialFailure]:
    """Return the failures by kind, the most frequent first."""
    groups: defaultdict[ErrorKind, list[Record]] = defaultdict(list)
    for record in records:
        if not record.ok:
            groups[record.error].append(record)
    failures = [
        TrialFailure(kind.name.lower().replace("_", " ") if kind else "no time", len(failed), failed[0].message)
        for kind, failed in groups.items()
    ]
    return sorted(failures, key=lambda failure: -failure.count)


def select_representative_trials(records: Sequence[Record], max_trials: int = MAX_SHOWN_TRIALS) -> list[Record]:
    """Return at most `max_trials` trials, the fastest first: the fastest third, and an even selection of the others."""
    sorted_records = sorted((record for record in records if record.ok), key=lambda record: record.cost)
    if len(sorted_records) <= max_trials:
        return sorted_records
    fastest, slower_records = sorted_records[: max_trials // 3], sorted_records[max_trials // 3 :]
    num_sampled = max_trials - len(fastest)
    return fastest + [slower_records[i * len(slower_records) // num_sampled] for i in range(num_sampled)]
