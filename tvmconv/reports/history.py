"""The course of searches, as the numbers of a chart."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvmconv import registry
from tvmconv.errors import RecordError
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.header_scan import parse_medians, scan_log
from tvmconv.logs.index import LogIndex, LogIndexer, index_records
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.ranking import find_best_of_records, iterate_fastest_first
from tvmconv.logs.record import Record, RecordKey
from tvmconv.reports.tables import format_significant
from tvmconv.workloads import Workload

_COSTS_PER_BATCH = 4096  # number of texts of times per call of the parser


@dataclass
class Trace:
    """The trials of one schedule for one workload in one log, in the order of the log.

    Attributes:
        log: Name of the log.
        workload: Workload that was tuned.
        schedule: Name of the schedule.
        device: Name of the device.
        costs: Seconds per launch of each trial; infinite for a failed one.
        elapsed: Seconds of tuning at the end of each trial; None where the log lacks it.
        result: Best record of the schedule by the rule of `tvmconv.logs.ranking`; None if none has a valid time.
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
        """GFLOP/s of each trial; 0 for a failed one."""
        flops = self.workload.flops
        return [flops / seconds / 1e9 for seconds in self.costs]

    @property
    def num_failed(self) -> int:
        """Number of failed trials."""
        return self.costs.count(math.inf)

    @property
    def is_naive(self) -> bool:
        """Whether this is the naive schedule, which a tuner measures for comparison, and not a search."""
        naive = registry.get_baseline_schedule(self.workload)
        return naive is not None and self.schedule == naive.name


class _TuningClock:
    """Seconds of tuning of one workload on one device over all its sessions in a log.

    A search writes the seconds since its start. In a log that was merged from several, this time starts again with each
    of them. Sessions are therefore concatenated, as if the second had started when the first ended. Searches that wrote
    to the log at the same time share their time.
    """

    def __init__(self) -> None:
        self._session_start = self._session_end = 0.0  # this session, in seconds of all sessions
        self._last_elapsed = self._last_timestamp = 0.0  # previous record

    def advance(self, elapsed: float, timestamp: float) -> float:
        """Return the seconds of all sessions at a record."""
        is_concurrent = self._last_timestamp < timestamp and timestamp - elapsed < self._last_timestamp
        if elapsed < self._last_elapsed and not is_concurrent:
            self._session_start = self._session_end
        self._session_end = max(self._session_end, self._session_start + elapsed)
        self._last_elapsed, self._last_timestamp = elapsed, timestamp
        return self._session_end


class _TraceSearch:
    """The records of one key while they are collected into traces.

    Attributes:
        index: Index of its records, from which the result is found.
        clock: Clock of its records.
    """

    def __init__(self, subject: RecordKey, index: LogIndex, traces: _TraceCollector) -> None:
        self.index = index
        self.clock = traces.get_clock(subject)
        self._subject, self._traces = subject, traces
        self._trace_by_kind: dict[bool, Trace] = {}

    def get_trace(self, *, final: bool) -> Trace:
        """Return the trace of the final timings, or of the trials."""
        if final not in self._trace_by_kind:
            self._trace_by_kind[final] = self._traces.get_trace(self._subject, final=final)
        return self._trace_by_kind[final]


class _TraceCollector:
    """A collector of a log's records by search, in the order in which the searches started.

    Final timings are not trials; they take the place of trials only in a log that was reduced to them.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._trials: dict[tuple[Workload, str, str], Trace] = {}
        self._finals: dict[tuple[Workload, str, str], Trace] = {}
        self._clocks: dict[tuple[Workload, str], _TuningClock] = {}

    def get_trace(self, subject: RecordKey, *, final: bool) -> Trace:
        """Return the trace of a key's trials or final timings."""
        traces = self._finals if final else self._trials
        return traces.setdefault(subject[:3], Trace(self._log, *subject[:3]))

    def get_clock(self, subject: RecordKey) -> _TuningClock:
        """Return the clock of a key's records."""
        return self._clocks.setdefault((subject.workload, subject.device), _TuningClock())

    def finish(self, indexes: Mapping[RecordKey, LogIndex]) -> list[Trace]:
        """Return the traces, each with its result."""
        traces = self._trials | {key: trace for key, trace in self._finals.items() if key not in self._trials}
        indexes_by_key: dict[tuple[Workload, str, str], list[tuple[RecordKey, LogIndex]]] = {}
        for subject, index in indexes.items():
            indexes_by_key.setdefault(subject[:3], []).append((subject, index))
        for key, trace in traces.items():
            trace.result = next(iterate_fastest_first(indexes_by_key[key]), None)
        return [*traces.values()]


