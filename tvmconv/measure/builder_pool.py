"""Who builds: processes, of which each builds one config at a time and may die of it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from tvmconv.errors import Error, HostError
from tvmconv.measure.builder import BuilderResult, BuilderSetup
from tvmconv.measure.results import ErrorKind
from tvmconv.measure.workers.supervisor import MAX_QUEUED_JOBS, ExitCause, ExitInfo, Job, SupervisedWorker, WorkerLimits
from tvmconv.registry import BUILT_IN
from tvmconv.space import Config
from tvmconv.workloads import Workload

BUILDER_MODULE = "tvmconv.measure.builder"
START_SECONDS = 120.0  # for loading TVM on a busy machine
EXIT_MESSAGES = {
    ExitCause.CRASH: "the builder process {how}",
    ExitCause.START_TIMEOUT: "the builder process does not start in {limit:g} s",
    ExitCause.JOB_TIMEOUT: "the build takes longer than {limit:g} s",
}


def resolve_num_workers(num_workers: int | None) -> int:
    """Return the number of builder processes: `num_workers`, or one less than this process may have processors."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if num_workers is None else num_workers


class BuilderPool:
    """Builds configs in processes of their own.

    A config that hangs, crashes its process or allocates without end costs that process, which is started again, and
    becomes one `BuilderResult` with the error. What that process had not begun is for whichever builder comes to it.

    Args:
        setup: what is built.
        num_workers: number of processes; none where nothing is to be built.
        timeout_seconds: seconds for one build.
    """

    def __init__(self, setup: BuilderSetup, num_workers: int, timeout_seconds: float) -> None:
        self._setup = setup
        self._queued_jobs: deque[Job] = deque()
        limits = WorkerLimits(START_SECONDS, timeout_seconds)
        self._builders: list[SupervisedWorker] = []
        for _ in range(num_workers):
            self._builders.append(
                SupervisedWorker(BUILDER_MODULE, lambda: setup, limits, EXIT_MESSAGES, pool_key=BUILDER_MODULE)
            )

    def submit(self, tag: int, schedule: str, config: Config, workload: Workload | None = None) -> None:
        """Queue a config of a schedule of the task; `tag` comes back with what it becomes.

        Args:
            tag: a number of its own.
            schedule: its name in the task.
            config: its knobs.
            workload: what to compute; by default the task's.
        """
        self._queued_jobs.append(Job(tag, (schedule, config, workload)))

    def poll(self) -> list[tuple[int, BuilderResult]]:
        """Deal out what is queued; what has ended since the last call, by tag.

        Raises:
            HostError: the builder processes do not start.
            Error: they cannot load a schedule.
        """
        results = [
            (job.tag, _make_builder_result(answer)) for builder in self._builders for job, answer in builder.poll()
        ]
        for builder in self._builders:
            if builder.exit_info:
                self._restart_builder(builder, builder.exit_info)
        for num_free_slots in range(MAX_QUEUED_JOBS, 0, -1):  # first to those that have nothing to do
            for builder in self._builders:
                if self._queued_jobs and builder.num_free_slots == num_free_slots:
                    builder.submit(self._queued_jobs.popleft())
        return results

    def wait_handles(self) -> Sequence[Connection]:
        """What becomes readable when `poll` has something to tell."""
        return [connection for builder in self._builders for connection in builder.wait_handles()]

    def close(self) -> None:
        """End all processes, or hand them on; see `tvmconv.measure.workers.pool`."""
        for builder in self._builders:
            builder.close()

    def _restart_builder(self, builder: SupervisedWorker, exit_info: ExitInfo) -> None:
        """Start a builder anew, unless there is no sense in it."""
        if exit_info.cause is ExitCause.REFUSED:
            schedules = self._setup.schedules
            plugin_names = [
                name for name, schedule in schedules.items() if not schedule.function.__module__.startswith(BUILT_IN)
            ]
            names = " or ".join(plugin_names or schedules)
            raise Error(f"a builder process cannot load schedule {names}: {exit_info.reason}")
        if builder.is_hopeless:
            raise HostError(f"the builder processes do not start: {exit_info.reason}")
        self._queued_jobs.extendleft(reversed(builder.reclaim_jobs()))
        builder.restart()


def _make_builder_result(answer: Any) -> BuilderResult:
    """What a builder says of a config, or what it means that its process ended over it."""
    if not isinstance(answer, ExitInfo):
        return answer
    kind = ErrorKind.BUILD_TIMEOUT if answer.cause is ExitCause.JOB_TIMEOUT else ErrorKind.COMPILE_HOST
    return BuilderResult(None, kind, answer.reason, seconds=answer.seconds)
