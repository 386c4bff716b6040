"""Processes that start before there is anything to measure, so that they are ready when there is."""

from __future__ import annotations

from collections.abc import Iterable

from tvmconv.devices import Device
from tvmconv.measure import builder_pool
from tvmconv.measure.local_runner import RUNNER_PROCESS_MODULE
from tvmconv.measure.runner_process import WarmUpMessage
from tvmconv.measure.workers import pool


def prestart_workers(num_builders: int | None, devices: Iterable[Device]) -> None:
    """Start the processes that build and those that measure on GPUs of this host; in a block of
    `tvmconv.measure.workers.pool.keep_workers_alive`.

    Args:
        num_builders: how many build; by default as many as a `Measurer` has.
        devices: where to measure.
    """
    for device in devices:  # first, as these begin at once, and builders when TVM is loaded
        if device.kind == "cuda" and not device.text.startswith("rpc:"):
            pool.prestart(RUNNER_PROCESS_MODULE, device.text, 1, WarmUpMessage(device.text))
    pool.prestart(
        builder_pool.BUILDER_MODULE, builder_pool.BUILDER_MODULE, builder_pool.resolve_num_workers(num_builders)
    )