def collect_traces(log: str, records: Iterable[Record]) -> list[Trace]:
    """Return the searches of some records, in the order in which they started.

    Args:
        log: Name of the log of the records.
        records: Trials and final timings, in the order of the log.
    """
    record_list, collector = list(records), _TraceCollector(log)
    for record in record_list:
        trace, elapsed = collector.get_trace(record.key, final=record.final), record.elapsed
        trace.costs.append(record.cost)
        clock = collector.get_clock(record.key)
        trace.elapsed.append(None if elapsed is None else clock.advance(elapsed, record.timestamp))
    return collector.finish(index_records(record_list))


def read_traces(log: str, path: Path, invalid_lines: InvalidLines) -> list[Trace]:
    """Return the searches of a log, in the order in which they started; lines are scanned, not fully parsed.

    Args:
        log: Name of the log.
        path: Path of the log.
        invalid_lines: Collection to which lines that are not records are added.

    Raises:
        Error: The file cannot be read.
    """
    indexer, collector = LogIndexer(path), _TraceCollector(log)
    pending_costs: list[tuple[Trace, bytes | None]] = []  # text of the times, None for a failure
    searches = scan_log(
        path, invalid_lines, lambda subject: _TraceSearch(subject, indexer.index_of_key(subject), collector)
    )
    for number, (line, scanned) in enumerate(searches, 1):
        try:
            elapsed, timestamp = scanned.parse_times()
        except RecordError as error:
            invalid_lines.add_line(line.number, error)
            continue
        search = scanned.header
        search.index.add_scanned(scanned, line.offset)
        trace = search.get_trace(final=scanned.is_final)
        trace.elapsed.append(None if elapsed is None else search.clock.advance(elapsed, timestamp))
        pending_costs.append((trace, None if scanned.error else scanned.costs))
        if number % _COSTS_PER_BATCH == 0:
            _add_costs(pending_costs)
    _add_costs(pending_costs)
    return collector.finish(indexer.indexes)


def _add_costs(pending_costs: list[tuple[Trace, bytes | None]]) -> None:
    """Parse pending times and append them to the costs of their traces."""
    costs = iter(parse_medians([text for _, text in pending_costs if text is not None]).tolist())
    for trace, text in pending_costs:
        trace.costs.append(math.inf if text is None else next(costs))
    pending_costs.clear()


@dataclass(frozen=True)
class BestSoFarCurve:
    """The best throughput of a search after each trial.

    Attributes:
        name: Name that distinguishes the search from others.
        best_gflops: GFLOP/s of the best trial so far, after each trial; 0 as long as all have failed.
        elapsed: Seconds of tuning after each trial; empty if one is unknown.
        num_failed: Number of failed trials.
        result: Best record of the schedule, which is often not the fastest trial; None if none has a valid time.
    """

    name: str
    best_gflops: tuple[float, ...]
    elapsed: tuple[float, ...]
    num_failed: int
    result: Record | None = None

    @property
    def summary(self) -> str:
        """Text for a legend: "direct, 512 trials, 4% failed"."""
        return _format_summary(self.name, len(self.best_gflops), self.num_failed)


@dataclass(frozen=True)
class HistoryInfo:
    """The contents of a chart of searches for one workload.

    Attributes:
        title: Title of the chart.
        curves: One curve per search.
        targets: Names and GFLOP/s of the libraries and schedules to compare with.
        results: Names and best records by log and device.
    """

    title: str
    curves: tuple[BestSoFarCurve, ...]
    targets: tuple[tuple[str, float], ...]
    results: tuple[tuple[str, Record], ...] = ()


def compute_history_info(workload: Workload, traces: Sequence[Trace], sweeps: Sequence[Sweep] = ()) -> HistoryInfo:
    """Return the searches for a workload with the libraries and the fastest schedule that sweeps measured for it.

    The naive schedule, which a tuner measures once for comparison, is a target and not a search.

    Args:
        workload: The workload.
        traces: Searches for this and other workloads.
        sweeps: Sweeps of this and other workloads.
    """
    workload_traces = [trace for trace in traces if trace.workload == workload]
    search_traces = [trace for trace in workload_traces if not trace.is_naive] or workload_traces
    naive_traces = [trace for trace in workload_traces if trace.is_naive and trace not in search_traces]
    naive_record = find_best_of_records(trace.result for trace in naive_traces if trace.result)
    devices = list(dict.fromkeys(trace.device for trace in search_traces))
    names = _make_names(search_traces)
    results = [result for sweep in sweeps for result in sweep.results if result.workload == workload]
    return HistoryInfo(
        title=f"{workload} on {', '.join(devices)}",
        curves=tuple(_make_curve(name, trace) for name, trace in zip(names, search_traces, strict=True)),
        targets=(
            *([(naive_record.schedule, naive_record.gflops)] if naive_record else []),
            *(rate for result in results for rate in _list_targets(result)),
        ),
        results=_find_best_results(workload_traces),
    )


