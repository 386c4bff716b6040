"""Runners, which measure executables on a local or remote device.

A custom runner implements the methods of `Runner`, and the `Measurer` submits executables to its free runners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tvmconv.errors import DeviceError
from tvmconv.measure.results import ErrorKind, RunnerResult
from tvmconv.measure.runner_process import RunnerSetup
from tvmconv.measure.workers.supervisor import ExitCause, ExitInfo, Job, SupervisedWorker, WorkerLimits
from tvmconv.verification import Problem

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tvmconv.compiler.executable import Executable
    from tvmconv.devices import Device

RUNNER_PROCESS_MODULE = "tvmconv.measure.runner_process"
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
        worker = SupervisedWorker(RUNNER_PROCESS_MODULE, self._make_setup, limits, EXIT_MESSAGES, pool_key=device.text)
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
