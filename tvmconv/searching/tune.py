"""Tuning: propose configs, measure them, put the records on disk, learn from them, until enough is known."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tvmconv import devices, library
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error, TuningError
from tvmconv.logs.best import log_files
from tvmconv.logs.lines import BadLines, in_one_line
from tvmconv.logs.log import Log, read
from tvmconv.measuring.measurer import Measurer
from tvmconv.searching.status import Status
from tvmconv.searching.tuners import Tuner, make
from tvmconv.searching.tuners.xgb import XGBTuner

if TYPE_CHECKING:
    from tvmconv.logs.record import Record
    from tvmconv.workloads import Workload

FINALISTS = 3  # of the fastest configs, measured again at the end


@dataclass(frozen=True)
class Tuned:
    """What came of a tuning.

    Attributes:
        status: at its end; its best record is what was fastest during the search.
        final: the best record, measured once more on fresh inputs, and verified again (if that was wanted); None if
            nothing succeeded.
        stages: mean milliseconds a trial by stage, of this session; empty if it measured nothing.
        seconds: how long this session measured, from its first config to its last record.
    """

    status: Status
    final: Record | None
    stages: dict[str, float]
    seconds: float


def tune(
    workload: Workload,
    schedule: str | library.Schedule = "direct",
    tuner: str = "xgb",
    *,
    trials: int | None = None,
    seconds: float | None = None,
    log: str | os.PathLike[str] = "tuning.jsonl",
    device: str | Device | Sequence[str | Device] = "auto",
    seed: int = 0,
    patience: int | None = None,
    transfer: Iterable[str | os.PathLike[str]] = (),
    workers: int | None = None,
    compare: bool = True,
    confirm: bool = True,
    progress: Callable[[Status], None] | None = None,
) -> Tuned:
    """Search for the fastest config of a schedule.

    Every measurement is in the log before it is counted. What the log has already of this workload, schedule and device
    counts: the same call after an interruption goes on where that one was.

    Args:
        workload: what to compute.
        schedule: how; its knobs make the space.
        tuner: "xgb", "ga", "random" or "grid".
        trials: how many records there shall be, those in the log included; 512 if `seconds` is not given either.
        seconds: how long it may take, on the clock, earlier sessions included; one config is measured at least.
        log: the file to append to.
        device: where to measure: a device, several of one architecture, "cuda" for all GPUs of this host, or "auto" for
            these or else the first device of OpenCL.
        seed: of the tuner.
        patience: end after so many records without a better one.
        transfer: logs, or folders of logs, whose records of other workloads the xgb tuner learns from as well.
        workers: processes that build; by default one less than there are processors.
        compare: measure the naive schedule once, if the log does not have it.
        confirm: measure the fastest configs again at the end, on fresh inputs.
        progress: called with the status about ten times a second.

    Raises:
        TunerError: there is no such tuner.
        TuningError: trials, seconds or patience is not positive, or the tuner does not learn from other workloads.
        ScheduleError: no such schedule for this workload, or not for devices of this kind.
        DeviceError: a device is not there, or is lost.
        Error: the log cannot be read or written.
        KeyboardInterrupt: the user's; the log is whole.
    """
    if trials is None and seconds is None:
        trials = 512
    for name, value in (("trials", trials), ("seconds", seconds), ("patience", patience)):
        if value is not None and not value > 0:
            raise TuningError(f"{name} has to be positive, not {value}")
    chosen = library.find(workload, schedule) if isinstance(schedule, str) else schedule
    searcher = make(tuner, chosen.space(workload), seed)
    if others := log_files(transfer):
        if not isinstance(searcher, XGBTuner):
            raise TuningError(f"tuner {tuner} does not learn from other workloads: expected xgb")
        _transfer(searcher, chosen, workload, others)
    places = find_devices(device)
    chosen.check_kind(places[0])
    _check_writable(Path(log))
    search = _Search(workload, chosen, searcher, Log(log), places, workers, Status(trials, seconds))
    search.recall()
    measured, stages = search.run(patience, compare, progress or (lambda status: None))
    return Tuned(search.status, search.confirm() if confirm else search.status.best, stages, measured)


def _check_writable(log: Path) -> None:
    """Raise Error if records cannot be appended, before anything is measured for nothing."""
    with in_one_line(log, "write"):
        if log.exists() and not log.is_file():  # records that a pipe or /dev/null swallows would never be counted
            raise Error(f"cannot write {log}: expected a regular file")
        log.open("ab").close()


def _transfer(tuner: XGBTuner, schedule: library.Schedule, workload: Workload, logs: Iterable[Path]) -> None:
    """Have a tuner learn what logs have of the same schedule for other workloads."""
    found: dict[Workload, list[Record]] = {}
    for log in logs:
        for record in read(log, BadLines()):
            if record.schedule == schedule.name and record.workload != workload:
                found.setdefault(record.workload, []).append(record)
    for other, records in found.items():
        tuner.transfer(schedule.space(other), records)


def find_devices(device: str | Device | Sequence[str | Device], tracker: str | None = None) -> list[Device]:
    """The devices that a text names, or several texts: as `devices.find`, but for more than one.

    Args:
        device: "cuda" and "auto" name all GPUs of this host, "rpc:KEY" all workers under the key.
        tracker: host and port for "rpc:KEY"; by default those of TVM_TRACKER_HOST and TVM_TRACKER_PORT.

    Raises:
        DeviceError: a text names no device, one that is not here, or an architecture; or nothing is named.
    """
    if not isinstance(device, (str, Device)):
        if not device:
            raise DeviceError("no device to measure on: expected one such as cuda:0 or opencl:0")
        return [place for each in device for place in find_devices(each, tracker)]
    if isinstance(device, str) and device.startswith("rpc:"):
        from tvmconv.devices import rpc

        return list(rpc.devices(device.removeprefix("rpc:"), rpc.tracker_address(tracker)))
    found = devices.find(device) if isinstance(device, str) else device
    if isinstance(found, devices.Arch):
        raise DeviceError(f"{found.text} is to compile for only: to measure choose cuda:N, opencl:N, rpc:KEY or auto")
    if found.kind == "cuda" and device in ("auto", "cuda"):
        from tvmconv.devices.cuda import device as cuda

        return [gpu for gpu in cuda.devices() if gpu.arch == found.arch]
    return [found]


class _Search:
    """One search: what it consists of, and how far it is."""

    def __init__(
        self,
        workload: Workload,
        schedule: library.Schedule,
        tuner: Tuner,
        log: Log,
        places: Sequence[Device],
        workers: int | None,
        status: Status,
    ):
        self.status = status
        self._workload = workload
        self._schedule = schedule
        self._naive = library.naive(workload)
        self._tuner = tuner
        self._log = log
        self._places = places
        self._workers = workers
        self._known: set[tuple[str, str, str, str]] = set()  # identities of the records that were counted
        self._best_first: list[Record] = []

    def recall(self) -> None:
        """Count and learn what the log has of this search."""
        self._take(self._log.new_records(self._workload), earlier=True)

    def run(
        self, patience: int | None, compare: bool, progress: Callable[[Status], None]
    ) -> tuple[float, dict[str, float]]:
        """Search until the end; seconds of measuring, and mean milliseconds a trial by stage."""
        status = self.status
        start = time.monotonic() - status.elapsed
        stages: dict[str, float] = {}
        if compare and status.reference is None:
            status.reference = self._measure_reference()
        status.elapsed = time.monotonic() - start
        begun = time.monotonic()
        if not self._ended(patience):
            with Measurer(self._workload, self._schedule, self._places, workers=self._workers) as measurer:
                exhausted = False
                while not self._ended(patience) and not (exhausted and not measurer.pending):
                    exhausted = not self._submit(measurer)
                    records = measurer.results(timeout=0.1)
                    status.elapsed = time.monotonic() - start
                    for record in records:
                        self._log.append(replace(record, elapsed=status.elapsed))
                    if records:
                        self._take(self._log.new_records(self._workload))
                    progress(status)
                stages = measurer.stages
        measured = time.monotonic() - begun
        return measured, stages

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

    def _ended(self, patience: int | None) -> bool:
        status = self.status
        return (
            (status.asked is not None and status.done >= status.asked)
            or (status.seconds is not None and status.elapsed >= status.seconds and status.done > 0)
            or (patience is not None and status.best is not None and status.since_best >= patience)
        )

    def _measure_reference(self) -> Record | None:
        """The naive schedule's record, put into the log; None where it is the one that is searched."""
        if self._naive is None or self._schedule.name == self._naive.name:
            return None
        with Measurer(self._workload, self._naive, self._places[:1], workers=1) as measurer:
            (record,) = _measure_all(measurer, [{}])
        self._log.append(record)
        return record

    def confirm(self) -> Record | None:
        """The fastest configs once more, on fresh inputs and with nothing else going on: the fastest that is right."""
        if not self._best_first:
            return None
        with Measurer(self._workload, self._schedule, self._places[:1], workers=1) as measurer:
            records = _measure_all(measurer, [record.config for record in self._best_first])
        return min((record for record in records if record.ok), key=lambda record: record.cost, default=None)


def _measure_all(measurer: Measurer, configs: Sequence[dict]) -> list[Record]:
    """The records of some configs, all of them, in the order in which they end."""
    measurer.submit(configs)
    records: list[Record] = []
    while measurer.pending:
        records += measurer.results(timeout=1.0)
    return records
