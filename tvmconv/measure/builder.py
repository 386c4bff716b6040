"""Builds in processes that receive configs and return executables, each of which may crash."""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tvmconv.compiler.executable import Executable
from tvmconv.deadline import Deadline
from tvmconv.devices import Device, find_device
from tvmconv.errors import CompileError, Error, HostError, ScheduleFailure, describe_error
from tvmconv.measure.results import ErrorKind, PhaseTimer
from tvmconv.measure.workers import pool
from tvmconv.measure.workers.process import FinalMessage, iterate_messages
from tvmconv.measure.workers.supervisor import MAX_QUEUED_JOBS, ExitCause, ExitInfo, Job, SupervisedWorker, WorkerLimits
from tvmconv.registry import BUILT_IN, Schedule, schedules
from tvmconv.space import Config
from tvmconv.tvm_import import import_tvm
from tvmconv.workloads import Workload, parse

WARM_UP_WORKLOAD, WARM_UP_ARCH = "conv2d:1x1x2x2,1x1x1x1", "sm_90"  # kernel that loads the compilers
START_SECONDS = 120.0  # time limit for loading TVM on a busy machine
EXIT_MESSAGES = {
    ExitCause.CRASH: "the builder process {how}",
    ExitCause.START_TIMEOUT: "the builder process does not start in {limit:g} s",
    ExitCause.JOB_TIMEOUT: "the build takes longer than {limit:g} s",
}
BUILD_SECONDS, BUILD_MEMORY_BYTES = 60.0, 4 << 30  # limits of one build of `build_all`
POLL_SECONDS = 0.1
NO_TIME_MESSAGE = "not built: no time left"


@dataclass(frozen=True)
class BuilderSetup:
    """Setup of a builder process for all configs."""

    workload: Workload  # workload of configs that come without one
    # Schedules by name or other key; other processes find their functions by module and name.
    schedules: Mapping[str, Schedule]
    device: Device  # device to build for, which need not be present
    memory_limit_bytes: int  # memory that one build may allocate, in bytes


@dataclass(frozen=True)
class BuilderResult:
    """Result of a build."""

    executable: Executable | None = None  # executable for the device; None after an error
    error: ErrorKind = ErrorKind.NONE
    message: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)  # milliseconds by phase
    seconds: float = 0.0  # wall time of the build


@dataclass(frozen=True)
class BuilderCall:
    """A job that calls a function in a builder process, whose loaded schedules and libraries it uses.

    The answer is a `BuilderCallResult`. The function has to be at the top level of an importable module.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> BuilderCallResult:
        """Call the function."""
        try:
            return BuilderCallResult(self.function(*self.arguments))
        except MemoryError:
            raise
        except Exception as error:  # a schedule is user code
            return BuilderCallResult(None, describe_error(error))


@dataclass(frozen=True)
class BuilderCallResult:
    """The result of a `BuilderCall`."""

    value: Any
    error: str = ""  # description of the exception that was raised; "" for none


def build_executable(
    setup: BuilderSetup, schedule_name: str, config: Config, workload: Workload | None = None
) -> BuilderResult:
    """Build one config of a schedule and return the result, including any error.

    `workload`: workload to compute; that of the setup by default.
    """
    from tvmconv.compiler import lowering

    phase_timer, device = PhaseTimer(), setup.device
    start = time.monotonic()

    def make_failure(kind: ErrorKind, message: str) -> BuilderResult:
        return BuilderResult(None, kind, message, phase_timer.milliseconds, time.monotonic() - start)

    try:
        workload, schedule, target = workload or setup.workload, setup.schedules[schedule_name], device.make_target()
        lowered = lowering.lower_schedule(
            workload, schedule, config, target, device.limits, device.text, phase_timer.phase
        ).lowered
        with phase_timer.phase("codegen"):
            _ = lowered.source
        with phase_timer.phase("compile"):
            executable = lowered.executable
    except MemoryError:
        raise
    except CompileError as error:
        return make_failure(ErrorKind.COMPILE_HOST, describe_error(error))
    except ScheduleFailure as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return make_failure(ErrorKind.INSTANTIATION, error.reason)
    except BaseException as error:  # a schedule is user code, which may even call sys.exit
        return make_failure(ErrorKind.INSTANTIATION, describe_error(error))
    return BuilderResult(executable, phases=phase_timer.milliseconds, seconds=time.monotonic() - start)


def main(connection: Connection) -> None:
    """Serve builds: answer each `BuilderSetup` with None or an error text, and each job with a `BuilderResult`.

    A job is a tuple of schedule name, config and optional workload, or a `BuilderCall`, which is answered with a
    `BuilderCallResult`. A new setup applies to all later jobs.
    """
    setup, initial_bytes, message_stream = None, 0, iterate_messages(connection)
    preload_compilers()
    while True:
        try:
            message = next(message_stream)
        except EOFError:
            raise
        except Exception as error:
            connection.send(describe_error(error))
            return
        if isinstance(message, BuilderSetup):
            setup = message
            current_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()  # virtual
            initial_bytes = initial_bytes or current_bytes
            if current_bytes - initial_bytes > setup.memory_limit_bytes / 2:
                return  # earlier builds leaked too much memory
            _limit_memory(current_bytes + setup.memory_limit_bytes)
            connection.send(None)
            continue
        assert setup
        try:
            is_call = isinstance(message, BuilderCall)
            connection.send(message.run() if is_call else build_executable(setup, *message))
            continue
        except MemoryError:
            pass  # leaving the handler frees the build's memory; the process may still stay short of memory, so it ends
        message = f"the build allocates more than {setup.memory_limit_bytes / 2**30:.3g} GiB"
        connection.send(FinalMessage(BuilderResult(None, ErrorKind.COMPILE_HOST, message)))
        return


@functools.cache
def preload_compilers() -> None:
    """Load TVM and NVRTC with a small build, so that the first timed build does not include their loading.

    Both libraries load many parts on first use.
    """
    with contextlib.suppress(Exception):  # a real build reports the error
        import_tvm()
        workload, device = parse(WARM_UP_WORKLOAD), find_device(WARM_UP_ARCH)
        build_executable(BuilderSetup(workload, {"": schedules(workload)[0]}, device, BUILD_MEMORY_BYTES), "", {})


def _limit_memory(max_bytes: int) -> None:
    """Set the soft limit of this process's virtual memory, at most to the hard limit; it can be changed again."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    soft_limit = max_bytes if hard_limit == resource.RLIM_INFINITY else min(max_bytes, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_limit))


