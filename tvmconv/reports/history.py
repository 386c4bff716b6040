"""The course of searches, as the numbers of a chart."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """The trials of one schedule for one workload in one log, in the order of the log."""

    log: str
    workload: Workload
    schedule: str
    device: str
    costs: list[float] = field(default_factory=list)  # seconds per launch of each trial; infinite for a failed one
    elapsed: list[float | None] = field(default_factory=list)  # seconds of tuning at its end; None if unknown
    result: Record | None = None  # best record of the schedule by the rule of `tvmconv.logs.ranking`

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
    """Seconds of tuning of one workload on one device over all its sessions in a log. A search writes the seconds since
    its start. In a log that was merged from several, this time starts again with each of them. Sessions are therefore
    concatenated, as if the second had started when the first ended. Searches that wrote to the log at the same time
    share their time.
    """

    def __init__(self) -> None:
        self._session_start = self._session_end = 0.0  # this session, in seconds of all sessions
        self._last_elapsed = self._last_timestamp = 0.0  # previous record

    def advance(self, elapsed: float | None, timestamp: float) -> float | None:
        """Return the seconds of all sessions at a record; None if the record has no time."""
        if elapsed is None:
            return None
        is_concurrent = self._last_timestamp < timestamp and timestamp - elapsed < self._last_timestamp
        if elapsed < self._last_elapsed and not is_concurrent:
            self._session_start = self._session_end
        self._session_end = max(self._session_end, self._session_start + elapsed)
        self._last_elapsed, self._last_timestamp = elapsed, timestamp
        return self._session_end


class _TraceCollector:
    """A collector of a log's records by search, in the order in which the searches started. Final timings are not
    trials; they take the place of trials only in a log that was reduced to them.
    """

    def __init__(self, log: str) -> None:
        self._log = log
        self._traces: dict[bool, dict[tuple[Workload, str, str], Trace]] = {False: {}, True: {}}  # by `final`
        self._clocks: dict[tuple[Workload, str], _TuningClock] = {}

    def add(self, key: RecordKey, *, final: bool, elapsed: float | None, timestamp: float) -> Trace:
        """Add the time of a record to its trace, and return the trace, which still needs the record's cost."""
        trace = self._traces[final].setdefault(key[:3], Trace(self._log, *key[:3]))
        clock = self._clocks.setdefault((key.workload, key.device), _TuningClock())
        trace.elapsed.append(clock.advance(elapsed, timestamp))
        return trace

    def finish(self, indexes: Mapping[RecordKey, LogIndex]) -> list[Trace]:
        """Return the traces, each with its result."""
        trials, finals = self._traces[False], self._traces[True]
        traces = trials | {key: trace for key, trace in finals.items() if key not in trials}
        for key, trace in traces.items():
            own_indexes = [(record_key, index) for record_key, index in indexes.items() if record_key[:3] == key]
            trace.result = next(iterate_fastest_first(own_indexes), None)
        return [*traces.values()]


def collect_traces(log: str, records: Iterable[Record]) -> list[Trace]:
    """Return the searches of the records of a log, in the order in which they started."""
    record_list, collector = list(records), _TraceCollector(log)
    for record in record_list:
        elapsed, timestamp = record.elapsed, record.timestamp
        trace = collector.add(record.key, final=record.final, elapsed=elapsed, timestamp=timestamp)
        trace.costs.append(record.cost)
    return collector.finish(index_records(record_list))


def read_traces(log: str, path: Path, invalid_lines: InvalidLines) -> list[Trace]:
    """Return the searches of a log, as `collect_traces` does; lines are scanned, not fully parsed. Lines that are not
    records are added to `invalid_lines`.
    """
    indexer, collector = LogIndexer(path), _TraceCollector(log)
    pending_costs: list[tuple[Trace, bytes | None]] = []  # text of the times, None for a failure
    scanned_lines = scan_log(path, invalid_lines, lambda key: (key, indexer.index_of_key(key)))
    for number, (line, scanned) in enumerate(scanned_lines, 1):
        try:
            elapsed, timestamp = scanned.parse_times()
        except RecordError as error:
            invalid_lines.add_line(line.number, error)
            continue
        key, index = scanned.header
        index.add_scanned(scanned, line.offset)
        trace = collector.add(key, final=scanned.is_final, elapsed=elapsed, timestamp=timestamp)
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
    """The best throughput of a search after each trial."""

    name: str
    best_gflops: tuple[float, ...]  # GFLOP/s; 0 as long as all trials have failed
    elapsed: tuple[float, ...]  # seconds of tuning after each trial; empty if one is unknown
    num_failed: int
    result: Record | None = None  # often not the fastest trial; None if none has a valid time

    @property
    def summary(self) -> str:
        """Text for a legend: "direct, 512 trials, 4% failed"."""
        return _format_summary(self.name, len(self.best_gflops), self.num_failed)


