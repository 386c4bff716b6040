"""How a network's time for tuning is shared out among its layers: by what each costs the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.devices import Device
from tvmconv.workloads import Workload

LEAST_SECONDS = 2.0  # of a layer, if there is so much for each
LAUNCH_SECONDS = 2e-6  # that a kernel takes, however small it is
PEAK_FLOPS, PEAK_BANDWIDTH = 1e12, 1e11  # of a device that does not tell


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
