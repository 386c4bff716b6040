"""One search: propose configs, measure them, put the records on disk, learn from them, until enough is known."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvmconv import library
from tvmconv.devices import Device
from tvmconv.errors import Error, TuningError
from tvmconv.gpu import Limits
from tvmconv.logs.best import log_files
from tvmconv.logs.lines import BadLines, in_one_line
from tvmconv.logs.log import Log, read
from tvmconv.logs.record import Record
from tvmconv.measuring.measurer import Measurer
from tvmconv.searching.status import Status
from tvmconv.searching.tuners import Tuner, make
from tvmconv.searching.tuners.xgb import XGBTuner
from tvmconv.workloads import Workload

FINALISTS = 3  # of the fastest configs, measured again at the end
TRIALS = 512  # where neither their number nor the time is limited


@dataclass(frozen=True)
class Request:
    """What is asked of a search, whatever the workload, the schedule and the device.

    Attributes:
        tuner: "xgb", "ga", "random" or "grid".
        trials: how many records there shall be, those in the log included; `TRIALS` if `seconds` is not given either.
        seconds: how long it may take, on the clock, earlier sessions included; one config is measured at least.
        log: the file to append to.
        seed: of the tuner.
        patience: end after so many records without a better one.
        transfer: logs, or folders of logs, whose records of other workloads the xgb tuner learns from as well.
        workers: processes that build; by default one less than there are processors.
        compare: measure the naive schedule once, if the log does not have it.
        confirm: measure the fastest configs again at the end, on fresh inputs.

    Raises:
        TuningError: trials, seconds or patience is not positive.
    """

    tuner: str = "xgb"
    trials: int | None = None
    seconds: float | None = None
    log: str | os.PathLike[str] = "tuning.jsonl"
    seed: int = 0
    patience: int | None = None
    transfer: Iterable[str | os.PathLike[str]] = ()
    workers: int | None = None
    compare: bool = True
    confirm: bool = True

    def __post_init__(self) -> None:
        for name in ("trials", "seconds", "patience"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise TuningError(f"{name} has to be positive, not {value}")


@dataclass(frozen=True)
class Tuned:
    """What came of a tuning.

    Attributes:
        status: at its end; its best record is what was fastest during the search.
        final: the best record, measured once more on fresh inputs, and verified again (if that was wanted); None if
            nothing succeeded.
        phases: mean milliseconds a trial by phase, of this session; empty if it measured nothing.
        seconds: how long this session measured, from its first config to its last record.
    """

    status: Status
    final: Record | None
    phases: dict[str, float]
    seconds: float

    @property
    def stages(self) -> dict[str, float]:
        """`phases`, under the name that it had in version 0.1."""
        return self.phases

    @property
    def cost(self) -> float:
        """Seconds a launch of the best record, as measured last; `math.inf` if nothing succeeded."""
        found = self.final or self.status.best
        return found.cost if found else math.inf


def search(
    workload: Workload,
    schedule: library.Schedule,
    places: Sequence[Device],
    request: Request,
    progress: Callable[[Status], None],
) -> Tuned:
    """Search for the fastest config of one schedule.

    Args:
        workload: what to compute.
        schedule: how; its knobs make the space, and the device's limits bound it.
        places: devices of one architecture, to measure on.
        request: how to search, and how long.
        progress: called with the status about ten times a second.

    Raises:
        TunerError: there is no such tuner.
        TuningError: the tuner does not learn from other workloads.
        ScheduleError: the schedule is not for devices of this kind.
        DeviceError: a device is lost, or has no such dtype.
        Error: the log cannot be read or written.
        KeyboardInterrupt: the user's; the log is whole.
    """
    device = places[0]
    schedule.check_runs_on(device.kind, device.arch, device.text)
    device.check_dtypes(workload.argument_dtypes)
    tuner = make(request.tuner, schedule.space(workload, device.limits), request.seed)
    if others := log_files(request.transfer):
        if not isinstance(tuner, XGBTuner):
            raise TuningError(f"tuner {request.tuner} does not learn from other workloads: expected xgb")
        _transfer(tuner, schedule, workload, others, device.limits)
    _check_writable(Path(request.log))
    under_way = _Search(workload, schedule, tuner, places, request)
    under_way.recall()
    seconds, phases = under_way.run(progress)
    final = under_way.confirm() if request.confirm else under_way.status.best
    return Tuned(under_way.status, final, phases, seconds)


def _check_writable(log: Path) -> None:
    """Raise Error if records cannot be appended, before anything is measured for nothing."""
    with in_one_line(log, "write"):
        if log.exists() and not log.is_file():  # records that a pipe or /dev/null swallows would never be counted
            raise Error(f"cannot write {log}: expected a regular file")
        log.open("ab").close()


def _transfer(
    tuner: XGBTuner, schedule: library.Schedule, workload: Workload, logs: Iterable[Path], limits: Limits
) -> None:
    """Have a tuner learn what logs have of the same schedule for other workloads."""
    found: dict[Workload, list[Record]] = {}
    for log in logs:
        for record in read(log, BadLines()):
            if record.schedule == schedule.name and record.workload != workload:
                found.setdefault(record.workload, []).append(record)
    for other, records in found.items():
        tuner.transfer(schedule.space(other, limits), records)


class _Search:
    """One search: what it consists of, and how far it is."""

    def __init__(
        self,
        workload: Workload,
        schedule: library.Schedule,
        tuner: Tuner,
        places: Sequence[Device],
        request: Request,
    ):
        trials = TRIALS if request.trials is None and request.seconds is None else request.trials
        self.status = Status(trials, request.seconds)
        self._request = request
        self._workload = workload
        self._schedule = schedule
        self._naive = library.naive(workload)
        self._tuner = tuner
        self._log = Log(request.log)
        self._places = places
        self._known: set[tuple[str, str, str, str]] = set()  # identities of the records that were counted
        self._best_first: list[Record] = []

    def recall(self) -> None:
        """Count and learn what the log has of this search."""
        self._take(self._log.new_records(self._workload), earlier=True)

    def run(self, progress: Callable[[Status], None]) -> tuple[float, dict[str, float]]:
        """Search until the end; seconds of measuring, and mean milliseconds a trial by phase."""
        status = self.status
        start = time.monotonic() - status.elapsed
        phases: dict[str, float] = {}
        with contextlib.ExitStack() as stack:
            measurer = None
            if not self._ended():  # its builders start while the naive schedule is measured
                measurer = Measurer(self._workload, self._schedule, self._places, workers=self._request.workers)
                stack.enter_context(measurer)
            if self._request.compare and status.reference is None:
                status.reference = self._measure_reference()
            status.elapsed = time.monotonic() - start
            begun = time.monotonic()
            if measurer:
                self._measure(measurer, start, progress)
                phases = measurer.phases
        return time.monotonic() - begun, phases

    def _measure(self, measurer: Measurer, start: float, progress: Callable[[Status], None]) -> None:
        """Propose, measure, keep and learn until the end; `start` is when the clock of the search began to run."""
        status, exhausted = self.status, False
        while not self._ended() and not (exhausted and not measurer.pending):
            exhausted = not self._submit(measurer)
            measured = measurer.results(timeout=0.1)
            status.elapsed = time.monotonic() - start
            for measurement in measured:
                self._log.append(Record.of(measurement, status.elapsed))
            if measured:
                self._take(self._log.new_records(self._workload))
            progress(status)

    def _submit(self, measurer: Measurer) -> bool:
        """Keep the measurer busy; False if the space is exhausted.

        Few large requests rather than many small ones: each has the tuner train anew.
        """
        ahead = max(2 * measurer.workers, self._tuner.batch)
        room = 2 * ahead - measurer.pending
        if self.status.asked is not None:
            room = min(room, self.status.asked - self.status.done - measurer.pending)
        if measurer.pending >= ahead or room < 1:
            return True
        configs = self._tuner.propose(room)
        measurer.submit(configs)
        return bool(configs)

    def _take(self, records: Iterable[Record], *, earlier: bool = False) -> None:
        """Count and learn those records that belong to this search and are new to it."""
        new = []
        for record in records:
            if record.device != self._places[0].name or record.workload != self._workload:
                continue
            if self._naive and record.schedule == self._naive.name and not record.config:
                self.status.reference = record
            if record.schedule == self._schedule.name and record.identity not in self._known:
                self._known.add(record.identity)
                self.status.count(record, earlier=earlier)
                new.append(record)
        self._best_first = sorted([*self._best_first, *(r for r in new if r.ok)], key=lambda r: r.cost)[:FINALISTS]
        self._tuner.learn(new)

    def _ended(self) -> bool:
        status, patience = self.status, self._request.patience
        return (
            (status.asked is not None and status.done >= status.asked)
            or (status.seconds is not None and status.elapsed >= status.seconds and status.done > 0)
            or (patience is not None and status.best is not None and status.since_best >= patience)
        )

    def _measure_reference(self) -> Record | None:
        """The naive schedule's record, put into the log; None where it is the one that is searched."""
        if self._naive is None or self._schedule.name == self._naive.name:
            return None
        with Measurer(self._workload, self._naive, self._places[:1], workers=0) as measurer:
            (record,) = _measure_all(measurer, [{}])
        self._log.append(record)
        return record

    def confirm(self) -> Record | None:
        """The fastest configs once more, on fresh inputs and with nothing else going on: the fastest that is right."""
        if not self._best_first:
            return None
        with Measurer(self._workload, self._schedule, self._places[:1], workers=0) as measurer:
            records = _measure_all(measurer, [record.config for record in self._best_first])
        return min((record for record in records if record.ok), key=lambda record: record.cost, default=None)


def _measure_all(measurer: Measurer, configs: Sequence[dict]) -> list[Record]:
    """The records of some configs, all of them, in the order in which they end."""
    measurer.submit(configs)
    records: list[Record] = []
    while measurer.pending:
        records += map(Record.of, measurer.results(timeout=1.0))
    return records
