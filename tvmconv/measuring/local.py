"""A device of this host, in a process of its own that a kernel may take down with it."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from tvmconv.compiler.program import Program
from tvmconv.devices import Device
from tvmconv.errors import DeviceError
from tvmconv.measuring.bench_process import Setup
from tvmconv.measuring.outcome import ErrorKind, Outcome
from tvmconv.measuring.supervised import Cause, End, Job, Limits, Supervised
from tvmconv.verify import Problem

DEVICE_PROCESS = "tvmconv.measuring.bench_process"
START_SECONDS = 120.0
RETRY_SECONDS = 1.0  # a GPU takes a moment to recover from a process that was killed
TEXTS = {
    Cause.CRASH: "the device process {how}",
    Cause.START: "the device process does not start in {limit:g} s",
    Cause.TIME: "the kernel runs longer than {limit:g} s",
    Cause.MEMORY: "the device process holds more than {limit:.3g} GiB",
}


class LocalRunner:
    """A device process, as its parent sees it; see `tvmconv.measuring.runner.Runner`.

    Args:
        device: the device, present on this host.
        problem: what to verify and to time on.
        timeout: seconds for one program.
        memory_limit: bytes of host memory that the process may hold.
    """

    def __init__(self, device: Device, problem: Problem, timeout: float, memory_limit: int) -> None:
        self.device = device
        self._problem = problem
        self._right: Program | None = None
        memory = memory_limit + 4 * problem.nbytes  # as sent, as kept, on the CPU
        # PoCL writes its compiled kernels to files, of which nobody needs any again.
        opencl = device.kind == "opencl"
        self._process = Supervised(
            DEVICE_PROCESS,
            self._setup,
            Limits(START_SECONDS, timeout, memory),
            TEXTS,
            {"POCL_KERNEL_CACHE": "0"} if opencl else {},
            scratch="POCL_CACHE_DIR" if opencl else None,
            like=device.text,
        )

    @property
    def free(self) -> int:
        """How many more programs to submit now; see `Runner.free`."""
        return self._process.room

    def submit(self, tag: int, program: Program, best: float | None) -> None:
        """Queue a program; see `Runner.submit`."""
        self._process.submit(Job(tag, (program, best)))

    def poll(self) -> list[tuple[int, Outcome]]:
        """What has ended; see `Runner.poll`."""
        process = self._process
        ended = [(job.tag, self._outcome(job, answer)) for job, answer in process.poll()]
        if process.end:
            if process.hopeless:
                raise DeviceError(f"{self.device.text} cannot be measured on: {process.end.reason}")
            if process.end.was_ready or process.seconds > RETRY_SECONDS:
                process.renew()
        return ended

    def waitables(self) -> Sequence[Connection]:
        """The process's pipe."""
        return self._process.waitables()

    def close(self) -> None:
        """End the process, or hand it on; see `tvmconv.measuring.standing`."""
        self._process.close()

    def _setup(self) -> Setup:
        """The process's first message; the reference is computed when the process is on its way."""
        problem = self._problem
        return Setup(self.device.text, problem.inputs, problem.expected, problem.workload.tolerance, self._right)

    def _outcome(self, job: Job, answer: Any) -> Outcome:
        """What the process says of a program, or what it means that it ended over it."""
        if isinstance(answer, End):
            kind = ErrorKind.RUN_TIMEOUT if answer.cause is Cause.TIME else ErrorKind.RUNTIME
            return Outcome(error=kind, message=answer.reason, seconds=answer.seconds)
        if answer.error is ErrorKind.NONE:
            program, _ = job.message
            self._right = program
        return answer
