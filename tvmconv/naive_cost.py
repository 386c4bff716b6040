"""Estimated time of a workload's naive schedule, which decides whether a comparison with it is affordable."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.devices import Device
from tvmconv.registry import Schedule
from tvmconv.workloads import Workload

PEAK_FRACTION = 1 / 200  # fraction of a GPU's float32 peak that the naive schedules reach: 280 GFLOP/s on an H200
FALLBACK_FLOPS = 50e9  # FLOP/s for a device with unknown peak
MAX_SECONDS = 1.0  # launch time above which the naive schedule runs only if the user names it


def estimate_seconds(workload: Workload, device: Device) -> float:
    """Estimate the seconds of one launch of the naive schedule from the workload's FLOP."""
    rate = device.peak_flops * PEAK_FRACTION if device.peak_flops else FALLBACK_FLOPS
    return workload.flops / rate


def is_affordable(workload: Workload, device: Device) -> bool:
    """Return whether a launch of the naive schedule takes at most about `MAX_SECONDS`."""
    return estimate_seconds(workload, device) <= MAX_SECONDS


def describe_omission(schedule: Schedule, workloads: Sequence[Workload], device: Device) -> str:
    """Return a message on an omitted naive schedule, such as "default left out: about 7 s a launch"."""
    longest = max(estimate_seconds(workload, device) for workload in workloads)
    scope = f" for {len(workloads)} workloads" if len(workloads) > 1 else ""
    qualifier = "up to " if scope else ""
    return f"{schedule.name} left out{scope}: {qualifier}about {longest:.0f} s a launch"
