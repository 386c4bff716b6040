"""Predictions for many workloads at once, which builder processes make in parallel."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv import registry
from tvmconv.cost_model.predict import Prediction
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.measure.builder import BUILD_MEMORY_BYTES, BuilderCall, BuilderSetup, call_all
from tvmconv.measure.workers.pool import resolve_num_workers
from tvmconv.workloads import Workload

MIN_WORKLOADS_PER_PROCESS = 2  # a process starts in the time of some predictions


def recommend_for_all(
    workloads: Sequence[Workload],
    device: Device,
    num_workers: int | None = None,
    deadline: Deadline | None = None,
) -> dict[Workload, list[Prediction]]:
    """Return the result of `recommend_configs` for each workload. A workload for which it raises an error is left out.

    A prediction takes half a second of processor time, so that those of a network would take as long as its builds if
    one process made them.

    Args:
        workloads: Workloads to compute.
        device: Device to run on, or architecture to compile for.
        num_workers: Maximum number of processes; by default one less than the number of processors.
        deadline: Time at which the remaining workloads are left out.
    """
    if not workloads:
        return {}
    operators = {workload.operator for workload in workloads}
    by_key = {f"{each.operator} {each.name}": each for each in registry.schedules() if each.operator in operators}
    setup = BuilderSetup(workloads[0], by_key, device, BUILD_MEMORY_BYTES)
    calls = [BuilderCall(recommend_configs, (workload, device)) for workload in workloads]
    pool_size = min(resolve_num_workers(num_workers), len(workloads) // MIN_WORKLOADS_PER_PROCESS)
    results = call_all(setup, calls, pool_size, deadline)
    return {workload: each.value for workload, each in zip(workloads, results, strict=True) if not each.error}
