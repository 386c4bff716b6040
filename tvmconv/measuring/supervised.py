"""A process that does jobs one after another and may hang, crash or swell at any of them, as its parent sees it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import Any

from tvmconv.measuring import standing
from tvmconv.measuring.child import Child, Last

DEPTH = 2  # jobs at a process: the one that it does, and the next, so that it need not wait for its parent
MAX_FAILED_STARTS = 5  # in a row
SECOND_HAND_SECONDS = 5.0  # for a process of another to be free: about as long as a new one takes to start


class Cause(Enum):
    """Why a process is no more."""

    CRASH = auto()  # it ended
    START = auto()  # it was not ready in time
    TIME = auto()  # a job took too long
    MEMORY = auto()  # it held too much
    REFUSED = auto()  # it said that it cannot go on
    LAST = auto()  # it said that a job was its last


@dataclass(frozen=True)
class Limits:
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
class End:
    """How a process ended; also what came of the job that it was doing, if that is to blame.

    Attributes:
        cause: why.
        reason: in one line.
        seconds: how long it had been at its job.
        was_ready: whether it had started at all.
    """

    cause: Cause
    reason: str
    seconds: float
    was_ready: bool


@dataclass(frozen=True)
class Job:
    """A message to the process, and the tag that comes back with its answer."""

    tag: int
    message: Any


class Supervised:
    """A process and its queue of jobs, of which it does the first.

    The process gets `hello` first, and answers None when it is ready or says in a text why it cannot be; then it
    answers each job. One that ends, or exceeds a limit and is ended, stays so until `renew`; what it had not begun is
    done by the process that takes its place, unless it is taken back.

    Within a block of `standing`, a process that is ready is not ended by `close` but handed on, and one that stands
    ready is taken instead of starting a new one. It may still be at a job of another, whose answer is for nobody; if
    that takes long, or ends it, a new process replaces it: that is nobody's fault here.

    Args:
        module: whose `main` runs in the process.
        hello: makes the first message to a process.
        limits: what it may take.
        texts: the reason for each cause, with the fields `how` (it ended) and `limit` (in seconds, or in GiB).
        environment: variables beside those of this process.
        scratch: the variable for a directory of the process's own.
        like: which processes can take one another's place once they are ready, given a new `hello`; None for one that
            takes no other `hello` than its first.

    Attributes:
        child: the process, alive or not.
        ready: whether it can take jobs.
        end: how it ended; None as long as it has not.
    """

    def __init__(
        self,
        module: str,
        hello: Callable[[], object],
        limits: Limits,
        texts: Mapping[Cause, str],
        environment: Mapping[str, str] | None = None,
        scratch: str | None = None,
        like: str | None = None,
    ) -> None:
        self._module = module
        self._hello = hello
        self._limits = limits
        self._texts = texts
        self._environment = environment
        self._scratch = scratch
        self._like = like
        self._jobs: deque[Job] = deque()
        self._failed_starts = 0
        self.end: End | None = None
        self._start(standing.take(like) if like else None)

    @property
    def room(self) -> int:
        """How many more jobs to submit now."""
        return DEPTH - len(self._jobs) if self.ready else 0

    @property
    def seconds(self) -> float:
        """How long it has been doing what it does, or has been gone."""
        return time.monotonic() - self._since

    @property
    def hopeless(self) -> bool:
        """Whether it failed to start so often that there is no sense in trying again."""
        return self._failed_starts >= MAX_FAILED_STARTS

    def submit(self, job: Job) -> None:
        """Queue a job; there has to be room."""
        if not self._jobs:
            self._since = time.monotonic()
        self._jobs.append(job)
        self.child.send(job.message)

    def poll(self) -> list[tuple[Job, Any]]:
        """The jobs that have ended since the last call, each with the process's answer or the `End` that it brought."""
        if self.end:
            return []
        ended: list[tuple[Job, Any]] = []
        try:
            for message in self.child.received():
                if message is None:
                    self._begin()
                elif self._second_hand and not isinstance(message, str):
                    continue  # the answer to what another wanted to know
                elif isinstance(message, str):
                    return ended + self._finish(Cause.REFUSED, message)
                elif isinstance(message, Last):
                    ended.append((self._jobs.popleft(), message.message))
                    return ended + self._finish(Cause.LAST)
                else:
                    ended.append((self._jobs.popleft(), message))
                    self._since = time.monotonic()
        except EOFError:
            return ended + self._finish(Cause.CRASH)
        return ended + self._check_limits()

    def take_back(self) -> list[Job]:
        """The jobs that it has not ended, which it forgets."""
        taken = list(self._jobs)
        self._jobs.clear()
        return taken

    def renew(self) -> None:
        """Start a process, in place of the one that ended."""
        self._start()

    def waitables(self) -> Sequence[Connection]:
        """What becomes readable when `poll` has something to tell."""
        return [] if self.end else [self.child.connection]

    def close(self) -> None:
        """End the process, or hand it on; may be called twice."""
        if not self.end:
            self.end = End(Cause.LAST, "", self.seconds, self.ready)
            if not (self._like and self.ready and self._is_lean() and standing.hand_on(self._like, self.child)):
                self.child.kill()

    def _start(self, handed_on: Child | None = None) -> None:
        """Begin with a process that another had, or with a new one."""
        self.child = handed_on or standing.start(self._module, self._environment, self._scratch)
        self._second_hand, self.child.used = self.child.used, True
        try:
            self.child.send(self._hello())
        except BaseException:  # nobody gets to know the process
            self.child.kill()
            raise
        self.ready = False
        self.end = None
        self._since = time.monotonic()

    def _is_lean(self) -> bool:
        """Whether it holds so little memory that what another does in it is hardly to blame if it swells."""
        limit = self._limits.memory_bytes
        return limit is None or self.child.resident_bytes < limit / 2

    def _begin(self) -> None:
        """Give the process, which is ready, the jobs of the one before it."""
        self.ready, self._second_hand, self._failed_starts = True, False, 0
        self._since = time.monotonic()
        for job in self._jobs:
            self.child.send(job.message)

    def _check_limits(self) -> list[tuple[Job, End]]:
        """End the process if it exceeds a limit."""
        limits, seconds = self._limits, self.seconds
        if limits.memory_bytes is not None and self.child.resident_bytes > limits.memory_bytes:
            return self._finish(Cause.MEMORY, limit=limits.memory_bytes / 2**30)
        if self.ready and self._jobs and seconds > limits.job_seconds:
            return self._finish(Cause.TIME, limit=limits.job_seconds)
        if self._second_hand and seconds > SECOND_HAND_SECONDS:
            return self._finish(Cause.START)
        if not self.ready and seconds > limits.start_seconds:
            return self._finish(Cause.START, limit=limits.start_seconds)
        return []

    def _finish(self, cause: Cause, reason: str | None = None, limit: float = 0.0) -> list[tuple[Job, End]]:
        """Note how the process ended, if need be after ending it; the job that is to blame, if there is one."""
        seconds, how = self.seconds, self.child.kill()
        if self._second_hand:
            self._start()
            return []
        reason = self._texts.get(cause, "").format(how=how, limit=limit) if reason is None else reason
        self.end = End(cause, reason, seconds, self.ready)
        self._failed_starts += not self.ready
        to_blame = self.ready and cause not in (Cause.LAST, Cause.REFUSED)
        self.ready = False
        self._since = time.monotonic()
        return [(self._jobs.popleft(), self.end)] if to_blame and self._jobs else []
