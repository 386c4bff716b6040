"""Processes that start before there is anything to measure, so that they are ready when there is."""

from __future__ import annotations

from collections.abc import Iterable

from tvmconv.devices import Device
from tvmconv.measuring import builder, pool, standing
from tvmconv.measuring.bench_process import Wake
from tvmconv.measuring.local import DEVICE_PROCESS


def begin_builders(workers: int | None, device: Device) -> None:
    """Start processes that build; within a block of `standing.standing`.

    Args:
        workers: how many; by default as many as a `Measurer` has.
        device: what they will build for.
    """
    first = builder.Wake(device) if device.kind == "cuda" else None
    standing.begin(pool.BUILDER, pool.BUILDER, pool.workers_of(workers), first)


def begin_devices(places: Iterable[Device]) -> None:
    """Start the processes that measure on the GPUs of this host; within a block of `standing.standing`."""
    for place in places:
        if place.kind == "cuda" and not place.text.startswith("rpc:"):
            standing.begin(DEVICE_PROCESS, place.text, 1, Wake(place.text))
