"""Kernels of many workloads, built by as many processes as there are processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.knobs import Config
from tvmconv.library import Schedule
from tvmconv.measuring import standing
from tvmconv.measuring.builder import Built, Task, build
from tvmconv.measuring.outcome import ErrorKind
from tvmconv.measuring.pool import BUILDER, Pool, workers_of
from tvmconv.workloads import Workload

BUILD_SECONDS, BUILD_MEMORY = 60.0, 4 << 30  # that a build may take
POLL_SECONDS = 0.1
NO_TIME = "not built: no time left"


@dataclass(frozen=True)
class Choice:
    """What to build: a schedule and a config, for a workload."""

    workload: Workload
    schedule: Schedule
    config: Config


def build_all(
    choices: Sequence[Choice],
    device: Device,
    workers: int | None = None,
    told: Callable[[int], None] | None = None,
    deadline: Deadline | None = None,
    num_needed: int = 0,
) -> list[Built]:
    """Build, and say for each choice what came of it.

    Where there is but one process to do it, and no deadline, this process does it.

    Args:
        choices: what to build.
        device: what for.
        workers: how many processes; by default one less than there are processors.
        told: is called with the number of those that are done.
        deadline: when builds that have not ended are given up, as `NO_TIME` tells; the first choices are built first.
            With a deadline this has to be called in a block of `standing`.
        num_needed: how many of the first choices are waited for until the deadline's cut-off.

    Raises:
        Error: the processes do not start.
    """
    if not choices:
        return []
    schedules = {_key(choice): choice.schedule for choice in choices}  # names are those of an operator
    task = Task(choices[0].workload, schedules, device, BUILD_MEMORY)
    count = min(workers_of(workers), len(choices))
    if deadline is None and count == 1:
        return [build(task, _key(choice), choice.config, choice.workload) for choice in choices]
    late = Built(None, ErrorKind.BUILD_TIMEOUT, NO_TIME)
    if deadline is not None:
        standing.begin(BUILDER, BUILDER, count)
        if not standing.wait_for(BUILDER, deadline.cut_off.left if num_needed else deadline.left):
            return [late] * len(choices)
    pool, found = Pool(task, count, BUILD_SECONDS), dict[int, Built]()
    try:
        for tag, choice in enumerate(choices):
            pool.submit(tag, _key(choice), choice.config, choice.workload)
        while len(found) < len(choices):
            is_needed = any(tag not in found for tag in range(num_needed))
            if deadline and (deadline.cut_off if is_needed else deadline).has_passed:
                break
            wait(pool.waitables(), POLL_SECONDS)
            found.update(pool.poll())
            if told:
                told(len(found))
    finally:
        pool.close()
    return [found.get(tag, late) for tag in range(len(choices))]


def _key(choice: Choice) -> str:
    return f"{choice.workload.operator} {choice.schedule.name}"