@dataclass(frozen=True)
class HistoryInfo:
    """The contents of a chart of searches for one workload."""

    title: str
    curves: tuple[BestSoFarCurve, ...]
    targets: tuple[tuple[str, float], ...]  # names and GFLOP/s of the libraries and schedules to compare with
    results: tuple[tuple[str, Record], ...] = ()  # names and best records by log and device


def compute_history_info(workload: Workload, traces: Sequence[Trace], sweeps: Sequence[Sweep] = ()) -> HistoryInfo:
    """Return the searches for a workload with the libraries and the fastest schedule that sweeps measured for it. The
    naive schedule, which a tuner measures once for comparison, is a target and not a search. Traces and sweeps of other
    workloads are left out.
    """
    workload_traces = [trace for trace in traces if trace.workload == workload]
    search_traces = [trace for trace in workload_traces if not trace.is_naive] or workload_traces
    naive_traces = [trace for trace in workload_traces if trace.is_naive and trace not in search_traces]
    naive_record = find_best_of_records(trace.result for trace in naive_traces if trace.result)
    targets = [(naive_record.schedule, naive_record.gflops)] if naive_record else []
    for result in (result for sweep in sweeps for result in sweep.results if result.workload == workload):
        rows = [row for row in result.rows if row.gflops]
        fastest_first = sorted(rows, key=lambda row: -(row.gflops or 0))
        schedules = [row for row in fastest_first if not row.library]
        targets += [(row.name, row.gflops or 0) for row in (*schedules[:1], *(row for row in rows if row.library))]
    return HistoryInfo(
        title=f"{workload} on {', '.join(dict.fromkeys(trace.device for trace in search_traces))}",
        curves=tuple(map(_make_curve, _make_names(search_traces), search_traces)),
        targets=tuple(targets),
        results=_find_best_results(workload_traces),
    )


def _make_curve(name: str, trace: Trace) -> BestSoFarCurve:
    elapsed = tuple(seconds for seconds in trace.elapsed if seconds is not None)
    return BestSoFarCurve(
        name=name,
        best_gflops=tuple(itertools.accumulate(trace.rates, max)),
        elapsed=elapsed if len(elapsed) == len(trace.costs) else (),
        num_failed=trace.num_failed,
        result=trace.result,
    )


def _find_best_results(traces: Sequence[Trace]) -> tuple[tuple[str, Record], ...]:
    """Return the best record of each log and device, with a text that names it and its kind of timing."""
    groups: defaultdict[tuple[str, str], list[tuple[str, Record]]] = defaultdict(list)
    for name, trace in zip(_make_names(traces), traces, strict=True):
        if trace.result is not None:
            groups[trace.log, trace.device].append((name, trace.result))
    best_results = []
    for group in groups.values():
        best = find_best_of_records(record for _, record in group)
        best_results += [(f"{name}: {format_result(record)}", record) for name, record in group if record is best]
    return tuple(best_results)


def format_result(record: Record) -> str:
    """Return the throughput of a record and its kind of timing: "12.8 GFLOP/s, final timing"."""
    return f"{format_significant(record.gflops)} GFLOP/s, {'final timing' if record.final else 'median of its trials'}"


def merge_into_sweep(traces: Sequence[Trace], sweeps: Sequence[Sweep] = ()) -> tuple[list[str], list[Result]]:
    """Return a label and a result per workload, the best of each search merged with the rows of sweeps. The workloads
    of the sweeps come first, under the sweep's labels; the others follow in the order of their searches, under their
    texts.
    """
    labels: dict[Workload, str] = {}
    results: dict[Workload, Result] = {}
    for label, result in (labeled_result for sweep in sweeps for labeled_result in sweep.labeled_results):
        labels.setdefault(result.workload, label)
        _add_result(results, result)
    measured_keys = {(row.name, result.workload) for result in results.values() for row in result.rows}
    names = _make_names(traces)
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


def _add_result(results: dict[Workload, Result], result: Result) -> None:
    earlier_rows = results[result.workload].rows if result.workload in results else ()
    merged = replace(result, rows=(*earlier_rows, *result.rows), peak_flops=None, peak_bandwidth=None)
    results[result.workload] = merged


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
