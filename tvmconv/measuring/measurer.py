"""Measuring configs: built in worker processes, verified and timed in device processes, whatever they do there."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from tvmconv import devices as known_devices
from tvmconv import library
from tvmconv.devices import Device
from tvmconv.devices.base import first_line
from tvmconv.devices.rpc import Remote
from tvmconv.errors import DeviceError, Error, ScheduleError
from tvmconv.measuring.builder import Task
from tvmconv.measuring.local import LocalRunner
from tvmconv.measuring.outcome import Measurement
from tvmconv.measuring.pipeline import Pipeline, Trial
from tvmconv.measuring.pool import Pool, workers_of
from tvmconv.measuring.remote import RemoteRunner
from tvmconv.measuring.runner import Runner
from tvmconv.measuring.stopwatch import Means
from tvmconv.verify import Problem
from tvmconv.version import VERSION

if TYPE_CHECKING:
    from tvmconv.knobs import Config
    from tvmconv.library import Schedule
    from tvmconv.workloads import Workload

POLL_SECONDS = 0.05  # between two looks at the clock and at the memory of the processes
CLOSE_SECONDS = 1.0  # for what computes a reference, or waits for a process to start, when nobody wants it any more
RUN_SECONDS = {"cuda": 10.0, "opencl": 60.0}  # PoCL compiles at the first launch, for up to 15 s on two cores


class Measurer:
    """Measures configs of schedules for one workload; a context manager.

    Configs go in with `submit` and come back measured from `results`, in the order in which they end, each exactly
    once. Building and timing go on meanwhile, in processes that end with the block (within `standing` they serve the
    next measurer), or with this process. A config that hangs, crashes, allocates without end or computes something else
    is a measurement with that error. Builders start at once, what holds a device with the first config.

    Args:
        workload: what to compute.
        schedules: how, one or several; their functions have to be at the top level of modules that can be imported.
        devices: where to measure: names, devices, or runners of another kind; all of one kind and architecture.
        workers: processes that build; by default one less than there are processors. With 0 there are none, for trials
            that were built before.
        build_timeout: seconds for one build.
        run_timeout: seconds for one candidate on the device; by default `RUN_SECONDS` of its kind.
        memory_limit: bytes of host memory for one candidate.
        seed: of the inputs; fresh ones by default.
        problem: the inputs and the reference instead, of the same workload; or a function that returns them, which is
            called by a thread of the measurer, so that nobody else waits for a reference.

    Raises:
        DeviceError: a device is not there, or the devices differ.
        ScheduleError: another process cannot import a schedule.
        WorkloadError: inputs and reference do not fit in memory.
    """

    def __init__(
        self,
        workload: Workload,
        schedules: Schedule | Sequence[Schedule],
        devices: Sequence[str | Device | Runner],
        *,
        workers: int | None = None,
        build_timeout: float = 20.0,
        run_timeout: float | None = None,
        memory_limit: int = 4 << 30,
        seed: int | None = None,
        problem: Problem | Callable[[], Problem] | None = None,
    ):
        chosen = [schedules] if isinstance(schedules, library.Schedule) else list(schedules)
        for schedule in chosen:
            _check_importable(schedule)
        self._first = chosen[0].name
        self._places = [known_devices.find(place) if isinstance(place, str) else place for place in devices]
        self._device = _common_device(self._places)
        by_name = {schedule.name: schedule for schedule in chosen}
        naive = library.naive(workload)
        self._control = Trial(naive.name, {}) if naive and workers != 0 else None
        if naive:
            by_name.setdefault(naive.name, naive)
        self._task = Task(workload, by_name, self._device, memory_limit)
        self._workers = workers_of(workers)
        self._build_timeout = build_timeout
        self._run_timeout = run_timeout or RUN_SECONDS[self._device.kind]
        self._problem = problem or Problem(workload, seed)
        self._means = Means()
        self._submitted = self._returned = 0

        self._trials: queue.SimpleQueue[Trial] = queue.SimpleQueue()
        self._pipeline: Pipeline | None = None
        self._ended: queue.SimpleQueue[Measurement | None] = queue.SimpleQueue()  # None: no more will come
        self._error: BaseException | None = None
        self._closing = False
        self._is_ready = threading.Event()  # all processes were started
        self._bell, self._rope = Pipe(duplex=False)
        # A thread keeps the devices busy while a tuner thinks.
        self._thread = threading.Thread(target=self._run, name="measurer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Measurer:
        return self

    @property
    def workers(self) -> int:
        """How many processes build."""
        return self._workers

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """How many configs were submitted that have not been handed out."""
        return self._submitted - self._returned

    @property
    def phases(self) -> dict[str, float]:
        """Where the time of a trial goes: mean milliseconds by phase, over the trials that came to it."""
        return self._means.means()

    @property
    def fastest(self) -> list[Trial]:
        """Those that were fastest so far, the fastest first, to be submitted once more as last timings."""
        return [replace(trial, final=True) for trial in self._pipeline.fastest] if self._pipeline else []

    def submit(self, configs: Sequence[Config], schedule: str | None = None) -> None:
        """Queue configs of a schedule, by default of the first."""
        self.submit_trials([Trial(schedule or self._first, config) for config in configs])

    def submit_trials(self, trials: Sequence[Trial]) -> None:
        """Queue configs of any of the schedules, or what was built before.

        Raises:
            Error: something has to be built, and there are no workers.
        """
        if not self._workers and any(trial.program is None for trial in trials):
            raise Error("nobody builds: without workers only what was built before can be measured")
        for trial in trials:
            self._trials.put(trial)
        self._submitted += len(trials)
        self._rope.send_bytes(b"more")

    def results(self, timeout: float) -> list[Measurement]:
        """What came of configs since the last call.

        Args:
            timeout: seconds to wait for the first; the list is empty when none came, or none is pending.

        Raises:
            DeviceError: no device can be measured on any more.
            HostError: the host or the device lets no program be built or run; what it failed at is not returned.
            Error: the builder processes do not start.
        """
        ended: list[Measurement] = []
        while self.pending > len(ended):
            try:
                measurement = self._ended.get(timeout=0 if ended or self._error else timeout)
            except queue.Empty:
                break
            if measurement is not None:
                ended.append(measurement)
        self._returned += len(ended)
        if self._error and not ended:
            raise self._error
        return ended

    def close(self) -> None:
        """End all processes, whatever they are doing, or hand them on; what was not handed out is lost.

        Where a reference is being computed, or a process being started, this waits `CLOSE_SECONDS` at most: what there
        is of processes ends later, when that is done.
        """
        self._closing = True
        if not self._bell.closed:
            self._rope.send_bytes(b"close")
            self._thread.join(None if self._is_ready.is_set() else CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._bell.close()
                self._rope.close()

    def _run(self) -> None:
        """What the thread does: all that speaks to the processes, which live no longer than the thread."""
        parts: list[Pool | Runner] = []
        try:
            builders = Pool(self._task, self._workers, self._build_timeout)
            parts.append(builders)
            wait([self._bell])  # for the first configs, while builders start: until then a device is for others
            if self._closing:
                return
            problem = self._problem() if callable(self._problem) else self._problem
            runners: list[Runner] = []
            for place in self._places:
                if self._closing:
                    return
                runners.append(self._runner(place, problem))
                parts.append(runners[-1])
            self._pipeline = pipeline = Pipeline(
                self._task, builders, runners, _versions(self._device), self._means, self._control
            )
            self._is_ready.set()
            while not self._closing:
                wait([self._bell, *pipeline.waitables()], POLL_SECONDS)
                while self._bell.poll():
                    self._bell.recv_bytes()
                while not self._trials.empty():
                    pipeline.submit(self._trials.get())
                for measurement in pipeline.poll():
                    self._ended.put(measurement)
        except BaseException as error:
            self._error = error
            self._ended.put(None)
        finally:
            for part in parts:
                part.close()

    def _runner(self, place: Device | Runner, problem: Problem) -> Runner:
        if isinstance(place, Remote):
            return RemoteRunner(place, problem, self._run_timeout, self._task.memory_limit)
        if isinstance(place, Device):
            return LocalRunner(place, problem, self._run_timeout, self._task.memory_limit)
        return place


def _check_importable(schedule: Schedule) -> None:
    """Raise ScheduleError if another process would not find the schedule's function."""
    where = f"schedule {schedule.name} is not at the top level of a module that can be imported"
    if schedule.function.__module__ == "__main__":
        raise ScheduleError(f"{where}: it is in the script that runs")
    try:
        pickle.dumps(schedule)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ScheduleError(f"{where}: {first_line(error)}") from error


def _common_device(places: Sequence[Device | Runner]) -> Device:
    """The device to build for, the first one; raises DeviceError if another needs another build, or has other times."""
    devices = [place if isinstance(place, Device) else place.device for place in places]
    if not devices:
        raise DeviceError("no device to measure on: expected one such as cuda:0 or opencl:0")
    first = devices[0]
    for device in devices[1:]:
        if (device.kind, device.arch) != (first.kind, first.arch):
            raise DeviceError(
                f"{first.text} ({first.arch or first.kind}) and {device.text} ({device.arch or device.kind}) take "
                "different programs: measure on devices of one architecture"
            )
        if device.name != first.name:
            raise DeviceError(
                f"times on {first.text} ({first.name}) and {device.text} ({device.name}) do not compare: measure on "
                "devices of one name"
            )
    return first


def _versions(device: Device) -> dict[str, str]:
    """Of the software that makes and runs the kernels."""
    versions = {"tvmconv": VERSION, "tvm": metadata.version("apache-tvm")}
    if device.kind != "cuda":
        return {**versions, "pyopencl": metadata.version("pyopencl")}
    from tvmconv.compiler import nvrtc

    return {**versions, "nvrtc": nvrtc.version()}
