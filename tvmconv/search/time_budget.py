"""How a network's time for tuning is shared out among its layers: by what each costs the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.devices import Device
from tvmconv.workloads import Workload

MIN_TASK_SECONDS = 1.0  # of a layer that is searched
MIN_SECONDS_TO_REMEASURE = 2.0  # of one whose fastest configs are timed once more, which takes half a second
LAUNCH_SECONDS = 2e-6  # that a kernel takes, however small it is
DEFAULT_PEAK_FLOPS, DEFAULT_PEAK_BANDWIDTH = 1e12, 1e11  # of a device that does not tell


def sort_by_cost(network: Mapping[Workload, int], device: Device) -> list[Workload]:
    """The workloads of a network, those first for which it takes the most time at the device's peaks.

    Args:
        network: how often there is each.
        device: where they run.
    """
    return sorted(network, key=lambda workload: -network[workload] * roofline_seconds(workload, device))


def select_affordable(seconds: float, remaining: Sequence[Workload]) -> Sequence[Workload]:
    """Those that can have `MIN_TASK_SECONDS` each of some seconds: the first ones, and at least one."""
    return remaining[: max(1, int(seconds / MIN_TASK_SECONDS))]


def allocate_seconds(
    seconds: float, remaining: Sequence[Workload], counts: Mapping[Workload, int], device: Device
) -> float:
    """The seconds for the first of the workloads that are left.

    Each has the same small part, and the rest goes by the time that the network takes for it at the device's peaks.

    Args:
        seconds: for all that are left.
        remaining: workloads, at least one.
        counts: how often the network has each; once, where it does not tell.
        device: where they run.
    """
    min_seconds = min(MIN_TASK_SECONDS, seconds / len(remaining) / 2)
    weighted_seconds = [counts.get(workload, 1) * roofline_seconds(workload, device) for workload in remaining]
    return min_seconds + (seconds - min_seconds * len(remaining)) * weighted_seconds[0] / sum(weighted_seconds)


def roofline_seconds(workload: Workload, device: Device) -> float:
    """What a launch takes at least, about: by its operations in float32, by its bytes, and as a launch."""
    compute_seconds = workload.flops / (device.peak_flops or DEFAULT_PEAK_FLOPS)
    memory_seconds = workload.min_bytes / (device.peak_bandwidth or DEFAULT_PEAK_BANDWIDTH)
    return LAUNCH_SECONDS + max(compute_seconds, memory_seconds)
