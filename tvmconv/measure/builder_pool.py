"""Pool of builder processes, each of which builds one config at a time and may crash."""

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
START_SECONDS = 120.0  # time limit for loading TVM on a busy machine
EXIT_MESSAGES = {
    ExitCause.CRASH: "the builder process {how}",
    ExitCause.START_TIMEOUT: "the builder process does not start in {limit:g} s",
    ExitCause.JOB_TIMEOUT: "the build takes longer than {limit:g} s",
}


def resolve_num_workers(num_workers: int | None) -> int:
    """Return `num_workers` or, if it is None, one less than the number of processors available to this process."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if num_workers is None else num_workers


class BuilderPool:
    """Pool of processes that build configs.

    A config that hangs, crashes its process or allocates too much memory results in one `BuilderResult` with the error.
    The process is restarted, and its queued configs go to other builders.

    `num_workers`: number of processes; 0 if nothing is built.
    """

    def __init__(self, setup: BuilderSetup, num_workers: int, timeout_seconds: float) -> None:
        self._setup = setup
        self._queued_jobs: deque[Job] = deque()
        limits = WorkerLimits(START_SECONDS, timeout_seconds)
        self._builders: list[SupervisedWorker] = []
        for _ in range(num_workers):
            worker = SupervisedWorker(BUILDER_MODULE, lambda: setup, limits, EXIT_MESSAGES, pool_key=BUILDER_MODULE)
            self._builders.append(worker)

    def submit(self, tag: int, schedule: str, config: Config, workload: Workload | None = None) -> None:
        """Queue a build.

        `tag`: unique number, which is returned with the result.
        `workload`: workload to compute; that of the setup by default.
        """
        self._queued_jobs.append(Job(tag, (schedule, config, workload)))

    def poll(self) -> list[tuple[int, BuilderResult]]:
        """Send queued builds to the processes, and return tags and results of builds that ended since the last call."""
        answers = [answer for builder in self._builders for answer in builder.poll()]
        results = [(job.tag, _make_builder_result(answer)) for job, answer in answers]
        for builder in self._builders:
            if builder.exit_info:
                self._restart_builder(builder, builder.exit_info)
        for num_free_slots in range(MAX_QUEUED_JOBS, 0, -1):  # idle processes first
            for builder in self._builders:
                if self._queued_jobs and builder.num_free_slots == num_free_slots:
                    builder.submit(self._queued_jobs.popleft())
        return results

    def wait_handles(self) -> Sequence[Connection]:
        """Return the connections that become readable when `poll` has results."""
        return [connection for builder in self._builders for connection in builder.wait_handles()]

    def close(self) -> None:
        """End all processes or return them to `tvmconv.measure.workers.pool`."""
        for builder in self._builders:
            builder.close()

    def _restart_builder(self, builder: SupervisedWorker, exit_info: ExitInfo) -> None:
        """Restart a builder, or raise an error if that is pointless."""
        if exit_info.cause is ExitCause.REFUSED:
            modules = {name: schedule.function.__module__ for name, schedule in self._setup.schedules.items()}
            plugin_names = [name for name, module in modules.items() if not module.startswith(BUILT_IN)]
            names = " or ".join(plugin_names or modules)
            raise Error(f"a builder process cannot load schedule {names}: {exit_info.reason}")
        if builder.is_hopeless:
            raise HostError(f"the builder processes do not start: {exit_info.reason}")
        self._queued_jobs.extendleft(reversed(builder.reclaim_jobs()))
        builder.restart()


def _make_builder_result(answer: Any) -> BuilderResult:
    """Return the result of a builder, or make one from the end of its process."""
    if not isinstance(answer, ExitInfo):
        return answer
    kind = ErrorKind.BUILD_TIMEOUT if answer.cause is ExitCause.JOB_TIMEOUT else ErrorKind.COMPILE_HOST
    return BuilderResult(None, kind, answer.reason, seconds=answer.seconds)
