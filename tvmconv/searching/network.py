"""The workloads of a network, searched one after another within a time for all of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.searching.opening import Ahead, Field
from tvmconv.searching.request import Request
from tvmconv.searching.search import Tuned
from tvmconv.searching.shares import LEAST_CONFIRMED_SECONDS, by_cost, served, share
from tvmconv.searching.tune import Told, tune_all
from tvmconv.workloads import Workload

LEAST = 1e-3  # seconds of a search, for which there is no time


def one_after_another(
    network: Mapping[Workload, int],
    places: Sequence[Device],
    request: Request,
    *,
    named: Mapping[Workload, Sequence[str]] | None = None,
    deadline: Deadline | None = None,
) -> Iterator[tuple[Workload, Callable[[Told], Tuned]]]:
    """The searches of a network's workloads, each to be done before the next is asked for.

    While one is under way, what the next needs is prepared. In a block of `standing` they have the same processes.

    Args:
        network: what to compute, and how often the network has each.
        places: devices of one architecture, to measure on.
        request: how to search, and, unless there is a deadline, how long each; the clock of the first one begins with
            it.
        named: schedules that shall be searched; all that can win, where none are named.
        deadline: when all shall be done. The workloads then come in the order of what they cost the network, the most
            expensive first, and share the time by that. Where the time is too short for all, the others are not
            searched: what comes of them is what the log has.

    Yields:
        A workload, and what searches it; that is told the status about ten times a second, and raises as `tune` does.
    """
    ahead, begun = Ahead(), request.begun
    left = [*network] if deadline is None else by_cost(network, places[0])
    while left:
        first = len(left) == len(network)
        own, following = replace(request, begun=begun), [*left[1:2]]
        if deadline is not None:
            chosen = served(deadline.left, left)
            seconds = max(share(deadline.left, chosen, network, places[0]), LEAST)
            limit = deadline.cut_off if first or not deadline.has_passed else deadline
            is_last = len(chosen) == 1  # whose slack is that of the network
            own = replace(
                request,
                seconds=seconds,
                confirm=request.confirm and seconds >= LEAST_CONFIRMED_SECONDS,
                begun=time.monotonic(),
                limit=limit,
                waits_for_first=is_last,
            )
            following = [*chosen[1:2]]
        workload = left.pop(0)

        def prepare_next(following: Sequence[Workload] = following, request: Request = own) -> None:
            for next_one in following:
                field = Field.of(next_one, (named or {}).get(next_one, ()), places[0])
                ahead.prepare(next_one, field, places[0], request)

        schedules = (named or {}).get(workload, ())
        yield workload, functools.partial(tune_all, workload, schedules, places, own, ahead=ahead, then=prepare_next)
        begun = None
