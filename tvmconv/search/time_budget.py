"""Division of a network's tuning time among its layers, by the cost of each layer in the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.devices import Device
from tvmconv.target import UNKNOWN_TARGET
from tvmconv.workloads import Workload

MIN_TASK_SECONDS = 1.0  # minimum time of a layer that is searched
MIN_SECONDS_TO_REMEASURE = 2.0  # minimum time of a layer with final timings, which take half a second


def sort_by_cost(network: Mapping[Workload, float], device: Device) -> list[Workload]:
    """Return the workloads of a network, ordered by their total time at the device's peak rates, the longest first."""
    target = device.target or UNKNOWN_TARGET
    return sorted(network, key=lambda workload: -network[workload] * target.roofline_seconds(workload))


def select_affordable(seconds: float, remaining: Sequence[Workload]) -> Sequence[Workload]:
    """Return the first workloads for which `seconds` suffice at `MIN_TASK_SECONDS` each, at least one."""
    return remaining[: max(1, int(seconds / MIN_TASK_SECONDS))]


def allocate_seconds(
    seconds: float, remaining: Sequence[Workload], counts: Mapping[Workload, float], device: Device
) -> float:
    """Return the seconds for the first of the remaining workloads. Each workload gets an equal minimum, and the rest is
    divided in proportion to the time of all occurrences of a workload at the device's peak rates.
    """
    min_seconds = min(MIN_TASK_SECONDS, seconds / len(remaining) / 2)
    target = device.target or UNKNOWN_TARGET
    weighted_seconds = [counts.get(workload, 1) * target.roofline_seconds(workload) for workload in remaining]
    return min_seconds + (seconds - min_seconds * len(remaining)) * weighted_seconds[0] / sum(weighted_seconds)
