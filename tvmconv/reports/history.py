"""The course of searches, as numbers to draw."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvmconv import library
from tvmconv.errors import RecordError
from tvmconv.experiments.results import Result, Row
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.best import best_of_records, fastest_first
from tvmconv.logs.index import Index, Indexer, index_records
from tvmconv.logs.lines import BadLines
from tvmconv.logs.record import Record
from tvmconv.logs.scan import medians, scan
from tvmconv.logs.subject import Subject
from tvmconv.reports.tables import significant
from tvmconv.workloads import Workload

_BATCH = 4096  # texts of times that are parsed together


@dataclass
class Trace:
    """The trials of one schedule for one workload in one log, in the order in which they came in.

    Attributes:
        log: the log's name.
        workload: what was tuned.
        schedule: the schedule's name.
        device: the device's name.
        costs: seconds a launch of each trial; infinite for one that failed.
        elapsed: seconds of tuning at the end of each trial; None where the log does not tell.
        result: the best record of the schedule, by the rule of `tvmconv.logs.best`; None if nothing valid was timed.
    """

    log: str
    workload: Workload
    schedule: str
    device: str
    costs: list[float] = field(default_factory=list)
    elapsed: list[float | None] = field(default_factory=list)
    result: Record | None = None

    @property
    def rates(self) -> list[float]:
        """GFLOP/s of each trial; 0 for one that failed."""
        flops = self.workload.flops
        return [flops / seconds / 1e9 for seconds in self.costs]

    @property
    def failed(self) -> int:
        """How many trials failed."""
        return self.costs.count(math.inf)

    @property
    def is_naive(self) -> bool:
        """Whether it is no search, but the naive schedule, which a tuner measures to compare with."""
        naive = library.naive(self.workload)
        return naive is not None and self.schedule == naive.name


class _Clock:
    """Seconds of tuning of one workload on one device, over all its sessions in a log.

    A search writes the seconds since it began. In a log that was merged from several, these begin again with each of
    them: sessions are put one after another, as if the second had begun when the first ended. Searches that wrote to
    the log at the same time share their time.
    """

    def __init__(self) -> None:
        self._begin = self._end = 0.0  # of this session, on the clock of all sessions
        self._elapsed = self._timestamp = 0.0  # of the record before

    def read(self, elapsed: float, timestamp: float) -> float:
        """Return the seconds on the clock of all sessions when a record came in."""
        at_once = self._timestamp < timestamp and timestamp - elapsed < self._timestamp
        if elapsed < self._elapsed and not at_once:
            self._begin = self._end
        self._end = max(self._end, self._begin + elapsed)
        self._elapsed, self._timestamp = elapsed, timestamp
        return self._end


class _Search:
    """The records of one subject on their way into traces.

    Attributes:
        index: where its records are, for the result.
        clock: what its records were taken by.
    """

    def __init__(self, subject: Subject, index: Index, traces: _Traces) -> None:
        self.index = index
        self.clock = traces.clock(subject)
        self._subject, self._traces = subject, traces
        self._found: dict[bool, Trace] = {}

    def trace(self, *, final: bool) -> Trace:
        """Return the trace of its final timings, or of its trials."""
        if final not in self._found:
            self._found[final] = self._traces.trace(self._subject, final=final)
        return self._found[final]


class _Traces:
    """Sorts the records of a log into searches, in the order in which these began.

    Final timings are no trials; only where a log was thinned to them they are listed in place of trials.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._trials: dict[tuple[Workload, str, str], Trace] = {}
        self._finals: dict[tuple[Workload, str, str], Trace] = {}
        self._clocks: dict[tuple[Workload, str], _Clock] = {}

    def trace(self, subject: Subject, *, final: bool) -> Trace:
        """Return the trace of a subject's trials or final timings."""
        kept = self._finals if final else self._trials
        return kept.setdefault(subject[:3], Trace(self._log, *subject[:3]))

    def clock(self, subject: Subject) -> _Clock:
        """Return the clock that a subject's records were taken by."""
        return self._clocks.setdefault((subject.workload, subject.device), _Clock())

    def finish(self, indexes: Mapping[Subject, Index]) -> list[Trace]:
        """Return the traces, with the result of each."""
        kept = self._trials | {key: trace for key, trace in self._finals.items() if key not in self._trials}
        found: dict[tuple[Workload, str, str], list[tuple[Subject, Index]]] = {}
        for subject, each in indexes.items():
            found.setdefault(subject[:3], []).append((subject, each))
        for key, trace in kept.items():
            trace.result = next(fastest_first(found[key]), None)
        return [*kept.values()]


def traces(log: str, records: Iterable[Record]) -> list[Trace]:
    """Return the searches that records are of, in the order in which these began.

    Args:
        log: name of the log that the records are from.
        records: trials and final timings, in the order in which they came in.
    """
    kept, found = list(records), _Traces(log)
    for record in kept:
        trace, elapsed = found.trace(record.subject, final=record.final), record.elapsed
        trace.costs.append(record.cost)
        clock = found.clock(record.subject)
        trace.elapsed.append(None if elapsed is None else clock.read(elapsed, record.timestamp))
    return found.finish(index_records(kept))


