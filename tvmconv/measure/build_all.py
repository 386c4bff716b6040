"""Parallel builds of kernels for many workloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.measure.builder import BuilderResult, BuilderSetup, build_executable
from tvmconv.measure.builder_pool import BUILDER_MODULE, BuilderPool, resolve_num_workers
from tvmconv.measure.results import ErrorKind
from tvmconv.measure.workers import pool
from tvmconv.registry import Schedule
from tvmconv.space import Config
from tvmconv.workloads import Workload

BUILD_SECONDS, BUILD_MEMORY_BYTES = 60.0, 4 << 30  # limits of one build
POLL_SECONDS = 0.1
NO_TIME_MESSAGE = "not built: no time left"


@dataclass(frozen=True)
class BuilderInput:
    """A schedule and a config to build for a workload."""

    workload: Workload
    schedule: Schedule
    config: Config


def build_all(
    inputs: Sequence[BuilderInput],
    device: Device,
    num_workers: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    deadline: Deadline | None = None,
    num_needed: int = 0,
) -> list[BuilderResult]:
    """Build kernels in parallel and return the result for each input.

    With a single worker and no deadline, the builds run in this process.

    `num_workers`: number of processes; by default one less than the number of processors.
    `on_progress`: function that is called with the number of finished builds.
    `deadline`: time at which unfinished builds are abandoned with `NO_TIME_MESSAGE`; inputs are built in order. A
        deadline requires a block of `tvmconv.measure.workers.pool.keep_workers_alive`.
    `num_needed`: number of first inputs for which the deadline's cut-off applies instead.
    """
    if not inputs:
        return []
    schedules = {_make_schedule_key(builder_input): builder_input.schedule for builder_input in inputs}
    # Schedule names are unique per operator only.
    setup = BuilderSetup(inputs[0].workload, schedules, device, BUILD_MEMORY_BYTES)
    pool_size = min(resolve_num_workers(num_workers), len(inputs))
    if deadline is None and pool_size == 1:
        return [
            build_executable(setup, _make_schedule_key(builder_input), builder_input.config, builder_input.workload)
            for builder_input in inputs
        ]
    timed_out = BuilderResult(None, ErrorKind.BUILD_TIMEOUT, NO_TIME_MESSAGE)
    if deadline is not None:
        pool.shared.prestart(BUILDER_MODULE, BUILDER_MODULE, pool_size)
        if not pool.shared.wait_for_worker(
            BUILDER_MODULE, (deadline.cut_off if num_needed else deadline).remaining_seconds
        ):
            return [timed_out] * len(inputs)
    builder_pool, results = BuilderPool(setup, pool_size, BUILD_SECONDS), dict[int, BuilderResult]()
    try:
        for tag, builder_input in enumerate(inputs):
            builder_pool.submit(tag, _make_schedule_key(builder_input), builder_input.config, builder_input.workload)
        while len(results) < len(inputs):
            is_needed = any(tag not in results for tag in range(num_needed))
            if deadline and (deadline.cut_off if is_needed else deadline).has_passed:
                break
            wait(builder_pool.wait_handles(), POLL_SECONDS)
            results.update(builder_pool.poll())
            if on_progress:
                on_progress(len(results))
    finally:
        builder_pool.close()
    return [results.get(tag, timed_out) for tag in range(len(inputs))]


def _make_schedule_key(builder_input: BuilderInput) -> str:
    return f"{builder_input.workload.operator} {builder_input.schedule.name}"
