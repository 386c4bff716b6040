"""Supervision of a worker process that may hang, crash or exceed its memory limit at any job."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tvmconv.measure.workers import pool
from tvmconv.measure.workers.process import FinalMessage, WorkerProcess

MAX_QUEUED_JOBS = 2  # the current job and the next, so that the process never waits for its parent
MAX_FAILED_STARTS = 5  # consecutive failures after which the process is not restarted
REUSE_TIMEOUT_SECONDS = 5.0  # limit for a pooled process to become free; a new one starts in about this time


class ExitCause(Enum):
    """Reason for the end of a process."""

    CRASH = auto()  # the process ended by itself
    START_TIMEOUT = auto()  # the process was not ready in time
    JOB_TIMEOUT = auto()  # a job exceeded its time limit
    MEMORY_LIMIT = auto()  # the process exceeded its memory limit
    REFUSED = auto()  # the process reported that it cannot continue
    FINAL_MESSAGE = auto()  # the process announced its end


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a process."""

    start_seconds: float  # time limit of the start
    job_seconds: float  # time limit of one job
    memory_bytes: float | None = None  # limit of resident memory; None for a process that limits itself


@dataclass(frozen=True)
class ExitInfo:
    """Description of the end of a process, which is also the result of a job that caused it."""

    cause: ExitCause
    reason: str
    seconds: float  # time since the start of the current job
    was_ready: bool  # whether the process had started successfully


class Job(NamedTuple):
    """A message to the process with the tag of its answer."""

    tag: int
    message: Any


class SupervisedWorker:
    """A worker process and its queue of jobs, the first of which is in progress.

    The process first receives the initial message, and answers None when it is ready or a text with the reason why it
    cannot start. Then it answers each job. A process that ends, or that is ended because it exceeded a limit, stays
    ended until `restart`. The new process takes over jobs that had not begun, unless they are reclaimed.

    Within a block of `pool.keep_workers_alive`, `close` returns a ready process to the pool, and a pooled process is
    used instead of a new one. It may still be busy with a job of its previous owner, whose answer is discarded. If that
    job takes long or ends the process, a new process replaces it without counting as a failure.

    `exit_messages`: text for each cause, with the fields `how` (it ended) and `limit` (in seconds or GiB).
    `pool_key`: key of processes that can replace one another after a new initial message; None if the process accepts
        only one initial message.

    `is_ready`: whether it accepts jobs.
    `exit_info`: description of its end; None before.
    """

    def __init__(
        self,
        module: str,
        make_init_message: Callable[[], object],
        limits: WorkerLimits,
        exit_messages: Mapping[ExitCause, str],
        pool_key: str | None = None,
    ) -> None:
        self._module = module
        self._make_init_message = make_init_message
        self._limits = limits
        self._exit_messages = exit_messages
        self._pool_key = pool_key
        self._jobs: deque[Job] = deque()
        self._failed_starts = 0
        self.exit_info: ExitInfo | None = None
        self._start(self._acquire())

    @property
    def num_free_slots(self) -> int:
        """Number of jobs that can be submitted now."""
        return MAX_QUEUED_JOBS - len(self._jobs) if self.is_ready else 0

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the last change of state: start, readiness, begin of a job, or end."""
        return time.monotonic() - self._state_started_at

    @property
    def is_hopeless(self) -> bool:
        """Whether so many starts failed that another attempt is pointless."""
        return self._failed_starts >= MAX_FAILED_STARTS

    def submit(self, job: Job) -> None:
        """Queue a job; `num_free_slots` must be positive."""
        if not self._jobs:
            self._state_started_at = time.monotonic()
        self._jobs.append(job)
        self.worker_process.send(job.message)

    def poll(self) -> list[tuple[Job, Any]]:
        """Return the jobs that ended since the last call, with their answers or the `ExitInfo` that they caused."""
        if self.exit_info:
            return []
        answers: list[tuple[Job, Any]] = []
        try:
            for message in self.worker_process.receive_messages():
                if message is None:
                    self._mark_ready()
                elif self._is_reused and not isinstance(message, str):
                    continue  # the answer to a job of the previous owner
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
        """Remove and return the jobs that have not ended."""
        jobs = list(self._jobs)
        self._jobs.clear()
        return jobs

    def restart(self) -> None:
        """Start a process in place of the one that ended, or take a pooled one."""
        self._start(self._acquire())

    def wait_handles(self) -> Sequence[Connection]:
        """Return the connections that become readable when `poll` has results."""
        return [] if self.exit_info else [self.worker_process.connection]

    def close(self) -> None:
        """End the process or return it to the pool; a second call has no effect."""
        if not self.exit_info:
            self.exit_info = ExitInfo(ExitCause.FINAL_MESSAGE, "", self.elapsed_seconds, self.is_ready)
            key = self._pool_key if self.is_ready and self._is_small() else None
            if key is None or not pool.shared.release(key, self.worker_process):
                self.worker_process.kill()

    def _acquire(self) -> WorkerProcess | None:
        return pool.shared.acquire(self._pool_key) if self._pool_key else None

    def _start(self, reused_process: WorkerProcess | None = None) -> None:
        """Take a pooled process or start a new one, and send the initial message."""
        self.worker_process = reused_process or pool.shared.start_worker(self._module)
        self._is_reused, self.worker_process.is_used = self.worker_process.is_used, True
        try:
            self.worker_process.send(self._make_init_message())
        except BaseException:  # the caller has no reference to the process
            self.worker_process.kill()
            raise
        self.is_ready = False
        self.exit_info = None
        self._state_started_at = time.monotonic()

    def _is_small(self) -> bool:
        limit = self._limits.memory_bytes
        return limit is None or self.worker_process.resident_bytes < limit / 2

    def _mark_ready(self) -> None:
        """Mark the process as ready and send it the jobs of its predecessor."""
        self.is_ready, self._is_reused, self._failed_starts = True, False, 0
        self._state_started_at = time.monotonic()
        for job in self._jobs:
            self.worker_process.send(job.message)

    def _check_limits(self) -> list[tuple[Job, ExitInfo]]:
        """End the process if it exceeds a limit, and return the job that caused this, if any."""
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
        """End the process if it is alive, record its end, and return the job that caused it, if any."""
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
