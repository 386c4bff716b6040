"""The workloads of a network, searched one after another within a time for all of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.search.options import TuneOptions
from tvmconv.search.search import TuneResult
from tvmconv.search.setup import ScheduleSelection, SearchPrefetcher
from tvmconv.search.time_budget import MIN_SECONDS_TO_REMEASURE, allocate_seconds, select_affordable, sort_by_cost
from tvmconv.search.tune import ProgressCallback, tune_all
from tvmconv.workloads import Workload

MIN_SEARCH_SECONDS = 1e-3  # seconds of a search, for which there is no time


def tune_tasks(
    network: Mapping[Workload, int],
    devices: Sequence[Device],
    options: TuneOptions,
    *,
    schedule_names: Mapping[Workload, Sequence[str]] | None = None,
    deadline: Deadline | None = None,
) -> Iterator[tuple[Workload, Callable[[ProgressCallback], TuneResult]]]:
    """The searches of a network's workloads, each to be done before the next is asked for.

    While one is under way, what the next needs is prepared. In a block of `standing` they have the same processes.

    Args:
        network: what to compute, and how often the network has each.
        devices: devices of one architecture, to measure on.
        options: how to search, and, unless there is a deadline, how long each; the clock of the first one begins with
            it.
        schedule_names: schedules that shall be searched; all that can win, where none are named.
        deadline: when all shall be done. The workloads then come in the order of what they cost the network, the most
            expensive first, and share the time by that. Where the time is too short for all, the others are not
            searched: what comes of them is what the log has.

    Yields:
        A workload, and what searches it; that is told the status about ten times a second, and raises as `tune` does.
    """
    prefetcher, started_at = SearchPrefetcher(), options.started_at
    remaining = [*network] if deadline is None else sort_by_cost(network, devices[0])
    while remaining:
        is_first = len(remaining) == len(network)
        task_options, next_workloads = replace(options, started_at=started_at), [*remaining[1:2]]
        if deadline is not None:
            affordable = select_affordable(deadline.remaining_seconds, remaining)
            seconds = max(
                allocate_seconds(deadline.remaining_seconds, affordable, network, devices[0]), MIN_SEARCH_SECONDS
            )
            hard_deadline = deadline.cut_off if is_first or not deadline.has_passed else deadline
            is_last_affordable = len(affordable) == 1  # whose slack is that of the network
            task_options = replace(
                options,
                seconds=seconds,
                remeasure_best=options.remeasure_best and seconds >= MIN_SECONDS_TO_REMEASURE,
                started_at=time.monotonic(),
                hard_deadline=hard_deadline,
                waits_for_first_trials=is_last_affordable,
            )
            next_workloads = [*affordable[1:2]]
        workload = remaining.pop(0)

        def prefetch_next(
            next_workloads: Sequence[Workload] = next_workloads, options: TuneOptions = task_options
        ) -> None:
            for next_workload in next_workloads:
                selection = ScheduleSelection.resolve(
                    next_workload, (schedule_names or {}).get(next_workload, ()), devices[0]
                )
                prefetcher.prepare(next_workload, selection, devices[0], options)

        names_of_schedules = (schedule_names or {}).get(workload, ())
        yield (
            workload,
            functools.partial(
                tune_all,
                workload,
                names_of_schedules,
                devices,
                task_options,
                prefetcher=prefetcher,
                prepare_next=prefetch_next,
            ),
        )
        started_at = None
