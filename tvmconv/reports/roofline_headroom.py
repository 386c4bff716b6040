"""The headroom on tensor cores: the minimum time of a layer at the best rates that kernels of a GPU have reached.

The model is `Target.roofline_seconds` with measured rates instead of the data sheet's. It is an optimistic bound:
kernels near the ridge reach neither rate, and the rates are those of short bursts, while a GPU under load lowers its
clock.
"""

from __future__ import annotations

from tvmconv.experiments.results import Result
from tvmconv.target import BEST_RATES
from tvmconv.workloads import Conv


def compute_roofline_headroom(result: Result, library: str) -> float | None:
    """Return the speed-up over a library of a direct convolution that takes the minimum time; None if it is unknown."""
    target = BEST_RATES.get(result.device_name)
    timing = next((row.timing for row in result.rows if row.name == library), None)
    if not target or not timing or not isinstance(result.workload, Conv):
        return None
    if result.workload.dtype not in target.tensor_flops:
        return None
    return timing.median / target.roofline_seconds(result.workload, in_l2=not timing.cold)
