"""What the model sees of a config: the workload's sizes, the knobs' values, and what the config uses of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tvmconv.knobs.space import Space
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import numpy_dtype
from tvmconv.workloads.layout import CHANNELS_LAST

ABSENT = -1.0  # in place of a feature that a config does not have: knobs have other options for other workloads
LAUNCH_SECONDS = 1.5e-6  # that the smallest kernel takes
TENSOR_CORES = {
    "tf32": 8,
    "float16": 16,
    "bfloat16": 16,
}  # times the float32 rate, about


@dataclass(frozen=True)
class Machine:
    """A device's numbers, as a model keeps them.

    Attributes:
        name: the driver's, such as "NVIDIA H200".
        arch: such as "sm_90".
        multiprocessors: of it.
        flops: float32 FLOP/s at most.
        bandwidth: bytes/s of global memory at most.
    """

    name: str
    arch: str
    multiprocessors: int
    flops: float
    bandwidth: float

    def least_seconds(self, w: Conv) -> float:
        """What no kernel is faster than, about: the unit of what is learnt, so that one workload serves for others."""
        arithmetic = w.flops / (self.flops * TENSOR_CORES.get(w.dtype, 1))
        return LAUNCH_SECONDS + max(arithmetic, w.min_bytes / self.bandwidth)


def features(w: Conv, space: Space, points: np.ndarray, machine: Machine) -> dict[str, np.ndarray]:
    """Columns of numbers by name, float32 (n,); the names do not depend on the workload, but some may be missing.

    Args:
        w: the workload.
        space: of a schedule for it.
        points: configs (n, knobs).
        machine: where they run.
    """
    rows, names = space.features(points)
    columns = dict(zip(names, rows.T, strict=True))
    for name, value in _of_workload(w, machine).items():
        columns[f"w.{name}"] = np.full(len(points), value, np.float32)
    if "blocks" in columns:
        waves = (2.0 ** columns["blocks"] - 1) / machine.multiprocessors
        columns["waves"] = np.log2(np.maximum(waves, 2**-10)).astype(np.float32)
        columns["tail"] = (waves / np.ceil(np.maximum(waves, 1e-6))).astype(np.float32)
    if "estimate" in columns:  # as a ratio, like what is to be told: trees are bad at differences of features
        estimate = 2.0 ** columns["estimate"].astype(np.float64) - 1
        columns["estimate/least"] = np.log2(np.maximum(estimate, 1e-6)).astype(np.float32) - columns["w.least"]
    return columns


def matrix(columns: dict[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    """The columns of these names, float32 (n, names); `ABSENT` for those that are not there."""
    count = len(next(iter(columns.values())))
    absent = np.full(count, ABSENT, np.float32)
    return np.stack([columns.get(name, absent) for name in names], axis=1)


def _of_workload(w: Conv, machine: Machine) -> dict[str, float]:
    pixels, taps = math.prod(w.out), math.prod(w.kernel)
    itemsize = numpy_dtype(w.storage).itemsize
    sizes = {
        "N": w.N,
        "C": w.C / w.groups,
        "O": w.O / w.groups,
        "groups": w.groups,
        "pixels": pixels,
        "line": w.out[-1],
        "taps": taps,
        "filter": w.kernel[-1],
        "stride": math.prod(w.stride),
        "dilation": max(w.dilation),
        "rows": w.N * pixels,
        "depth": w.C / w.groups * taps,
        "flops": w.flops,
        "bytes": w.min_bytes,
        "least": machine.least_seconds(w) * 1e6,
    }
    return {
        **{name: math.log2(size) for name, size in sizes.items()},
        "itemsize": itemsize,
        "tensor": TENSOR_CORES.get(w.dtype, 1),
        "last": float(w.layout == CHANNELS_LAST),
        "epilogue": len(w.epilogue),
    }