def read_traces(log: str, path: Path, bad: BadLines) -> list[Trace]:
    """Return the searches of a log, in the order in which these began; lines are looked at, but not parsed in full.

    Args:
        log: name of the log.
        path: the file.
        bad: lines that are seen to be no records are added here.

    Raises:
        Error: the file cannot be read.
    """
    indexer, found = Indexer(path), _Traces(log)
    waiting: list[tuple[Trace, bytes | None]] = []  # texts of times, None for a failure
    searches = scan(path, bad, lambda subject: _Search(subject, indexer.index(subject), found))
    for number, (line, glance) in enumerate(searches, 1):
        try:
            elapsed, timestamp = glance.when()
        except RecordError as refused:
            bad.add(line.number, refused)
            continue
        search = glance.made
        search.index.add(glance, line.offset)
        trace = search.trace(final=glance.final)
        trace.elapsed.append(None if elapsed is None else search.clock.read(elapsed, timestamp))
        waiting.append((trace, None if glance.error else glance.costs))
        if number % _BATCH == 0:
            _add_costs(waiting)
    _add_costs(waiting)
    return found.finish(indexer.found)


def _add_costs(waiting: list[tuple[Trace, bytes | None]]) -> None:
    """Move trials to the costs of their traces."""
    costs = iter(medians([text for _, text in waiting if text is not None]).tolist())
    for trace, text in waiting:
        trace.costs.append(math.inf if text is None else next(costs))
    waiting.clear()


@dataclass(frozen=True)
class History:
    """The best rate of a search, as it rose.

    Attributes:
        name: what tells the search from the others.
        best: GFLOP/s of the best trial so far, after each trial; 0 as long as all have failed.
        elapsed: seconds of tuning after each trial; empty if it is not known of all.
        failed: how many trials failed.
        result: the best record of the schedule, which seldom is the fastest trial; None if nothing valid was timed.
    """

    name: str
    best: tuple[float, ...]
    elapsed: tuple[float, ...]
    failed: int
    result: Record | None = None

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
        results: names and records of the best of each log and device.
    """

    title: str
    histories: tuple[History, ...]
    compared: tuple[tuple[str, float], ...]
    results: tuple[tuple[str, Record], ...] = ()


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
    naive = [trace for trace in own if trace.is_naive and trace not in chosen]
    beside = best_of_records(trace.result for trace in naive if trace.result)
    devices = list(dict.fromkeys(trace.device for trace in chosen))
    names = _names(chosen)
    results = [result for sweep in sweeps for result in sweep.results if result.workload == workload]
    return HistoryInfo(
        title=f"{workload} on {', '.join(devices)}",
        histories=tuple(_history(name, trace) for name, trace in zip(names, chosen, strict=True)),
        compared=(
            *([(beside.schedule, beside.gflops)] if beside else []),
            *(rate for result in results for rate in _to_beat(result)),
        ),
        results=_results(own),
    )


def _results(own: Sequence[Trace]) -> tuple[tuple[str, Record], ...]:
    """Return the best record of each log and device, by a text that names it and says how it was timed."""
    groups: dict[tuple[str, str], list[tuple[str, Record]]] = {}
    for name, trace in zip(_names(own), own, strict=True):
        if trace.result is not None:
            groups.setdefault((trace.log, trace.device), []).append((name, trace.result))
    found = []
    for group in groups.values():
        record = best_of_records(record for _, record in group)
        found += [(name, each) for name, each in group if each is record]
    return tuple((f"{name}: {result_text(record)}", record) for name, record in found)


def result_text(record: Record) -> str:
    """Return the rate of the best record and how it was timed: "12.8 GFLOP/s, final timing"."""
    return f"{significant(record.gflops)} GFLOP/s, {'final timing' if record.final else 'median of its trials'}"


def _to_beat(result: Result) -> list[tuple[str, float]]:
    schedules = [(row.name, row.gflops) for row in result.rows if row.gflops and not row.library]
    libraries = [(row.name, row.gflops) for row in result.rows if row.gflops and row.library]
    return [*sorted(schedules, key=lambda row: row[1])[-1:], *libraries]


def _history(name: str, trace: Trace) -> History:
    elapsed = tuple(seconds for seconds in trace.elapsed if seconds is not None)
    return History(
        name=name,
        best=tuple(itertools.accumulate(trace.rates, max)),
        elapsed=elapsed if len(elapsed) == len(trace.costs) else (),
        failed=trace.failed,
        result=trace.result,
    )


def merge_into_sweep(found: Sequence[Trace], sweeps: Sequence[Sweep] = ()) -> tuple[list[str], list[Result]]:
    """The result of each search beside the rows of sweeps, workload by workload.

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
        trials[name] += len(trace.costs)
        failed[name] += trace.failed
    for name, trace in zip(names, found, strict=True):
        labels.setdefault(trace.workload, trace.workload.text.partition(":")[2])
        label = trace.schedule if trace.is_naive else _summary(name, trials[name], failed[name])
        if trace.result is not None and (label, trace.workload) not in measured:
            row = Row(label, verified=True, gflops=trace.result.gflops)
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
