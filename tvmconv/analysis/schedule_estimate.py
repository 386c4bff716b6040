"""How long a kernel takes by the estimate of its schedule, a formula over the tiles, where that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvmconv.errors import KnobError

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel


def estimate_schedule_seconds(kernel: Kernel) -> float | None:
    """The seconds, on the GPU that the formula was fitted to; None where it is for no such config, or tells no time."""
    space = kernel.schedule.space(kernel.workload, kernel.device.limits)
    try:
        usage = space.compute_usage(space.point_from_config(kernel.config)[None])
    except KnobError:  # a value that no search would try
        return None
    if usage is None or usage.estimate is None or usage.estimate_seconds_per_unit is None:
        return None
    return float(usage.estimate[0]) * usage.estimate_seconds_per_unit
