"""Runner for a device of this host, in a separate process that a kernel may crash."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from tvmconv.compiler.executable import Executable
from tvmconv.devices import Device
from tvmconv.errors import DeviceError
from tvmconv.measure.results import ErrorKind, RunnerResult
from tvmconv.measure.runner_process import RunnerSetup
from tvmconv.measure.workers.supervisor import ExitCause, ExitInfo, Job, SupervisedWorker, WorkerLimits
from tvmconv.verification import Problem

RUNNER_PROCESS_MODULE = "tvmconv.measure.runner_process"
START_SECONDS = 120.0
RETRY_SECONDS = 1.0  # a GPU needs a moment to recover after its process was killed
EXIT_MESSAGES = {
    ExitCause.CRASH: "the device process {how}",
    ExitCause.START_TIMEOUT: "the device process does not start in {limit:g} s",
    ExitCause.JOB_TIMEOUT: "the kernel runs longer than {limit:g} s",
    ExitCause.MEMORY_LIMIT: "the device process holds more than {limit:.3g} GiB",
}


class LocalRunner:
    """Parent's handle of a runner process; see `tvmconv.measure.runner.Runner`.

    `memory_limit_bytes`: host memory that the process may use beyond inputs and reference, in bytes.
    """

    def __init__(self, device: Device, problem: Problem, timeout_seconds: float, memory_limit_bytes: int) -> None:
        self.device = device
        self._problem = problem
        self._control_executable: Executable | None = None
        memory_bytes = memory_limit_bytes + 4 * problem.nbytes  # pickled, unpickled, and copied to a CPU device
        # PoCL would keep its compiled kernels in files, which are never reused.
        is_opencl = device.kind == "opencl"
        self._process = SupervisedWorker(
            RUNNER_PROCESS_MODULE,
            self._make_setup,
            WorkerLimits(START_SECONDS, timeout_seconds, memory_bytes),
            EXIT_MESSAGES,
            {"POCL_KERNEL_CACHE": "0"} if is_opencl else {},
            temp_dir_variable="POCL_CACHE_DIR" if is_opencl else None,
            pool_key=device.text,
        )

    @property
    def num_free_slots(self) -> int:
        """Number of executables that can be submitted now; see `Runner.num_free_slots`."""
        return self._process.num_free_slots

    def submit(self, tag: int, executable: Executable, best_seconds: float | None) -> None:
        """Queue an executable; see `Runner.submit`."""
        self._process.submit(Job(tag, (executable, best_seconds)))

    def poll(self) -> list[tuple[int, RunnerResult]]:
        """Return finished results; see `Runner.poll`."""
        process = self._process
        results = [(job.tag, self._make_result(job, answer)) for job, answer in process.poll()]
        if process.exit_info:
            if process.is_hopeless:
                raise DeviceError(f"{self.device.text} cannot be measured on: {process.exit_info.reason}")
            if process.exit_info.was_ready or process.elapsed_seconds > RETRY_SECONDS:
                process.restart()
        return results

    def wait_handles(self) -> Sequence[Connection]:
        """Return the connection to the process."""
        return self._process.wait_handles()

    def close(self) -> None:
        """End the process or return it to `tvmconv.measure.workers.pool`."""
        self._process.close()

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
            executable, _ = job.message
            self._control_executable = executable
        return answer
