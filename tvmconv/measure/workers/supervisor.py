"""A process that does jobs one after another and may hang, crash or swell at any of them, as its parent sees it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import Any

from tvmconv.measure.workers import pool
from tvmconv.measure.workers.process import FinalMessage, WorkerProcess

MAX_QUEUED_JOBS = 2  # jobs at a process: the one that it does, and the next, so that it need not wait for its parent
MAX_FAILED_STARTS = 5  # in a row
REUSE_TIMEOUT_SECONDS = 5.0  # for a process of another to be free: about as long as a new one takes to start


class ExitCause(Enum):
    """Why a process is no more."""

    CRASH = auto()  # it ended
    START_TIMEOUT = auto()  # it was not ready in time
    JOB_TIMEOUT = auto()  # a job took too long
    MEMORY_LIMIT = auto()  # it held too much
    REFUSED = auto()  # it said that it cannot go on
    FINAL_MESSAGE = auto()  # it said that a job was its last


@dataclass(frozen=True)
class WorkerLimits:
    """What a process may take.

    Attributes:
        start_seconds: to become ready.
        job_seconds: for one job.
        memory_bytes: of RAM; None for what limits itself.
    """

    start_seconds: float
    job_seconds: float
    memory_bytes: float | None = None


@dataclass(frozen=True)
class ExitInfo:
    """How a process ended; also what came of the job that it was doing, if that is to blame.

    Attributes:
        cause: why.
        reason: in one line.
        seconds: how long it had been at its job.
        was_ready: whether it had started at all.
    """

    cause: ExitCause
    reason: str
    seconds: float
    was_ready: bool


@dataclass(frozen=True)
class Job:
    """A message to the process, and the tag that comes back with its answer."""

    tag: int
    message: Any


class SupervisedWorker:
    """A process and its queue of jobs, of which it does the first.

    The process gets `make_init_message` first, and answers None when it is ready or says in a text why it cannot be;
    then it answers each job. One that ends, or exceeds a limit and is ended, stays so until `restart`; what it had not
    begun is done by the process that takes its place, unless it is taken back.

    Within a block of `tvmconv.measure.workers.pool`, a process that is ready is not ended by `close` but handed on, and
    one that stands ready is taken instead of starting a new one. It may still be at a job of another, whose answer is
    for nobody; if that takes long, or ends it, a new process replaces it: that is nobody's fault here.

    Args:
        module: whose `main` runs in the process.
        make_init_message: makes the first message to a process.
        limits: what it may take.
        exit_messages: the reason for each cause, with the fields `how` (it ended) and `limit` (in seconds, or in GiB).
        environment: variables beside those of this process.
        temp_dir_variable: the variable for a directory of the process's own.
        pool_key: which processes can take one another's place once they are ready, given a new `make_init_message`;
            None for one that takes no other `make_init_message` than its first.

    Attributes:
        worker_process: the process, alive or not.
        is_ready: whether it can take jobs.
        exit_info: how it ended; None as long as it has not.
    """

    def __init__(
        self,
        module: str,
        make_init_message: Callable[[], object],
        limits: WorkerLimits,
        exit_messages: Mapping[ExitCause, str],
        environment: Mapping[str, str] | None = None,
        temp_dir_variable: str | None = None,
        pool_key: str | None = None,
    ) -> None:
        self._module = module
        self._make_init_message = make_init_message
        self._limits = limits
        self._exit_messages = exit_messages
        self._environment = environment
        self._temp_dir_variable = temp_dir_variable
        self._pool_key = pool_key
        self._jobs: deque[Job] = deque()
        self._failed_starts = 0
        self.exit_info: ExitInfo | None = None
        self._start(pool.acquire(pool_key) if pool_key else None)

    @property
    def num_free_slots(self) -> int:
        """How many more jobs to submit now."""
        return MAX_QUEUED_JOBS - len(self._jobs) if self.is_ready else 0

    @property
    def elapsed_seconds(self) -> float:
        """How long it has been doing what it does, or has been gone."""
        return time.monotonic() - self._state_started_at

    @property
    def is_hopeless(self) -> bool:
        """Whether it failed to start so often that there is no sense in trying again."""
        return self._failed_starts >= MAX_FAILED_STARTS

    def submit(self, job: Job) -> None:
        """Queue a job; there has to be room."""
        if not self._jobs:
            self._state_started_at = time.monotonic()
        self._jobs.append(job)
        self.worker_process.send(job.message)

    def poll(self) -> list[tuple[Job, Any]]:
        """The jobs that have ended since the last call, each with the process's answer or the `ExitInfo` that it
        brought.
        """
        if self.exit_info:
            return []
        answers: list[tuple[Job, Any]] = []
        try:
            for message in self.worker_process.receive_messages():
                if message is None:
                    self._mark_ready()
                elif self._is_reused and not isinstance(message, str):
                    continue  # the answer to what another wanted to know
                elif isinstance(message, str):
                    return answers + self._record_exit(ExitCause.REFUSED, message)
                elif isinstance(message, FinalMessage):
                    answers.append((self._jobs.popleft(), message.message))
                    return answers + self._record_exit(ExitCause.FINAL_MESSAGE)
                else:
                    answers.append((self._jobs.popleft(), message))
                    self._state_started_at = time.monotonic()
        except EOFError:
            return answers + self._record_exit(ExitCause.CRASH)
        return answers + self._check_limits()

    def reclaim_jobs(self) -> list[Job]:
        """The jobs that it has not ended, which it forgets."""
        jobs = list(self._jobs)
        self._jobs.clear()
        return jobs

    def restart(self) -> None:
        """Start a process, in place of the one that ended."""
        self._start()

    def wait_handles(self) -> Sequence[Connection]:
        """What becomes readable when `poll` has something to tell."""
        return [] if self.exit_info else [self.worker_process.connection]

    def close(self) -> None:
        """End the process, or hand it on; may be called twice."""
        if not self.exit_info:
            self.exit_info = ExitInfo(ExitCause.FINAL_MESSAGE, "", self.elapsed_seconds, self.is_ready)
            if not (
                self._pool_key
                and self.is_ready
                and self._can_be_reused()
                and pool.release(self._pool_key, self.worker_process)
            ):
                self.worker_process.kill()

    def _start(self, reused_process: WorkerProcess | None = None) -> None:
        """Begin with a process that another had, or with a new one."""
        self.worker_process = reused_process or pool.start_worker(
            self._module, self._environment, self._temp_dir_variable
        )
        self._is_reused, self.worker_process.is_used = self.worker_process.is_used, True
        try:
            self.worker_process.send(self._make_init_message())
        except BaseException:  # nobody gets to know the process
            self.worker_process.kill()
            raise
        self.is_ready = False
        self.exit_info = None
        self._state_started_at = time.monotonic()

    def _can_be_reused(self) -> bool:
        """Whether it holds so little memory that what another does in it is hardly to blame if it swells."""
        limit = self._limits.memory_bytes
        return limit is None or self.worker_process.resident_bytes < limit / 2

    def _mark_ready(self) -> None:
        """Give the process, which is ready, the jobs of the one before it."""
        self.is_ready, self._is_reused, self._failed_starts = True, False, 0
        self._state_started_at = time.monotonic()
        for job in self._jobs:
            self.worker_process.send(job.message)

    def _check_limits(self) -> list[tuple[Job, ExitInfo]]:
        """End the process if it exceeds a limit."""
        limits, seconds = self._limits, self.elapsed_seconds
        if limits.memory_bytes is not None and self.worker_process.resident_bytes > limits.memory_bytes:
            return self._record_exit(ExitCause.MEMORY_LIMIT, limit=limits.memory_bytes / 2**30)
        if self.is_ready and self._jobs and seconds > limits.job_seconds:
            return self._record_exit(ExitCause.JOB_TIMEOUT, limit=limits.job_seconds)
        if self._is_reused and seconds > REUSE_TIMEOUT_SECONDS:
            return self._record_exit(ExitCause.START_TIMEOUT)
        if not self.is_ready and seconds > limits.start_seconds:
            return self._record_exit(ExitCause.START_TIMEOUT, limit=limits.start_seconds)
        return []

    def _record_exit(
        self, cause: ExitCause, reason: str | None = None, limit: float = 0.0
    ) -> list[tuple[Job, ExitInfo]]:
        """Note how the process ended, if need be after ending it; the job that is to blame, if there is one."""
        seconds, ending = self.elapsed_seconds, self.worker_process.kill()
        if self._is_reused:
            self._start()
            return []
        reason = self._exit_messages.get(cause, "").format(how=ending, limit=limit) if reason is None else reason
        self.exit_info = ExitInfo(cause, reason, seconds, self.is_ready)
        self._failed_starts += not self.is_ready
        is_job_at_fault = self.is_ready and cause not in (ExitCause.FINAL_MESSAGE, ExitCause.REFUSED)
        self.is_ready = False
        self._state_started_at = time.monotonic()
        return [(self._jobs.popleft(), self.exit_info)] if is_job_at_fault and self._jobs else []
