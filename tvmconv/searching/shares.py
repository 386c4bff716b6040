"""How a network's time for tuning is shared out among its layers: by what each costs the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.devices import Device
from tvmconv.workloads import Workload

LEAST_SECONDS = 1.0  # of a layer that is searched
LEAST_CONFIRMED_SECONDS = 2.0  # of one whose fastest configs are timed once more, which takes half a second
LAUNCH_SECONDS = 2e-6  # that a kernel takes, however small it is
PEAK_FLOPS, PEAK_BANDWIDTH = 1e12, 1e11  # of a device that does not tell


def by_cost(network: Mapping[Workload, int], device: Device) -> list[Workload]:
    """The workloads of a network, those first for which it takes the most time at the device's peaks.

    Args:
        network: how often there is each.
        device: where they run.
    """
    return sorted(network, key=lambda workload: -network[workload] * roofline_seconds(workload, device))


def served(seconds: float, left: Sequence[Workload]) -> Sequence[Workload]:
    """Those that can have `LEAST_SECONDS` each of some seconds: the first ones, and at least one."""
    return left[: max(1, int(seconds / LEAST_SECONDS))]


def share(seconds: float, left: Sequence[Workload], counts: Mapping[Workload, int], device: Device) -> float:
    """The seconds for the first of the workloads that are left.

    Each has the same small part, and the rest goes by the time that the network takes for it at the device's peaks.

    Args:
        seconds: for all that are left.
        left: workloads, at least one.
        counts: how often the network has each; once, where it does not tell.
        device: where they run.
    """
    least = min(LEAST_SECONDS, seconds / len(left) / 2)
    costs = [counts.get(workload, 1) * roofline_seconds(workload, device) for workload in left]
    return least + (seconds - least * len(left)) * costs[0] / sum(costs)


def roofline_seconds(workload: Workload, device: Device) -> float:
    """What a launch takes at least, about: by its operations in float32, by its bytes, and as a launch."""
    flops = workload.flops / (device.peak_flops or PEAK_FLOPS)
    moved = workload.min_bytes / (device.peak_bandwidth or PEAK_BANDWIDTH)
    return LAUNCH_SECONDS + max(flops, moved)
