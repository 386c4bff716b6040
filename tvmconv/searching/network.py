"""The workloads of a network, searched one after another within a time for all of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from tvmconv.devices import Device
from tvmconv.searching.opening import Ahead, Field
from tvmconv.searching.request import Request
from tvmconv.searching.search import Tuned
from tvmconv.searching.shares import share
from tvmconv.searching.tune import Told, tune_all
from tvmconv.workloads import Workload

LEAST = 0.1  # seconds that are shared out when there is no time left


def one_after_another(
    network: Mapping[Workload, int],
    places: Sequence[Device],
    request: Request,
    *,
    named: Mapping[Workload, Sequence[str]] | None = None,
    end: float | None = None,
) -> Iterator[tuple[Workload, Callable[[Told], Tuned]]]:
    """The searches of a network's workloads, each to be done before the next is asked for.

    While one is under way, what the next needs is prepared. In a block of `standing` they have the same processes.

    Args:
        network: what to compute, and how often the network has each.
        places: devices of one architecture, to measure on.
        request: how to search, and, unless there is an end, how long each; the clock of the first one begins with it.
        named: schedules that shall be searched; all that can win, where none are named.
        end: when all shall be done, as `time.monotonic` tells it; they share the time by what they cost the network.

    Yields:
        A workload, and what searches it; that is told the status about ten times a second, and raises as `tune` does.
    """
    ahead, chosen, begun = Ahead(), list(network), request.begun
    for number, workload in enumerate(chosen):
        begun = time.monotonic() if begun is None else begun
        left = chosen[number:]
        seconds = request.seconds if end is None else share(max(end - begun, LEAST), left, network, places[0])
        own = replace(request, seconds=seconds, begun=begun)

        def prepare_next(left: Sequence[Workload] = left[1:], request: Request = own) -> None:
            for next_one in left[:1]:
                field = Field.of(next_one, (named or {}).get(next_one, ()), places[0])
                ahead.prepare(next_one, field, places[0], request)

        schedules = (named or {}).get(workload, ())
        yield workload, functools.partial(tune_all, workload, schedules, places, own, ahead=ahead, then=prepare_next)
        begun = None
