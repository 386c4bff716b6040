"""Who builds: processes, of which each builds one config at a time and may die of it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from tvmconv.errors import Error, HostError
from tvmconv.knobs import Config
from tvmconv.library import BUILT_IN
from tvmconv.measuring.builder import Built, Task
from tvmconv.measuring.outcome import ErrorKind
from tvmconv.measuring.supervised import DEPTH, Cause, End, Job, Limits, Supervised
from tvmconv.workloads import Workload

BUILDER = "tvmconv.measuring.builder"
START_SECONDS = 120.0  # for loading TVM on a busy machine
TEXTS = {
    Cause.CRASH: "the builder process {how}",
    Cause.START: "the builder process does not start in {limit:g} s",
    Cause.TIME: "the build takes longer than {limit:g} s",
}


def workers_of(workers: int | None) -> int:
    """How many processes build, where `workers` were asked for: by default one less than this may have processors."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if workers is None else workers


class Pool:
    """Builds configs in processes of their own.

    A config that hangs, crashes its process or allocates without end costs that process, which is started again, and
    becomes one `Built` with the error. What that process had not begun is for whichever builder comes to it.

    Args:
        task: what is built.
        workers: number of processes; none where nothing is to be built.
        timeout: seconds for one build.
    """

    def __init__(self, task: Task, workers: int, timeout: float) -> None:
        self._task = task
        self._waiting: deque[Job] = deque()
        limits = Limits(START_SECONDS, timeout)
        self._builders: list[Supervised] = []
        for _ in range(workers):
            self._builders.append(Supervised(BUILDER, lambda: task, limits, TEXTS, like=BUILDER))

    def submit(self, tag: int, schedule: str, config: Config, workload: Workload | None = None) -> None:
        """Queue a config of a schedule of the task; `tag` comes back with what it becomes.

        Args:
            tag: a number of its own.
            schedule: its name in the task.
            config: its knobs.
            workload: what to compute; by default the task's.
        """
        self._waiting.append(Job(tag, (schedule, config, workload)))

    def poll(self) -> list[tuple[int, Built]]:
        """Deal out what is queued; what has ended since the last call, by tag.

        Raises:
            HostError: the builder processes do not start.
            Error: they cannot load a schedule.
        """
        ended = [(job.tag, _built(answer)) for builder in self._builders for job, answer in builder.poll()]
        for builder in self._builders:
            if builder.end:
                self._replace(builder, builder.end)
        for room in range(DEPTH, 0, -1):  # first to those that have nothing to do
            for builder in self._builders:
                if self._waiting and builder.room == room:
                    builder.submit(self._waiting.popleft())
        return ended

    def waitables(self) -> Sequence[Connection]:
        """What becomes readable when `poll` has something to tell."""
        return [connection for builder in self._builders for connection in builder.waitables()]

    def close(self) -> None:
        """End all processes, or hand them on; see `tvmconv.measuring.standing`."""
        for builder in self._builders:
            builder.close()

    def _replace(self, builder: Supervised, end: End) -> None:
        """Start a builder anew, unless there is no sense in it."""
        if end.cause is Cause.REFUSED:
            schedules = self._task.schedules
            others = [name for name, how in schedules.items() if not how.function.__module__.startswith(BUILT_IN)]
            names = " or ".join(others or schedules)
            raise Error(f"a builder process cannot load schedule {names}: {end.reason}")
        if builder.hopeless:
            raise HostError(f"the builder processes do not start: {end.reason}")
        self._waiting.extendleft(reversed(builder.take_back()))
        builder.renew()


def _built(answer: Any) -> Built:
    """What a builder says of a config, or what it means that its process ended over it."""
    if not isinstance(answer, End):
        return answer
    kind = ErrorKind.BUILD_TIMEOUT if answer.cause is Cause.TIME else ErrorKind.COMPILE_HOST
    return Built(None, kind, answer.reason, seconds=answer.seconds)
