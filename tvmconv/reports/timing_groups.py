"""The times of a workload that logs and comparisons have, each with those that it may be compared with."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvmconv import kernel, registry
from tvmconv.analysis.speed_of_light import compute_unit_times, explain_text_counts
from tvmconv.cost_model.features import DeviceSpec
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.devices import Device
from tvmconv.errors import Error, get_reason, log_traceback
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.index import index_records
from tvmconv.logs.ranking import iterate_fastest_first
from tvmconv.logs.record import Record
from tvmconv.workloads import Workload


@dataclass(frozen=True)
class NamedTiming:
    """A schedule or a library, and how long it takes.

    Attributes:
        name: of it.
        seconds: a launch.
        note: what else is known, such as "best of 512"; "" for nothing.
        is_library: whether it is one.
    """

    name: str
    seconds: float
    note: str = ""
    is_library: bool = False


@dataclass(frozen=True)
class TimingGroup:
    """Times of one workload that were taken together: only these are compared.

    Attributes:
        source: where they are from.
        device: the name of what they were measured on; "" for times that are computed.
        timings: the best first.
        failures: what has no time, and why.
    """

    source: str
    device: str
    timings: tuple[NamedTiming, ...]
    failures: tuple[tuple[str, str], ...] = ()

    @property
    def is_computed(self) -> bool:
        """Whether nothing was measured."""
        return not self.device


def times_from_log(source: str, records: Iterable[Record]) -> TimingGroup | None:
    """Return the best time of each schedule in a log, the log's result first; None if no record has a time.

    Final timings come before trials, with which they do not compare.

    Args:
        source: the log's name.
        records: of one workload on one device.
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
    """Return how the best record of a schedule was timed, and among how many records."""
    timing_kind = ("final timing" if record.final else "trial, not timed again") if is_mixed else ""
    return ", ".join(filter(None, [f"best of {count:,}" if count > 1 else "", timing_kind]))


def times_from_sweep(sweep: Sweep, workload: Workload) -> TimingGroup | None:
    """What a comparison has of a workload; None if it has nothing."""
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


def times_from_code(workload: Workload, device: Device, device_spec: DeviceSpec) -> TimingGroup | None:
    """Estimate by their code how long all schedules take with their default knobs.

    Each time is the longest that one unit of the GPU needs by itself; latency and launches may add to it.

    Args:
        workload: what to compute.
        device: what to compile for.
        device_spec: the GPU.
    """
    timings, failures = [], []
    for schedule in registry.schedules(workload):
        if schedule.can_run_on(device.kind, device.arch):
            try:
                built_kernel = kernel.build_for_device(workload, schedule, device, None)
                slowest_unit, *_ = compute_unit_times(built_kernel, device_spec)
                text = " of its text" if explain_text_counts(built_kernel) else ""
                timings.append(
                    NamedTiming(schedule.name, slowest_unit.seconds, f"estimate{text}: {slowest_unit.unit} alone")
                )
            except Error as error:
                log_traceback(error)
                failures.append((schedule.name, get_reason(error)))
    return TimingGroup(f"the code, computed for {device_spec.name}", "", _sort_by_time(timings), tuple(failures))


def times_from_model(workload: Workload, device: Device) -> TimingGroup | None:
    """What the model expects of a workload's most promising config; None where it knows nothing."""
    for candidate in recommend_configs(workload, device, 1)[:1]:
        return TimingGroup("the model, which predicts", "", (NamedTiming(candidate.schedule, candidate.seconds),))
    return None


def _sort_by_time(timings: Sequence[NamedTiming]) -> tuple[NamedTiming, ...]:
    return tuple(sorted(timings, key=lambda timing: timing.seconds))


def format_dates(records: Sequence[Record]) -> str:
    """From when to when records are: "2026-11-20 to 2026-11-21"; "" where they do not tell."""
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
