"""Start of worker processes before they are needed."""

from __future__ import annotations

from collections.abc import Iterable

from tvmconv.devices import Device
from tvmconv.measure import builder_pool
from tvmconv.measure.runner import RUNNER_PROCESS_MODULE
from tvmconv.measure.runner_process import WarmUpMessage
from tvmconv.measure.workers import pool


def prestart_workers(num_builders: int | None, devices: Iterable[Device]) -> None:
    """Start builder processes and the runner processes of local GPUs, within `pool.keep_workers_alive`.

    `num_builders`: number of builders; that of a `Measurer` by default.
    """
    for device in devices:  # first, because builders have to wait for the loading of TVM
        if device.kind == "cuda" and not device.text.startswith("rpc:"):
            pool.shared.prestart(RUNNER_PROCESS_MODULE, device.text, 1, WarmUpMessage(device.text))
    module = builder_pool.BUILDER_MODULE
    pool.shared.prestart(module, module, builder_pool.resolve_num_workers(num_builders))
