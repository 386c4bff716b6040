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
from tvmconv import registry
from tvmconv.devices import Device
from tvmconv.devices.device import get_first_line
from tvmconv.devices.rpc import RPCDevice
from tvmconv.errors import DeviceError, Error, ScheduleError
from tvmconv.measure.builder import BuilderSetup
from tvmconv.measure.builder_pool import BuilderPool, resolve_num_workers
from tvmconv.measure.local_runner import LocalRunner
from tvmconv.measure.phase_timer import PhaseMeans
from tvmconv.measure.pipeline import MeasureCandidate, MeasurePipeline
from tvmconv.measure.results import MeasureResult
from tvmconv.measure.rpc_runner import RPCRunner
from tvmconv.measure.runner import Runner
from tvmconv.verification import Problem
from tvmconv.version import VERSION

if TYPE_CHECKING:
    from tvmconv.registry import Schedule
    from tvmconv.space import Config
    from tvmconv.workloads import Workload

POLL_SECONDS = 0.05  # between two looks at the clock and at the memory of the processes
CLOSE_SECONDS = 1.0  # for what computes a reference, or waits for a process to start, when nobody wants it any more
RUN_SECONDS = {"cuda": 10.0, "opencl": 60.0}  # PoCL compiles at the first launch, for up to 15 s on two cores


