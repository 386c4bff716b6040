"""What is left to win on tensor cores: the least time of a layer at the best rates that kernels of a GPU have reached.

A roofline (Williams et al., "Roofline", CACM 52(4), 2009) with a launch before it, of measured rates instead of the
data sheet's. Its ridge is sharp, though kernels near it reach neither rate, and the rates are those of bursts, though
a GPU at work lowers its clock: it is a bound, and a generous one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvmconv.experiments.results import Result
from tvmconv.workloads import Conv


@dataclass(frozen=True)
class PeakRates:
    """The best that any kernel in the logs has reached on a GPU, ours or a library's, its launch taken off.

    Attributes:
        launch_seconds: seconds that the smallest kernel takes.
        flops_per_second: FLOP/s on tensor cores, by dtype.
        memory_bytes_per_second: bytes/s of arrays that are not in the cache.
        cache_bytes_per_second: bytes/s of those that are.
    """

    launch_seconds: float
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    cache_bytes_per_second: float

    def roofline_seconds(self, w: Conv, is_cold: bool) -> float | None:
        """What a kernel that does all multiplications takes at least; None where tensor cores do not compute the dtype.

        Args:
            w: the convolution.
            is_cold: whether its arrays come from memory.
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
    """How many times as fast as a library a kernel is that takes the least time; None where that is not known."""
    rates = PEAK_RATES.get(result.device_name)
    timing = next((row.timing for row in result.rows if row.name == library), None)
    if not rates or not timing or not isinstance(result.workload, Conv):
        return None
    min_seconds = rates.roofline_seconds(result.workload, timing.cold)
    return timing.median / min_seconds if min_seconds else None
