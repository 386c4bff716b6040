"""How searches went, as numbers to draw: pure functions of records."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tvmconv import library
from tvmconv.experiments.results import Result, Row
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.record import Record
from tvmconv.workloads import Workload


@dataclass
class Trace:
    """The trials of one schedule for one workload in one log, in the order in which they came in.

    Attributes:
        log: the log's name.
        workload: what was tuned.
        schedule: the schedule's name.
        device: the device's name.
        rates: GFLOP/s of each trial; 0 for one that failed.
        elapsed: seconds of tuning at the end of each trial; None where the log does not tell.
    """

    log: str
    workload: Workload
    schedule: str
    device: str
    rates: list[float] = field(default_factory=list)
    elapsed: list[float | None] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The highest of `rates`."""
        return max(self.rates)

    @property
    def failed(self) -> int:
        """How many trials failed."""
        return self.rates.count(0.0)

    @property
    def is_naive(self) -> bool:
        """Whether it is no search, but the naive schedule, which a tuner measures once to compare with."""
        naive = library.naive(self.workload)
        return naive is not None and self.schedule == naive.name


def traces(log: str, records: Iterable[Record]) -> list[Trace]:
    """Sort a log's records into searches, in the order in which these began.

    Last timings are no trials; only where a log was thinned to them they stand for what was found.
    """
    trials: dict[tuple[Workload, str, str], Trace] = {}
    finals: dict[tuple[Workload, str, str], Trace] = {}
    for record in records:
        key = record.workload, record.schedule, record.device
        trace = (finals if record.final else trials).setdefault(key, Trace(log, *key))
        trace.rates.append(record.gflops)
        trace.elapsed.append(record.elapsed)
    return list((trials | {key: trace for key, trace in finals.items() if key not in trials}).values())


@dataclass(frozen=True)
class History:
    """The best rate of a search, as it rose.

    Attributes:
        name: what tells the search from the others.
        best: GFLOP/s of the best trial so far, after each trial; 0 as long as all have failed.
        elapsed: seconds of tuning after each trial; empty if it is not known of all.
        failed: how many trials failed.
    """

    name: str
    best: tuple[float, ...]
    elapsed: tuple[float, ...]
    failed: int

    @property
    def summary(self) -> str:
        """For a legend: "direct, 512 trials, 4% failed"."""
        return _summary(self.name, len(self.best), self.failed)


@dataclass(frozen=True)
class HistoryInfo:
    """What a chart of searches for one workload shows.

    Attributes:
        title: on top of the chart.
        histories: one a search.
        compared: names and GFLOP/s of what the searches are to beat.
    """

    title: str
    histories: tuple[History, ...]
    compared: tuple[tuple[str, float], ...]


def history_info(workload: Workload, found: Sequence[Trace], sweeps: Sequence[Sweep] = ()) -> HistoryInfo:
    """The searches for a workload, beside the libraries and the fastest schedule that sweeps measured for it.

    The naive schedule, which a tuner measures once to compare with, is no search but one of those beside.

    Args:
        workload: whose searches.
        found: searches for this and other workloads.
        sweeps: of this and other workloads.
    """
    own = [trace for trace in found if trace.workload == workload]
    chosen = [trace for trace in own if not trace.is_naive] or own
    beside = max((trace for trace in own if trace not in chosen), key=lambda trace: trace.best, default=None)
    devices = list(dict.fromkeys(trace.device for trace in chosen))
    names = _names(chosen)
    results = [result for sweep in sweeps for result in sweep.results if result.workload == workload]
    return HistoryInfo(
        title=f"{workload} on {', '.join(devices)}",
        histories=tuple(_history(name, trace) for name, trace in zip(names, chosen, strict=True)),
        compared=(
            *([(beside.schedule, beside.best)] if beside and beside.best else []),
            *(rate for result in results for rate in _to_beat(result)),
        ),
    )


def _to_beat(result: Result) -> list[tuple[str, float]]:
    schedules = [(row.name, row.gflops) for row in result.rows if row.gflops and not row.library]
    libraries = [(row.name, row.gflops) for row in result.rows if row.gflops and row.library]
    return [*sorted(schedules, key=lambda row: row[1])[-1:], *libraries]


def _history(name: str, trace: Trace) -> History:
    elapsed = tuple(seconds for seconds in trace.elapsed if seconds is not None)
    return History(
        name=name,
        best=tuple(itertools.accumulate(trace.rates, max)),
        elapsed=elapsed if len(elapsed) == len(trace.rates) else (),
        failed=trace.failed,
    )


def merge_into_sweep(found: Sequence[Trace], sweeps: Sequence[Sweep] = ()) -> tuple[list[str], list[Result]]:
    """The best of each search beside the rows of sweeps, workload by workload.

    Returns:
        For each workload a label and its rows: first those of the sweeps, under the sweep's label, then the others in
        the order of their searches, under their text.
    """
    labels: dict[Workload, str] = {}
    results: dict[Workload, Result] = {}
    for sweep in sweeps:
        for label, result in zip(sweep.labels, sweep.results, strict=True):
            labels.setdefault(result.workload, label)
            _add(results, result)
    names = _names(found)
    measured = {(row.name, result.workload) for result in results.values() for row in result.rows}
    trials: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for name, trace in zip(names, found, strict=True):
        trials[name] += len(trace.rates)
        failed[name] += trace.failed
    for name, trace in zip(names, found, strict=True):
        labels.setdefault(trace.workload, trace.workload.text.partition(":")[2])
        label = trace.schedule if trace.is_naive else _summary(name, trials[name], failed[name])
        if trace.best and (label, trace.workload) not in measured:
            row = Row(label, verified=True, gflops=trace.best)
            _add(results, Result(trace.workload, trace.device, trace.device, 0, (row,)))
    return [labels[workload] for workload in results], list(results.values())


def _add(results: dict[Workload, Result], more: Result) -> None:
    known = results.get(more.workload)
    rows = (*known.rows, *more.rows) if known else more.rows
    results[more.workload] = Result(more.workload, more.device, more.device_name, more.seed, rows)


def _summary(name: str, trials: int, failed: int) -> str:
    share = f", {failed / trials:.0%} failed" if failed else ""
    return f"{name}, {trials:,} trial{'' if trials == 1 else 's'}{share}"


def _names(found: Sequence[Trace]) -> list[str]:
    """The schedule of each search, with its device and its log as far as the searches differ in them."""
    devices, logs = {trace.device for trace in found}, {trace.log for trace in found}
    names = []
    for trace in found:
        device = f" on {trace.device}" if len(devices) > 1 else ""
        log = f"{trace.log}: " if len(logs) > 1 else ""
        names.append(f"{log}{trace.schedule}{device}")
    return names
