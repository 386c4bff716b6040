"""A device of this host, in a process of its own that a kernel may take down with it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from tvmconv.compiler.program import Program
from tvmconv.devices import Device
from tvmconv.errors import DeviceError
from tvmconv.logs.record import ErrorKind
from tvmconv.measuring.bench_process import Setup
from tvmconv.measuring.child import Child, Last
from tvmconv.measuring.runner import Outcome
from tvmconv.scratch import Scratch
from tvmconv.verify import Problem

DEPTH = 2  # programs at the process: one that runs, and the next
START_SECONDS = 120.0
MAX_FAILED_STARTS = 5
RETRY_SECONDS = 1.0  # a GPU takes a moment to recover from a process that was killed


@dataclass(frozen=True)
class _Job:
    tag: int
    program: Program
    best: float


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
        self._setup = Setup(device.text, problem.inputs, problem.reference, problem.workload.tolerance)
        self._timeout = timeout
        arrays = (*problem.inputs, problem.reference)
        self._memory_limit = memory_limit + 4 * sum(array.nbytes for array in arrays)  # as sent, as kept, on the CPU
        self._jobs: deque[_Job] = deque()  # at the process, the one that runs first
        self._failed_starts = 0
        # PoCL writes its compiled kernels to files, of which nobody needs any again.
        self._scratch = Scratch("tvmconv-") if device.kind == "opencl" else None
        self._child: Child | None = None
        self._start()

    @property
    def free(self) -> int:
        """How many more programs to submit now; see `Runner.free`."""
        return DEPTH - len(self._jobs) if self._ready else 0

    def submit(self, tag: int, program: Program, best: float) -> None:
        """Queue a program; see `Runner.submit`."""
        if not self._jobs:
            self._since = time.monotonic()
        self._jobs.append(_Job(tag, program, best))
        self._send(self._jobs[-1])

    def poll(self) -> list[tuple[int, Outcome]]:
        """What has ended; see `Runner.poll`."""
        if self._child is None:
            if self._seconds > RETRY_SECONDS:
                self._start()
            return []
        try:
            messages = self._child.received()
        except EOFError:
            return self._renew(ErrorKind.RUNTIME)
        return [*(item for message in messages for item in self._take(message)), *self._check_limits()]

    def waitables(self) -> Sequence[Connection]:
        """The process's pipe."""
        return [self._child.connection] if self._child else []

    def close(self) -> None:
        """End the process."""
        if self._child:
            self._child.kill()
            self._child = None
        if self._scratch:
            self._scratch.close()

    @property
    def _seconds(self) -> float:
        """How long the process has been doing what it does."""
        return time.monotonic() - self._since

    def _start(self) -> None:
        environment = {"POCL_CACHE_DIR": str(self._scratch.path), "POCL_KERNEL_CACHE": "0"} if self._scratch else {}
        self._child = Child("tvmconv.measuring.bench_process", environment)
        self._child.send(self._setup)
        self._ready = False
        self._since = time.monotonic()

    def _send(self, job: _Job) -> None:
        assert self._child is not None
        self._child.send((job.program, job.best))

    def _take(self, message: object) -> list[tuple[int, Outcome]]:
        """What has ended by a message of the process."""
        match message:
            case Outcome():
                self._since = time.monotonic()
                job = self._jobs.popleft()
                if message.error is ErrorKind.NONE:
                    self._setup = replace(self._setup, right=job.program)
                return [(job.tag, message)]
            case Last(outcome):
                return [(self._jobs.popleft().tag, outcome), *self._renew(None)]
            case str(reason):
                return self._renew(None, reason)
        self._ready, self._failed_starts = True, 0
        self._since = time.monotonic()
        for job in self._jobs:
            self._send(job)
        return []

    def _check_limits(self) -> list[tuple[int, Outcome]]:
        """What has to end."""
        if self._child is None:
            return []
        if self._child.resident_bytes > self._memory_limit:
            message = f"the device process holds more than {self._memory_limit / 2**30:.3g} GiB"
            return self._renew(ErrorKind.RUNTIME, message)
        if self._ready and self._jobs and self._seconds > self._timeout:
            return self._renew(ErrorKind.RUN_TIMEOUT, f"the kernel runs longer than {self._timeout:g} s")
        if not self._ready and self._seconds > START_SECONDS:
            return self._renew(None, f"the device process does not start in {START_SECONDS:g} s")
        return []

    def _renew(self, kind: ErrorKind | None, message: str | None = None) -> list[tuple[int, Outcome]]:
        """End the process and start another, which gets the programs that are left.

        Args:
            kind: the error of the program that was running, if any; None if none is to blame.
            message: of the error; by default how the process ended.

        Raises:
            DeviceError: the process did not start, time and again: the device is lost.
        """
        assert self._child is not None
        how = self._child.kill()
        message = message or f"the device process {how}"
        self._child = None
        if not self._ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise DeviceError(f"{self.device.text} cannot be measured on: {message}")
            self._since = time.monotonic()
            return []
        seconds = self._seconds
        blamed = [self._jobs.popleft()] if kind is not None and self._jobs else []
        self._start()
        return [(job.tag, Outcome(error=kind or ErrorKind.NONE, message=message, seconds=seconds)) for job in blamed]
