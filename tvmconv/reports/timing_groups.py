"""The times of a workload in logs and comparisons, grouped by what may be compared with each other."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvmconv import kernel, registry
from tvmconv.analysis.speed_of_light import compute_unit_times, explain_text_counts
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.devices import Device
from tvmconv.errors import Error, get_reason, log_traceback
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.index import index_records
from tvmconv.logs.ranking import iterate_fastest_first
from tvmconv.logs.record import Record
from tvmconv.target import Target
from tvmconv.workloads import Workload


@dataclass(frozen=True)
class NamedTiming:
    """The time per launch of a schedule or a library, with a remark such as "best of 512"."""

    name: str
    seconds: float
    note: str = ""
    is_library: bool = False


@dataclass(frozen=True)
class TimingGroup:
    """Times of one workload that were measured under the same conditions and are comparable."""

    source: str
    device: str  # name of the device on which they were measured; "" for computed times
    timings: tuple[NamedTiming, ...]  # the fastest first
    failures: tuple[tuple[str, str], ...] = ()  # names without a time, each with the reason


def times_from_log(source: str, records: Iterable[Record]) -> TimingGroup | None:
    """Return the best time of each schedule in the records of one workload on one device; None if none has a time. The
    log's result comes first. Final timings come before trials, with which they are not comparable.
    """
    record_list = list(records)
    counts = Counter(record.schedule for record in record_list)
    best: dict[str, Record] = {}
    for record in iterate_fastest_first([*index_records(record_list).items()]):
        best.setdefault(record.schedule, record)
    is_mixed = len({record.final for record in best.values()}) > 1
    timings = []
    for name, record in best.items():
        kind = ("final timing" if record.final else "trial, not timed again") if is_mixed else ""
        note = ", ".join(filter(None, [f"best of {counts[name]:,}" if counts[name] > 1 else "", kind]))
        timings.append(NamedTiming(name, record.cost, note))
    return TimingGroup(source, record_list[0].device, tuple(timings)) if timings else None


def times_from_sweep(sweep: Sweep, workload: Workload) -> TimingGroup | None:
    """Return the times of a workload in a comparison; None if there are none."""
    for result in sweep.results:
        if result.workload == workload:
            timings = [
                NamedTiming(row.name, row.seconds, row.schedule or "", row.library is not None)
                for row in result.rows
                if row.seconds
            ]
            failures = tuple((row.name, row.failure) for row in result.rows if row.failure)
            return TimingGroup(sweep.name, result.device_name, _sort_by_time(timings), failures)
    return None


def times_from_code(
    workload: Workload, device: Device, device_spec: Target, schedule_names: Sequence[str] | None = None
) -> TimingGroup:
    """Estimate from their code the times of schedules, by default of all, with their default knobs. Each time is the
    longest that one unit of the GPU needs alone; latencies and launches may add to it.
    """
    timings, failures = [], []
    for schedule in registry.schedules(workload):
        is_selected = schedule_names is None or schedule.name in schedule_names
        if is_selected and schedule.can_run_on(device.kind, device.arch):
            try:
                built_kernel = kernel.build_for_device(workload, schedule, device, None)
                slowest_unit, *_ = compute_unit_times(built_kernel, device_spec)
                text = " of its TIR" if explain_text_counts(built_kernel) else ""
                note = f"estimate{text}: {slowest_unit.unit} alone"
                timings.append(NamedTiming(schedule.name, slowest_unit.seconds, note))
            except Error as error:
                log_traceback(error)
                failures.append((schedule.name, get_reason(error)))
    return TimingGroup(f"the code, computed for {device_spec.name}", "", _sort_by_time(timings), tuple(failures))


def times_from_model(workload: Workload, device: Device) -> TimingGroup | None:
    """Return the cost model's prediction for a workload's most promising config; None if it has none."""
    for candidate in recommend_configs(workload, device, 1)[:1]:
        return TimingGroup("the cost model, predicted", "", (NamedTiming(candidate.schedule, candidate.seconds),))
    return None


def _sort_by_time(timings: Sequence[NamedTiming]) -> tuple[NamedTiming, ...]:
    return tuple(sorted(timings, key=lambda timing: timing.seconds))


def format_dates(records: Sequence[Record]) -> str:
    """Return the dates of the first and the last record, "2026-11-20 to 2026-11-21"; "" if they are unknown."""
    timestamps = [record.timestamp for record in records if 0 < record.timestamp < 1e11]
    if not timestamps:
        return ""
    ends = (min(timestamps), max(timestamps))
    dates = [datetime.datetime.fromtimestamp(each, datetime.timezone.utc).date().isoformat() for each in ends]
    return " to ".join(dict.fromkeys(dates))