class Measurer:
    """Measures configs of schedules for one workload; a context manager.

    Configs go in with `submit` and come back measured from `collect_results`, in the order in which they end, each
    exactly once. Building and timing go on meanwhile, in processes that end with the block (within `standing` they
    serve the next measurer), or with this process. A config that hangs, crashes, allocates without end or computes
    something else is a measurement with that error. Builders start at once, what holds a device with the first config.

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
        schedule_list = [schedules] if isinstance(schedules, registry.Schedule) else list(schedules)
        for schedule in schedule_list:
            _check_importable(schedule)
        self._first_schedule = schedule_list[0].name
        self._endpoints = [
            known_devices.find_device(endpoint) if isinstance(endpoint, str) else endpoint for endpoint in devices
        ]
        self._device = _find_common_device(self._endpoints)
        by_name = {schedule.name: schedule for schedule in schedule_list}
        control_schedule = registry.get_baseline_schedule(workload)
        self._control_candidate = (
            MeasureCandidate(control_schedule.name, {}) if control_schedule and workers != 0 else None
        )
        if control_schedule:
            by_name.setdefault(control_schedule.name, control_schedule)
        self._setup = BuilderSetup(workload, by_name, self._device, memory_limit)
        self._num_workers = resolve_num_workers(workers)
        self._build_timeout = build_timeout
        self._run_timeout = run_timeout or RUN_SECONDS[self._device.kind]
        self._problem = problem or Problem(workload, seed)
        self._phase_means = PhaseMeans()
        self._num_submitted = self._num_returned = 0

        self._candidates: queue.SimpleQueue[MeasureCandidate] = queue.SimpleQueue()
        self._pipeline: MeasurePipeline | None = None
        self._results: queue.SimpleQueue[MeasureResult | None] = queue.SimpleQueue()  # None: no more will come
        self._error: BaseException | None = None
        self._is_closing = False
        self._is_ready = threading.Event()  # all processes were started
        self._wake_receiver, self._wake_sender = Pipe(duplex=False)
        # A thread keeps the devices busy while a tuner thinks.
        self._thread = threading.Thread(target=self._run, name="measurer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Measurer:
        return self

    @property
    def num_workers(self) -> int:
        """How many processes build."""
        return self._num_workers

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_pending(self) -> int:
        """How many configs were submitted that have not been handed out."""
        return self._num_submitted - self._num_returned

    @property
    def phase_means(self) -> dict[str, float]:
        """Where the time of a trial goes: mean milliseconds by phase, over the trials that came to it."""
        return self._phase_means.compute_means()

    @property
    def fastest_candidates(self) -> list[MeasureCandidate]:
        """Those that were fastest so far, the fastest first, to be submitted once more as last timings."""
        return (
            [replace(candidate, is_final=True) for candidate in self._pipeline.fastest_candidates]
            if self._pipeline
            else []
        )

    def submit(self, configs: Sequence[Config], schedule: str | None = None) -> None:
        """Queue configs of a schedule, by default of the first."""
        self.submit_candidates([MeasureCandidate(schedule or self._first_schedule, config) for config in configs])

    def submit_candidates(self, candidates: Sequence[MeasureCandidate]) -> None:
        """Queue configs of any of the schedules, or what was built before.

        Raises:
            Error: something has to be built, and there are no workers.
        """
        if not self._num_workers and any(candidate.executable is None for candidate in candidates):
            raise Error("nobody builds: without workers only what was built before can be measured")
        for candidate in candidates:
            self._candidates.put(candidate)
        self._num_submitted += len(candidates)
        self._wake_sender.send_bytes(b"more")

    def collect_results(self, timeout: float) -> list[MeasureResult]:
        """What came of configs since the last call.

        Args:
            timeout: seconds to wait for the first; the list is empty when none came, or none is pending.

        Raises:
            DeviceError: no device can be measured on any more.
            HostError: the host or the device lets no program be built or run; what it failed at is not returned.
            Error: the builder processes do not start.
        """
        results: list[MeasureResult] = []
        while self.num_pending > len(results):
            try:
                measurement = self._results.get(timeout=0 if results or self._error else timeout)
            except queue.Empty:
                break
            if measurement is not None:
                results.append(measurement)
        self._num_returned += len(results)
        if self._error and not results:
            raise self._error
        return results

    def close(self) -> None:
        """End all processes, whatever they are doing, or hand them on; what was not handed out is lost.

        Where a reference is being computed, or a process being started, this waits `CLOSE_SECONDS` at most: what there
        is of processes ends later, when that is done.
        """
        self._is_closing = True
        if not self._wake_receiver.closed:
            self._wake_sender.send_bytes(b"close")
            self._thread.join(None if self._is_ready.is_set() else CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._wake_receiver.close()
                self._wake_sender.close()

    def _run(self) -> None:
        """What the thread does: all that speaks to the processes, which live no longer than the thread."""
        closables: list[BuilderPool | Runner] = []
        try:
            builder_pool = BuilderPool(self._setup, self._num_workers, self._build_timeout)
            closables.append(builder_pool)
            wait(
                [self._wake_receiver]
            )  # for the first configs, while builders start: until then a device is for others
            if self._is_closing:
                return
            problem = self._problem() if callable(self._problem) else self._problem
            runners: list[Runner] = []
            for endpoint in self._endpoints:
                if self._is_closing:
                    return
                runners.append(self._make_runner(endpoint, problem))
                closables.append(runners[-1])
            self._pipeline = pipeline = MeasurePipeline(
                self._setup,
                builder_pool,
                runners,
                _collect_versions(self._device),
                self._phase_means,
                self._control_candidate,
            )
            self._is_ready.set()
            while not self._is_closing:
                wait([self._wake_receiver, *pipeline.wait_handles()], POLL_SECONDS)
                while self._wake_receiver.poll():
                    self._wake_receiver.recv_bytes()
                while not self._candidates.empty():
                    pipeline.submit(self._candidates.get())
                for measurement in pipeline.poll():
                    self._results.put(measurement)
        except BaseException as error:
            self._error = error
            self._results.put(None)
        finally:
            for closable in closables:
                closable.close()

    def _make_runner(self, endpoint: Device | Runner, problem: Problem) -> Runner:
        if isinstance(endpoint, RPCDevice):
            return RPCRunner(endpoint, problem, self._run_timeout, self._setup.memory_limit_bytes)
        if isinstance(endpoint, Device):
            return LocalRunner(endpoint, problem, self._run_timeout, self._setup.memory_limit_bytes)
        return endpoint


def _check_importable(schedule: Schedule) -> None:
    """Raise ScheduleError if another process would not find the schedule's function."""
    prefix = f"schedule {schedule.name} is not at the top level of a module that can be imported"
    if schedule.function.__module__ == "__main__":
        raise ScheduleError(f"{prefix}: it is in the script that runs")
    try:
        pickle.dumps(schedule)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ScheduleError(f"{prefix}: {get_first_line(error)}") from error


def _find_common_device(endpoints: Sequence[Device | Runner]) -> Device:
    """The device to build for, the first one; raises DeviceError if another needs another build, or has other times."""
    devices = [endpoint if isinstance(endpoint, Device) else endpoint.device for endpoint in endpoints]
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


def _collect_versions(device: Device) -> dict[str, str]:
    """Of the software that makes and runs the kernels."""
    versions = {"tvmconv": VERSION, "tvm": metadata.version("apache-tvm")}
    if device.kind != "cuda":
        return {**versions, "pyopencl": metadata.version("pyopencl")}
    from tvmconv.compiler import nvrtc

    return {**versions, "nvrtc": nvrtc.get_version()}