class BuilderPool:
    """Pool of processes that build configs.

    A config that hangs, crashes its process or allocates too much memory results in one `BuilderResult` with the error.
    The process is restarted, and its queued configs go to other builders.

    `num_workers`: number of processes; 0 if nothing is built.
    """

    def __init__(self, setup: BuilderSetup, num_workers: int, timeout_seconds: float) -> None:
        self._setup = setup
        self._queued_jobs: deque[Job] = deque()
        limits = WorkerLimits(START_SECONDS, timeout_seconds)
        self._builders = [
            SupervisedWorker(__name__, lambda: setup, limits, EXIT_MESSAGES, pool_key=__name__)
            for _ in range(num_workers)
        ]

    def submit(self, tag: int, schedule: str, config: Config, workload: Workload | None = None) -> None:
        """Queue a build, whose result `poll` returns with the tag; the workload is that of the setup by default."""
        self._queued_jobs.append(Job(tag, (schedule, config, workload)))

    def submit_call(self, tag: int, call: BuilderCall) -> None:
        """Queue a call, whose `BuilderCallResult` `poll` returns with the tag."""
        self._queued_jobs.append(Job(tag, call))

    def poll(self) -> list[tuple[int, Any]]:
        """Send queued jobs to the processes, and return tags and results of jobs that ended since the last call.

        Results are of the type `BuilderResult`, or `BuilderCallResult` for calls. A call that ended its process results
        in a `BuilderResult` with the error.
        """
        results: list[tuple[int, Any]] = []
        for builder in self._builders:
            for job, answer in builder.poll():
                if isinstance(answer, ExitInfo):
                    is_timeout = answer.cause is ExitCause.JOB_TIMEOUT
                    kind = ErrorKind.BUILD_TIMEOUT if is_timeout else ErrorKind.COMPILE_HOST
                    answer = BuilderResult(None, kind, answer.reason, seconds=answer.seconds)
                results.append((job.tag, answer))
        for builder in self._builders:
            if builder.exit_info:
                self._restart_builder(builder, builder.exit_info)
        for num_free_slots in range(MAX_QUEUED_JOBS, 0, -1):  # idle processes first
            for builder in self._builders:
                if self._queued_jobs and builder.num_free_slots == num_free_slots:
                    builder.submit(self._queued_jobs.popleft())
        return results

    def wait_handles(self) -> list[Connection]:
        """Return the connections that become readable when `poll` has results."""
        return [connection for builder in self._builders for connection in builder.wait_handles()]

    def close(self) -> None:
        """End all processes or return them to `tvmconv.measure.workers.pool`."""
        for builder in self._builders:
            builder.close()

    def _restart_builder(self, builder: SupervisedWorker, exit_info: ExitInfo) -> None:
        """Restart a builder, or raise an error if that is pointless."""
        if exit_info.cause is ExitCause.REFUSED:
            modules = {name: schedule.function.__module__ for name, schedule in self._setup.schedules.items()}
            plugin_names = [name for name, module in modules.items() if not module.startswith(BUILT_IN)]
            names = " or ".join(plugin_names or modules)
            raise Error(f"a builder process cannot load schedule {names}: {exit_info.reason}")
        if builder.is_hopeless:
            raise HostError(f"the builder processes do not start: {exit_info.reason}")
        self._queued_jobs.extendleft(reversed(builder.reclaim_jobs()))
        builder.restart()


