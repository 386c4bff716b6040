"""The time that a workload's naive schedule takes, about, and whether a comparison with it is affordable."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.devices import Device
from tvmconv.registry import Schedule
from tvmconv.workloads import Workload

PEAK_FRACTION = 1 / 200  # of a GPU's float32 peak that the naive schedules reach: 280 GFLOP/s on an H200
FALLBACK_FLOPS = 50e9  # FLOP/s, where a device does not tell its peak
MAX_SECONDS = 1.0  # of a launch, above which the naive schedule is compared with only where it is named


def estimate_seconds(workload: Workload, device: Device) -> float:
    """Estimate the seconds of one launch of the naive schedule from the workload's FLOP."""
    rate = device.peak_flops * PEAK_FRACTION if device.peak_flops else FALLBACK_FLOPS
    return workload.flops / rate


def is_affordable(workload: Workload, device: Device) -> bool:
    """Return whether a launch of the naive schedule takes at most about `MAX_SECONDS`."""
    return estimate_seconds(workload, device) <= MAX_SECONDS


def describe_omission(schedule: Schedule, workloads: Sequence[Workload], device: Device) -> str:
    """Return which schedule is left out, and why, such as "default left out: about 7 s a launch".

    Args:
        schedule: the naive one.
        workloads: those for which it is left out, at least one.
        device: where it would run.
    """
    longest = max(estimate_seconds(workload, device) for workload in workloads)
    scope = f" for {len(workloads)} workloads" if len(workloads) > 1 else ""
    qualifier = "up to " if scope else ""
    return f"{schedule.name} left out{scope}: {qualifier}about {longest:.0f} s a launch"
