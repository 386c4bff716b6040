"""The times of a workload in logs and comparisons, grouped by what may be compared with each other."""

from __future__ import annotations

import datetime
import math
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
    """The time of a schedule or a library.

    Attributes:
        name: Name of the schedule or library.
        seconds: Seconds per launch.
        note: Remark such as "best of 512"; "" for none.
        is_library: Whether this is a library.
    """

    name: str
    seconds: float
    note: str = ""
    is_library: bool = False


@dataclass(frozen=True)
class TimingGroup:
    """Times of one workload that were measured under the same conditions and are comparable.

    Attributes:
        source: Source of the times.
        device: Name of the device on which they were measured; "" for computed times.
        timings: Timings, the fastest first.
        failures: Names without a time, each with the reason.
    """

    source: str
    device: str
    timings: tuple[NamedTiming, ...]
    failures: tuple[tuple[str, str], ...] = ()

    @property
    def is_computed(self) -> bool:
        """Whether the times are computed instead of measured."""
        return not self.device


def times_from_log(source: str, records: Iterable[Record]) -> TimingGroup | None:
    """Return the best time of each schedule in a log, the log's result first; None if no record has a time.

    Final timings come before trials, with which they are not comparable.

    Args:
        source: Name of the log.
        records: Records of one workload on one device.
    """
    record_list = list(records)
    counts = Counter(record.schedule for record in record_list)
    best: dict[str, Record] = {}
    for record in iterate_fastest_first([*index_records(record_list).items()]):
        best.setdefault(record.schedule, record)
    is_mixed = len({record.final for record in best.values()}) > 1
    timings = tuple(
        NamedTiming(name, record.cost, _describe_timing(record, counts[name], is_mixed=is_mixed))
        for name, record in best.items()
    )
    return TimingGroup(source, record_list[0].device, timings) if timings else None


def _describe_timing(record: Record, count: int, *, is_mixed: bool) -> str:
    """Return how the best record of a schedule was timed, and the number of records."""
    timing_kind = ("final timing" if record.final else "trial, not timed again") if is_mixed else ""
    return ", ".join(filter(None, [f"best of {count:,}" if count > 1 else "", timing_kind]))


def times_from_sweep(sweep: Sweep, workload: Workload) -> TimingGroup | None:
    """Return the times of a workload in a comparison; None if there are none."""
    for result in sweep.results:
        if result.workload == workload:
            timings = [
                NamedTiming(row.name, row.timing.median, row.schedule or "", row.library is not None)
                for row in result.rows
                if row.timing
            ]
            failures = tuple((row.name, row.failure) for row in result.rows if row.failure)
            return TimingGroup(sweep.name, result.device_name, _sort_by_time(timings), failures)
    return None


def times_from_code(workload: Workload, device: Device, device_spec: Target) -> TimingGroup | None:
    """Estimate from their code the times of all schedules with their default knobs.

    Each time is the longest that one unit of the GPU needs alone; latencies and launches may add to it.

    Args:
        workload: The workload.
        device: Device to compile for.
        device_spec: Specification of the GPU.
    """
    timings, failures = [], []
    for schedule in registry.schedules(workload):
        if schedule.can_run_on(device.kind, device.arch):
            try:
                built_kernel = kernel.build_for_device(workload, schedule, device, None)
                slowest_unit, *_ = compute_unit_times(built_kernel, device_spec)
                text = " of its TIR" if explain_text_counts(built_kernel) else ""
                timings.append(
                    NamedTiming(schedule.name, slowest_unit.seconds, f"estimate{text}: {slowest_unit.unit} alone")
                )
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
    timestamps = [
        record.timestamp for record in records if 0 < record.timestamp < 1e11 and math.isfinite(record.timestamp)
    ]
    if not timestamps:
        return ""
    first, last = (
        datetime.datetime.fromtimestamp(timestamp, datetime.timezone.utc).date().isoformat()
        for timestamp in (min(timestamps), max(timestamps))
    )
    return first if first == last else f"{first} to {last}"
