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
class Rates:
    """The best that any kernel in the logs has reached on a GPU, ours or a library's, its launch taken off.

    Attributes:
        launch: seconds that the smallest kernel takes.
        flops: FLOP/s on tensor cores, by dtype.
        memory: bytes/s of arrays that are not in the cache.
        cache: bytes/s of those that are.
    """

    launch: float
    flops: Mapping[str, float]
    memory: float
    cache: float

    def least_seconds(self, w: Conv, cold: bool) -> float | None:
        """What a kernel that does all multiplications takes at least; None where tensor cores do not compute the dtype.

        Args:
            w: the convolution.
            cold: whether its arrays come from memory.
        """
        if w.dtype not in self.flops:
            return None
        arithmetic = w.flops / self.flops[w.dtype]
        return self.launch + max(arithmetic, w.min_bytes / (self.memory if cold else self.cache))


RATES = {
    "NVIDIA H200": Rates(1.07e-6, {"float16": 795e12, "bfloat16": 795e12, "tf32": 430e12}, memory=4.1e12, cache=8e12),
}


def attainable(result: Result, library: str) -> float | None:
    """How many times as fast as a library a kernel is that takes the least time; None where that is not known."""
    rates = RATES.get(result.device_name)
    timing = next((row.timing for row in result.rows if row.name == library), None)
    if not rates or not timing or not isinstance(result.workload, Conv):
        return None
    least = rates.least_seconds(result.workload, timing.cold)
    return timing.median / least if least else None
