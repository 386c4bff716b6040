"""Processes that start before there is anything to measure, so that they are ready when there is."""

from __future__ import annotations

from collections.abc import Iterable

from tvmconv.devices import Device
from tvmconv.measuring import pool, standing
from tvmconv.measuring.bench_process import Wake
from tvmconv.measuring.local import DEVICE_PROCESS


def begin_processes(workers: int | None, places: Iterable[Device]) -> None:
    """Start the processes that build and those that measure on GPUs of this host; in a block of `standing.standing`.

    Args:
        workers: how many build; by default as many as a `Measurer` has.
        places: where to measure.
    """
    for place in places:  # first, as these begin at once, and builders when TVM is loaded
        if place.kind == "cuda" and not place.text.startswith("rpc:"):
            standing.begin(DEVICE_PROCESS, place.text, 1, Wake(place.text))
    standing.begin(pool.BUILDER, pool.BUILDER, pool.workers_of(workers))
