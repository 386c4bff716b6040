"""Tuning of the workloads of a network, one after another, within one time limit."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.search.options import TuneOptions
from tvmconv.search.result import TuneResult
from tvmconv.search.setup import ScheduleSelection, SearchPrefetcher
from tvmconv.search.time_budget import MIN_SECONDS_TO_REMEASURE, allocate_seconds, select_affordable, sort_by_cost
from tvmconv.search.tune import ProgressCallback, tune_all
from tvmconv.space import Config
from tvmconv.workloads import Workload

MIN_SEARCH_SECONDS = 1e-3  # time limit of a search when no time is left


def tune_tasks(
    network: Mapping[Workload, float],
    devices: Sequence[Device],
    options: TuneOptions,
    *,
    schedule_names: Mapping[Workload, Sequence[str]] | None = None,
    deadline: Deadline | None = None,
    first_configs: Mapping[Workload, Sequence[tuple[str, Config]]] | None = None,
) -> Iterator[tuple[Workload, Callable[[ProgressCallback], TuneResult]]]:
    """Yield the searches of a network's workloads; each search has to end before the next one is requested.

    A running search prepares the next one. Inside `keep_workers_alive()`, all searches use the same processes. By
    `deadline`, all searches have to be done. The workloads are then ordered by their cost in the network (their number
    of occurrences, or a weight, is the value in `network`), the most expensive first, and the time is divided by cost.
    If it is too short for all, the results of the last workloads are those of the log. Without a deadline,
    `options.seconds` limits each search, and `options.started_at` and `options.counts_from_ready_workers` apply to the
    first one. `first_configs` has names of schedules and configs that the search of a workload tries first.
    """
    prefetcher, started_at, names_by_workload = SearchPrefetcher(), options.started_at, schedule_names or {}
    configs_by_workload = first_configs or {}
    remaining = [*network] if deadline is None else sort_by_cost(network, devices[0])
    while remaining:
        is_first = len(remaining) == len(network)
        counts_from_ready_workers = options.counts_from_ready_workers and is_first
        task_options = replace(options, started_at=started_at, counts_from_ready_workers=counts_from_ready_workers)
        next_workloads = [*remaining[1:2]]
        if deadline is not None:
            affordable = select_affordable(deadline.remaining_seconds, remaining)
            seconds = max(
                allocate_seconds(deadline.remaining_seconds, affordable, network, devices[0]), MIN_SEARCH_SECONDS
            )
            hard_deadline = deadline.cut_off if is_first or not deadline.has_passed else deadline
            task_options = replace(
                options,
                seconds=seconds,
                remeasure_best=options.remeasure_best and seconds >= MIN_SECONDS_TO_REMEASURE,
                started_at=time.monotonic(),
                hard_deadline=hard_deadline,
                waits_for_first_trials=len(affordable) == 1,  # the last search may use the slack of the network
            )
            next_workloads = [*affordable[1:2]]
        workload = remaining.pop(0)
        task_options = replace(task_options, first_configs=configs_by_workload.get(workload, ()))

        def prepare_next(tasks: Sequence[Workload] = next_workloads, options: TuneOptions = task_options) -> None:
            for task in tasks:
                selection = ScheduleSelection.resolve(task, names_by_workload.get(task, ()), devices[0])
                next_options = replace(options, first_configs=configs_by_workload.get(task, ()))
                prefetcher.prepare(task, selection, devices[0], next_options)

        tune_task = functools.partial(
            tune_all,
            workload,
            names_by_workload.get(workload, ()),
            devices,
            task_options,
            prefetcher=prefetcher,
            prepare_next=prepare_next,
        )
        yield workload, tune_task
        started_at = None