@dataclass(frozen=True)
class BuilderInput:
    """A schedule and a config to build for a workload."""

    workload: Workload
    schedule: Schedule
    config: Config


def build_all(
    inputs: Sequence[BuilderInput],
    device: Device,
    num_workers: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    deadline: Deadline | None = None,
    num_needed: int = 0,
) -> list[BuilderResult]:
    """Build kernels in parallel and return the result for each input.

    With a single worker and no deadline, the builds run in this process.

    `num_workers`: number of processes; by default one less than the number of processors.
    `on_progress`: function that is called with the number of finished builds.
    `deadline`: time at which unfinished builds are abandoned with `NO_TIME_MESSAGE`; inputs are built in order. A
        deadline requires a block of `tvmconv.measure.workers.pool.keep_workers_alive`.
    `num_needed`: number of first inputs for which the deadline's cut-off applies instead.
    """
    if not inputs:
        return []
    # Schedule names are unique per operator only.
    jobs = [(f"{each.workload.operator} {each.schedule.name}", each.config, each.workload) for each in inputs]
    by_key = {key: each.schedule for (key, _, _), each in zip(jobs, inputs, strict=True)}
    setup = BuilderSetup(inputs[0].workload, by_key, device, BUILD_MEMORY_BYTES)
    pool_size = min(pool.resolve_num_workers(num_workers), len(inputs))
    if deadline is None and pool_size == 1:
        return [build_executable(setup, *job) for job in jobs]
    timed_out = BuilderResult(None, ErrorKind.BUILD_TIMEOUT, NO_TIME_MESSAGE)
    if deadline is not None:
        first_deadline = deadline.cut_off if num_needed else deadline
        pool.shared.prestart(__name__, __name__, pool_size)
        if not pool.shared.wait_for_worker(__name__, first_deadline.remaining_seconds):
            return [timed_out] * len(inputs)
    builder_pool, results = BuilderPool(setup, pool_size, BUILD_SECONDS), dict[int, BuilderResult]()
    try:
        for tag, job in enumerate(jobs):
            builder_pool.submit(tag, *job)
        while len(results) < len(inputs):
            is_needed = any(tag not in results for tag in range(num_needed))
            if deadline and (deadline.cut_off if is_needed else deadline).has_passed:
                break
            wait(builder_pool.wait_handles(), POLL_SECONDS)
            results.update(builder_pool.poll())
            if on_progress:
                on_progress(len(results))
    finally:
        builder_pool.close()
    return [results.get(tag, timed_out) for tag in range(len(inputs))]


def call_all(
    setup: BuilderSetup, calls: Sequence[BuilderCall], num_workers: int, deadline: Deadline | None = None
) -> list[BuilderCallResult]:
    """Call functions in parallel in builder processes and return the result of each call.

    With a single worker, the calls run in this process. A call that ended its process results in an error.

    `setup`: setup of the processes, whose schedules they load.
    `num_workers`: number of processes.
    `deadline`: time at which the remaining calls are abandoned, whose results have an error.
    """
    deadline, unfinished = deadline or Deadline(), BuilderCallResult(None, NO_TIME_MESSAGE)
    if num_workers <= 1 or deadline.has_passed:
        return [unfinished if deadline.has_passed else call.run() for call in calls]
    builder_pool, results = BuilderPool(setup, num_workers, BUILD_SECONDS), dict[int, BuilderCallResult]()
    try:
        for tag, call in enumerate(calls):
            builder_pool.submit_call(tag, call)
        while len(results) < len(calls) and not deadline.has_passed:
            wait(builder_pool.wait_handles(), POLL_SECONDS)
            for tag, answer in builder_pool.poll():
                is_result = isinstance(answer, BuilderCallResult)
                results[tag] = answer if is_result else BuilderCallResult(None, answer.message)
    finally:
        builder_pool.close()
    return [results.get(tag, unfinished) for tag in range(len(calls))]