def _find_best_results(workload_traces: Sequence[Trace]) -> tuple[tuple[str, Record], ...]:
    """Return the best record of each log and device, with a text that names it and its kind of timing."""
    groups: dict[tuple[str, str], list[tuple[str, Record]]] = {}
    for name, trace in zip(_make_names(workload_traces), workload_traces, strict=True):
        if trace.result is not None:
            groups.setdefault((trace.log, trace.device), []).append((name, trace.result))
    best_records = []
    for group in groups.values():
        record = find_best_of_records(record for _, record in group)
        best_records += [(name, candidate) for name, candidate in group if candidate is record]
    return tuple((f"{name}: {format_result(record)}", record) for name, record in best_records)


def format_result(record: Record) -> str:
    """Return the throughput of a record and its kind of timing: "12.8 GFLOP/s, final timing"."""
    return f"{format_significant(record.gflops)} GFLOP/s, {'final timing' if record.final else 'median of its trials'}"


def _list_targets(result: Result) -> list[tuple[str, float]]:
    schedules = [(row.name, row.gflops) for row in result.rows if row.gflops and not row.library]
    libraries = [(row.name, row.gflops) for row in result.rows if row.gflops and row.library]
    return [*sorted(schedules, key=lambda row: row[1])[-1:], *libraries]


def _make_curve(name: str, trace: Trace) -> BestSoFarCurve:
    elapsed = tuple(seconds for seconds in trace.elapsed if seconds is not None)
    return BestSoFarCurve(
        name=name,
        best_gflops=tuple(itertools.accumulate(trace.rates, max)),
        elapsed=elapsed if len(elapsed) == len(trace.costs) else (),
        num_failed=trace.num_failed,
        result=trace.result,
    )


def merge_into_sweep(traces: Sequence[Trace], sweeps: Sequence[Sweep] = ()) -> tuple[list[str], list[Result]]:
    """Merge the result of each search with the rows of sweeps, workload by workload.

    Returns:
        A label and a result per workload. The workloads of the sweeps come first, under the sweep's labels; the others
        follow in the order of their searches, under their texts.
    """
    labels: dict[Workload, str] = {}
    results: dict[Workload, Result] = {}
    for sweep in sweeps:
        for label, result in zip(sweep.labels, sweep.results, strict=True):
            labels.setdefault(result.workload, label)
            _add_result(results, result)
    names = _make_names(traces)
    measured_keys = {(row.name, result.workload) for result in results.values() for row in result.rows}
    trials: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for name, trace in zip(names, traces, strict=True):
        trials[name] += len(trace.costs)
        failed[name] += trace.num_failed
    for name, trace in zip(names, traces, strict=True):
        labels.setdefault(trace.workload, trace.workload.text.partition(":")[2])
        label = trace.schedule if trace.is_naive else _format_summary(name, trials[name], failed[name])
        if trace.result is not None and (label, trace.workload) not in measured_keys:
            row = ResultRow(label, verified=True, gflops=trace.result.gflops)
            _add_result(results, Result(trace.workload, trace.device, trace.device, 0, (row,)))
    return [labels[workload] for workload in results], list(results.values())


def _add_result(results: dict[Workload, Result], added_result: Result) -> None:
    existing = results.get(added_result.workload)
    rows = (*existing.rows, *added_result.rows) if existing else added_result.rows
    results[added_result.workload] = Result(
        added_result.workload, added_result.device, added_result.device_name, added_result.seed, rows
    )


def _format_summary(name: str, trials: int, failed: int) -> str:
    failure_text = f", {failed / trials:.0%} failed" if failed else ""
    return f"{name}, {trials:,} trial{'' if trials == 1 else 's'}{failure_text}"


def _make_names(traces: Sequence[Trace]) -> list[str]:
    """Return the schedule of each search, with its device and its log if the searches differ in them."""
    devices, logs = {trace.device for trace in traces}, {trace.log for trace in traces}
    names = []
    for trace in traces:
        device = f" on {trace.device}" if len(devices) > 1 else ""
        log = f"{trace.log}: " if len(logs) > 1 else ""
        names.append(f"{log}{trace.schedule}{device}")
    return names
