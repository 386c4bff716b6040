"""Measurement of configs, which are built in builder processes and verified and timed in runner processes."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from multiprocessing import Pipe
from multiprocessing.connection import wait

from tvmconv import devices as known_devices
from tvmconv import registry
from tvmconv.devices import Device, sharing
from tvmconv.devices.device import get_first_line
from tvmconv.devices.rpc import RPCDevice
from tvmconv.errors import DeviceError, Error, ScheduleError
from tvmconv.measure.builder import BuilderPool, BuilderSetup
from tvmconv.measure.pipeline import MeasureCandidate, MeasurePipeline
from tvmconv.measure.results import MeasureResult, PhaseMeans
from tvmconv.measure.rpc import RPCRunner
from tvmconv.measure.runner import LocalRunner, Runner
from tvmconv.measure.workers.pool import resolve_num_workers
from tvmconv.registry import Schedule
from tvmconv.space import Config
from tvmconv.verification import Problem
from tvmconv.version import VERSION
from tvmconv.workloads import Workload

POLL_SECONDS = 0.05  # interval of checks of the processes' time and memory
CLOSE_SECONDS = 1.0  # longest wait for a reference computation or a starting process that is no longer needed
RUN_SECONDS = {"cuda": 10.0, "opencl": 60.0}  # PoCL compiles at the first launch, for up to 15 s on two cores


class Measurer:
    """Context manager that measures configs of schedules for one workload.

    `submit` queues configs, and `collect_results` returns each result exactly once, in the order of completion. Builds
    and timings run in separate processes, which end with the block or with this process; within
    `tvmconv.measure.workers.pool.keep_workers_alive` the next measurer reuses them. A config that hangs, crashes,
    allocates too much memory or computes a wrong output results in a measurement with that error. Builders start
    immediately, and devices are taken with the first config.

    `schedules`: one or several schedules; their functions must be at the top level of importable modules.
    `devices`: names, devices or custom runners to measure on, all of one kind and architecture.
    `workers`: number of builder processes; by default one less than the number of processors. With 0, only candidates
        with an executable can be measured.
    `build_timeout`: time limit of one build in seconds.
    `run_timeout`: time limit of one candidate on the device in seconds; `RUN_SECONDS` of the kind by default.
    `memory_limit`: host memory limit of one candidate in bytes.
    `seed`: seed of the inputs; fresh by default.
    `problem`: inputs and reference of the same workload instead of a seed, or a function that returns them. A thread of
        the measurer calls the function, so that the caller does not wait for the reference.
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
        schedule_list = [schedules] if isinstance(schedules, Schedule) else list(schedules)
        for schedule in schedule_list:
            _check_importable(schedule)
        self._first_schedule = schedule_list[0].name
        self._endpoints = [known_devices.find_device(d) if isinstance(d, str) else d for d in devices]
        self._device = _find_common_device(self._endpoints)
        by_name = {schedule.name: schedule for schedule in schedule_list}
        control_schedule = registry.get_baseline_schedule(workload)
        self._control_candidate = None
        if control_schedule:
            by_name.setdefault(control_schedule.name, control_schedule)
            self._control_candidate = MeasureCandidate(control_schedule.name, {}) if workers != 0 else None
        self._setup = BuilderSetup(workload, by_name, self._device, memory_limit)
        self._num_workers = resolve_num_workers(workers)
        self._build_timeout = build_timeout
        self._run_timeout = run_timeout or RUN_SECONDS[self._device.kind]
        if sharing.is_shared():
            self._run_timeout += sharing.WAIT_SECONDS
        self._problem = problem or Problem(workload, seed)
        self._phase_means = PhaseMeans()
        self._num_submitted = self._num_returned = 0

        self._candidates: queue.SimpleQueue[MeasureCandidate] = queue.SimpleQueue()
        self._pipeline: MeasurePipeline | None = None
        self._results: queue.SimpleQueue[MeasureResult | None] = queue.SimpleQueue()  # None: the thread has failed
        self._error: BaseException | None = None
        self._is_closing = False
        self._is_ready = threading.Event()  # set when all processes were started
        self._wake_receiver, self._wake_sender = Pipe(duplex=False)
        # A thread keeps the devices busy while a tuner computes.
        self._thread = threading.Thread(target=self._run, name="measurer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Measurer:
        return self

    @property
    def num_workers(self) -> int:
        """Number of builder processes."""
        return self._num_workers

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_pending(self) -> int:
        """Number of submitted configs without a collected result."""
        return self._num_submitted - self._num_returned

    @property
    def phase_means(self) -> dict[str, float]:
        """Mean milliseconds by phase over the trials that reached the phase."""
        return self._phase_means.compute_means()

    @property
    def fastest_candidates(self) -> list[MeasureCandidate]:
        """Fastest candidates so far, the fastest first, marked for final timings."""
        candidates = self._pipeline.fastest_candidates if self._pipeline else []
        return [replace(candidate, is_final=True) for candidate in candidates]

    def submit(self, configs: Sequence[Config], schedule: str | None = None) -> None:
        """Queue configs of a schedule, which is the first one by default."""
        self.submit_candidates([MeasureCandidate(schedule or self._first_schedule, config) for config in configs])

    def submit_candidates(self, candidates: Sequence[MeasureCandidate]) -> None:
        """Queue candidates of any of the schedules, with or without an executable."""
        if not self._num_workers and any(candidate.executable is None for candidate in candidates):
            raise Error("cannot build: with 0 workers, expected candidates that were built before")
        for candidate in candidates:
            self._candidates.put(candidate)
        self._num_submitted += len(candidates)
        self._wake_sender.send_bytes(b"more")

    def collect_results(self, timeout: float) -> list[MeasureResult]:
        """Return the results since the last call.

        `timeout`: seconds to wait for the first result. The list is empty if none arrives or none is pending.
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
        """End all processes or return them to the pool; uncollected results are lost.

        The method waits at most `CLOSE_SECONDS` for a reference computation or a starting process. In that case the
        processes end later.
        """
        self._is_closing = True
        if not self._wake_receiver.closed:
            self._wake_sender.send_bytes(b"close")
            self._thread.join(None if self._is_ready.is_set() else CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._wake_receiver.close()
                self._wake_sender.close()

    def _run(self) -> None:
        """Run the thread that communicates with the processes; they end with this thread."""
        closables: list[BuilderPool | Runner] = []
        try:
            builder_pool = BuilderPool(self._setup, self._num_workers, self._build_timeout)
            closables.append(builder_pool)
            wait([self._wake_receiver])  # take a device only when the first configs arrive
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
                collect_versions(self._device),
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
    """Return the first device; raise DeviceError if executables or times of another device are not compatible."""
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


def collect_versions(device: Device) -> dict[str, str]:
    """Return the versions of the software that builds and runs kernels for a device."""
    versions = {"tvmconv": VERSION, "tvm": metadata.version("apache-tvm")}
    if device.kind != "cuda":
        return {**versions, "pyopencl": metadata.version("pyopencl")}
    from tvmconv.compiler import nvrtc

    return {**versions, "nvrtc": nvrtc.get_version()}
