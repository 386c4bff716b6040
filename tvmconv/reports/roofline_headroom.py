"""The headroom on tensor cores: the minimum time of a layer at the best rates that kernels of a GPU have reached.

The model is a roofline (Williams et al., "Roofline", CACM 52(4), 2009) plus the time of a launch, with measured rates
instead of the data sheet's. It is an optimistic bound: kernels near the ridge reach neither rate, and the rates are
those of short bursts, while a GPU under load lowers its clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvmconv.experiments.results import Result
from tvmconv.workloads import Conv


@dataclass(frozen=True)
class PeakRates:
    """The best rates that any kernel in the logs has reached on a GPU, tvmconv's or a library's, without its launch.

    Attributes:
        launch_seconds: Seconds of the smallest kernel.
        flops_per_second: FLOP/s on tensor cores, by dtype.
        memory_bytes_per_second: Bytes/s of arrays in DRAM.
        cache_bytes_per_second: Bytes/s of arrays in the L2 cache.
    """

    launch_seconds: float
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    cache_bytes_per_second: float

    def roofline_seconds(self, w: Conv, is_cold: bool) -> float | None:
        """Return the minimum seconds of a direct convolution; None for a dtype that tensor cores do not support.

        Args:
            w: The convolution.
            is_cold: Whether its arrays are in DRAM instead of the L2 cache.
        """
        if w.dtype not in self.flops_per_second:
            return None
        arithmetic_seconds = w.flops / self.flops_per_second[w.dtype]
        return self.launch_seconds + max(
            arithmetic_seconds, w.min_bytes / (self.memory_bytes_per_second if is_cold else self.cache_bytes_per_second)
        )


PEAK_RATES = {
    "NVIDIA H200": PeakRates(
        1.07e-6,
        {"float16": 795e12, "bfloat16": 795e12, "tf32": 430e12},
        memory_bytes_per_second=4.1e12,
        cache_bytes_per_second=8e12,
    ),
}


def compute_roofline_headroom(result: Result, library: str) -> float | None:
    """Return the speed-up over a library of a kernel that takes the minimum time; None if it is unknown."""
    rates = PEAK_RATES.get(result.device_name)
    timing = next((row.timing for row in result.rows if row.name == library), None)
    if not rates or not timing or not isinstance(result.workload, Conv):
        return None
    min_seconds = rates.roofline_seconds(result.workload, timing.cold)
    return timing.median / min_seconds if min_seconds else None
