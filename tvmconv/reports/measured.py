"""The times of a workload that logs and comparisons have, each with those that it may be compared with."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvmconv import kernel, library
from tvmconv.analysis.bounds import bounds, text_only
from tvmconv.devices import Device
from tvmconv.errors import Error, log_traceback, reason_of
from tvmconv.experiments.sweep import Sweep
from tvmconv.knowledge.choose import promising
from tvmconv.knowledge.features import Machine
from tvmconv.logs.best import fastest_first
from tvmconv.logs.index import index_records
from tvmconv.logs.record import Record
from tvmconv.workloads import Workload


@dataclass(frozen=True)
class Timed:
    """A schedule or a library, and how long it takes.

    Attributes:
        name: of it.
        seconds: a launch.
        note: what else is known, such as "best of 512"; "" for nothing.
        library: whether it is one.
    """

    name: str
    seconds: float
    note: str = ""
    library: bool = False


@dataclass(frozen=True)
class Together:
    """Times of one workload that were taken together: only these are compared.

    Attributes:
        source: where they are from.
        device: the name of what they were measured on; "" for times that are computed.
        times: the best first.
        failed: what has no time, and why.
    """

    source: str
    device: str
    times: tuple[Timed, ...]
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def computed(self) -> bool:
        """Whether nothing was measured."""
        return not self.device


def of_log(source: str, records: Iterable[Record]) -> Together | None:
    """Return the best time of each schedule in a log, the log's result first; None if no record has a time.

    Final timings come before trials, with which they do not compare.

    Args:
        source: the log's name.
        records: of one workload on one device.
    """
    kept = list(records)
    counts = Counter(record.schedule for record in kept)
    best: dict[str, Record] = {}
    for record in fastest_first([*index_records(kept).items()]):
        best.setdefault(record.schedule, record)
    mixed = len({record.final for record in best.values()}) > 1
    found = tuple(Timed(name, record.cost, _note(record, counts[name], mixed=mixed)) for name, record in best.items())
    return Together(source, kept[0].device, found) if found else None


def _note(record: Record, count: int, *, mixed: bool) -> str:
    """Return how the best record of a schedule was timed, and among how many records."""
    how = ("final timing" if record.final else "trial, not timed again") if mixed else ""
    return ", ".join(filter(None, [f"best of {count:,}" if count > 1 else "", how]))


def of_sweep(sweep: Sweep, workload: Workload) -> Together | None:
    """What a comparison has of a workload; None if it has nothing."""
    for result in sweep.results:
        if result.workload == workload:
            times = [
                Timed(row.name, row.timing.median, row.schedule or "", row.library is not None)
                for row in result.rows
                if row.timing
            ]
            failed = tuple((row.name, row.failure) for row in result.rows if row.failure)
            return Together(sweep.name, result.device_name, _fastest_first(times), failed)
    return None


def of_code(workload: Workload, place: Device, machine: Machine) -> Together | None:
    """Estimate by their code how long all schedules take with their default knobs.

    Each time is the longest that one unit of the GPU needs by itself; latency and launches may add to it.

    Args:
        workload: what to compute.
        place: what to compile for.
        machine: the GPU.
    """
    times, failed = [], []
    for schedule in library.schedules(workload):
        if schedule.runs_on(place.kind, place.arch):
            try:
                built = kernel.build_on(workload, schedule, place, None)
                first, *_ = bounds(built, machine)
                text = " of its text" if text_only(built) else ""
                times.append(Timed(schedule.name, first.seconds, f"estimate{text}: {first.unit} alone"))
            except Error as error:
                log_traceback(error)
                failed.append((schedule.name, reason_of(error)))
    return Together(f"the code, computed for {machine.name}", "", _fastest_first(times), tuple(failed))


def of_model(workload: Workload, place: Device) -> Together | None:
    """What the model expects of a workload's most promising config; None where it knows nothing."""
    for best in promising(workload, place, 1)[:1]:
        return Together("the model, which predicts", "", (Timed(best.schedule, best.seconds),))
    return None


def _fastest_first(times: Sequence[Timed]) -> tuple[Timed, ...]:
    return tuple(sorted(times, key=lambda each: each.seconds))


def dates(records: Sequence[Record]) -> str:
    """From when to when records are: "2026-11-20 to 2026-11-21"; "" where they do not tell."""
    told = [record.timestamp for record in records if 0 < record.timestamp < 1e11 and math.isfinite(record.timestamp)]
    if not told:
        return ""
    first, last = (
        datetime.datetime.fromtimestamp(each, datetime.timezone.utc).date().isoformat()
        for each in (min(told), max(told))
    )
    return first if first == last else f"{first} to {last}"
