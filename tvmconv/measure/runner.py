"""Runners, which verify and time executables on a local or remote device, and the process of a local one.

A custom runner implements the methods of `Runner`, and the `Measurer` submits executables to its free runners. The
process imports neither TVM nor PyTorch, so that it restarts quickly after a crash.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tvmconv.compiler.executable import Executable
from tvmconv.devices import Device, find_device, sharing
from tvmconv.devices.comparison import ReferenceOutput
from tvmconv.devices.device import Benchmark, DeviceLostError, get_first_line
from tvmconv.errors import CompileError, DeviceError, describe_error
from tvmconv.measure.results import ErrorKind, PhaseTimer, RunnerResult
from tvmconv.measure.workers.process import FinalMessage, iterate_messages
from tvmconv.measure.workers.supervisor import ExitCause, ExitInfo, Job, SupervisedWorker, WorkerLimits
from tvmconv.tempdir import ProcessTempDir
from tvmconv.verification import Problem

START_SECONDS = 120.0
RETRY_SECONDS = 1.0  # a GPU needs a moment to recover after its process was killed
EXIT_MESSAGES = {
    ExitCause.CRASH: "the device process {how}",
    ExitCause.START_TIMEOUT: "the device process does not start in {limit:g} s",
    ExitCause.JOB_TIMEOUT: "the kernel runs longer than {limit:g} s",
    ExitCause.MEMORY_LIMIT: "the device process holds more than {limit:.3g} GiB",
}


class Runner(Protocol):
    """Runner that verifies and times executables for one workload on one device, one after another.

    No method waits for an executable. `poll` returns each submitted one exactly once, whatever its outcome. A runner
    detects hangs and crashes itself and continues with the queued executables. All calls come from one thread.
    """

    @property
    def device(self) -> Device:
        """Device that executables are built for; its `name` is written to the records."""

    @property
    def num_free_slots(self) -> int:
        """Number of executables to submit now so that the device is never idle; 0 during the start."""

    def submit(self, tag: int, executable: Executable, best_seconds: float | None) -> None:
        """Queue an executable, whose result `poll` returns with the tag.

        `best_seconds`: best time so far in seconds per launch, far above which less time is spent on a measurement.
            None requests a final timing, which takes longer.
        """

    def poll(self) -> list[tuple[int, RunnerResult]]:
        """Return tags and results since the last call; the measurer calls this at least every 50 ms.

        It raises `DeviceError` only if the device is lost for all executables.
        """

    def wait_handles(self) -> Sequence[Connection | int]:
        """Return file descriptors, or objects with a `fileno()`, that become readable when `poll` has results."""

    def close(self) -> None:
        """Stop all work within a second; a second call has no effect."""


class ProcessRunner(Runner):
    """Base of runners that submit their executables to a supervised process; see `Runner`."""

    def __init__(self, device: Device, process: SupervisedWorker) -> None:
        self._device = device
        self._process = process

    @property
    def device(self) -> Device:
        """Device that executables are built for."""
        return self._device

    @property
    def num_free_slots(self) -> int:
        """Number of executables that can be submitted now."""
        return self._process.num_free_slots

    def submit(self, tag: int, executable: Executable, best_seconds: float | None) -> None:
        """Queue an executable."""
        self._process.submit(Job(tag, (executable, best_seconds)))

    def wait_handles(self) -> Sequence[Connection]:
        """Return the connection to the process."""
        return self._process.wait_handles()

    def close(self) -> None:
        """End the process or return it to `tvmconv.measure.workers.pool`."""
        self._process.close()


class LocalRunner(ProcessRunner):
    """Runner for a device of this host, in a separate process that a kernel may crash.

    `timeout_seconds`: time limit of one executable.
    `memory_limit_bytes`: host memory that the process may use beyond inputs and reference, in bytes.
    """

    def __init__(self, device: Device, problem: Problem, timeout_seconds: float, memory_limit_bytes: int) -> None:
        self._problem = problem
        self._control_executable: Executable | None = None
        memory_bytes = memory_limit_bytes + 4 * problem.nbytes  # pickled, unpickled, and copied to a CPU device
        limits = WorkerLimits(START_SECONDS, timeout_seconds, memory_bytes)
        self._device = device  # `_make_setup` reads it
        worker = SupervisedWorker(__name__, self._make_setup, limits, EXIT_MESSAGES, pool_key=device.text)
        super().__init__(device, worker)

    def poll(self) -> list[tuple[int, RunnerResult]]:
        """Return finished results, and restart the process if it ended."""
        process = self._process
        results = [(job.tag, self._make_result(job, answer)) for job, answer in process.poll()]
        if process.exit_info:
            if process.is_hopeless:
                raise DeviceError(f"{self.device.text} cannot be measured on: {process.exit_info.reason}")
            if process.exit_info.was_ready or process.elapsed_seconds > RETRY_SECONDS:
                process.restart()
        return results

    def _make_setup(self) -> RunnerSetup:
        """Return the first message to the process; this computes the reference while the process starts."""
        problem = self._problem
        return RunnerSetup(
            self.device.text,
            problem.inputs,
            problem.expected_output,
            problem.workload.tolerance,
            self._control_executable,
        )

    def _make_result(self, job: Job, answer: Any) -> RunnerResult:
        """Return the result of the process, or make one from the end of the process."""
        if isinstance(answer, ExitInfo):
            kind = ErrorKind.RUN_TIMEOUT if answer.cause is ExitCause.JOB_TIMEOUT else ErrorKind.RUNTIME
            return RunnerResult(error=kind, message=answer.reason, seconds=answer.seconds)
        if answer.error is ErrorKind.NONE:
            self._control_executable, _ = job.message
        return answer


@dataclass(frozen=True)
class RunnerSetup:
    """Setup of a runner process for all executables."""

    device: str  # name of the device for `tvmconv.devices.find_device`
    inputs: Sequence[NDArray[Any]]
    reference: ReferenceOutput | NDArray[np.float64]
    tolerance: float  # largest relative L2 error of a correct output
    # Executable that was correct before, with which the process first checks the device; None to skip the check.
    control_executable: Executable | None = None


def measure_executable(
    device: Device, benchmark: Benchmark, executable: Executable, best_seconds: float | None, tolerance: float
) -> RunnerResult:
    """Verify an executable, and time it if its output is correct.

    `best_seconds`: best time so far in seconds per launch, or `math.inf`; slow kernels are timed for a shorter time.
        None requests a final timing by `Benchmark.time_final`.
    `tolerance`: largest relative L2 error of a correct output.
    """
    phase_timer = PhaseTimer()
    start = time.monotonic()

    def make_result(**fields: Any) -> RunnerResult:
        return RunnerResult(**fields, phases=phase_timer.milliseconds, seconds=time.monotonic() - start)

    try:
        with phase_timer.phase("load"):
            kernel = device.load(executable)
        with phase_timer.phase("verify"):
            comparison = benchmark.compare(kernel)
        if not comparison.is_within_tolerance(tolerance):
            benchmark.restore_inputs()
            return make_result(
                error=ErrorKind.WRONG_ANSWER,
                message=comparison.describe_mismatch(tolerance),
                relative_error=comparison.relative_error,
            )
        with phase_timer.phase("time"):
            times = benchmark.time_final(kernel) if best_seconds is None else benchmark.time(kernel, best_seconds)
    except DeviceLostError:
        raise
    except CompileError as error:
        return make_result(error=ErrorKind.COMPILE_DEVICE, message=get_first_line(error))
    except Exception as error:  # drivers may raise any exception
        return make_result(error=ErrorKind.RUNTIME, message=describe_error(error))
    return make_result(times=times, relative_error=comparison.relative_error)


def main(connection: Connection) -> None:
    """Serve measurements: answer each `RunnerSetup` with None or an error text, and each job with a `RunnerResult`.

    A job is a tuple of an executable and the best time so far. A new setup for the same device replaces the arrays. An
    optional first message names the device, which is initialized before the setup arrives.
    """
    benchmark: Benchmark | None = None
    for message in iterate_messages(connection):
        if isinstance(message, str):
            with contextlib.suppress(Exception):  # the answer to `RunnerSetup` reports errors
                dummy_input = np.zeros(1, np.float32)
                device = find_device(message)
                device.create_benchmark([dummy_input], dummy_input.astype(np.float64)).close()
            continue
        if isinstance(message, RunnerSetup):
            setup = message
            try:
                if benchmark:
                    benchmark.close()
                if setup.device.startswith("opencl"):
                    _keep_pocl_cache_private()
                device = find_device(setup.device)
                benchmark = device.create_benchmark(setup.inputs, setup.reference)  # copies disturb no kernel
                if control := setup.control_executable:
                    with sharing.hold_gpu():
                        reason = measure_executable(device, benchmark, control, 0.0, setup.tolerance).message
                    if reason:
                        connection.send(f"a kernel that was correct before fails: {reason}")
                        return
            except Exception as error:
                connection.send(describe_error(error))
                return
            connection.send(None)
            continue
        assert benchmark
        executable, best_seconds = message
        try:
            with sharing.hold_gpu():
                result = measure_executable(device, benchmark, executable, best_seconds, setup.tolerance)
            connection.send(result)
        except DeviceLostError as error:
            connection.send(FinalMessage(RunnerResult(error=ErrorKind.RUNTIME, message=get_first_line(error))))
            return


@functools.cache
def _keep_pocl_cache_private() -> ProcessTempDir:
    """Give PoCL a folder that goes with this process; it would keep compiled kernels, which are never reused."""
    folder = ProcessTempDir("tvmconv-")
    os.environ["POCL_KERNEL_CACHE"], os.environ["POCL_CACHE_DIR"] = "0", str(folder.path)
    return folder
