"""What the model sees of a config: the workload's sizes, the knobs' values, and what the config uses of a device."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tvmconv.compat import split_feature
from tvmconv.space.search_space import Space
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_numpy_dtype
from tvmconv.workloads.layout import CHANNELS_LAST

MISSING = -1.0  # in place of a feature that a config does not have: knobs have other options for other workloads
LAUNCH_SECONDS = 1.5e-6  # that the smallest kernel takes
TENSOR_CORE_RATE = {
    "tf32": 8,
    "float16": 16,
    "bfloat16": 16,
}  # times the float32 rate, about


@dataclass(frozen=True)
class DeviceSpec:
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

    def roofline_seconds(self, workload: Conv) -> float:
        """What no kernel is faster than, about: the unit of what is learnt, so that one workload serves for others."""
        compute_seconds = workload.flops / (self.flops * TENSOR_CORE_RATE.get(workload.dtype, 1))
        return LAUNCH_SECONDS + max(compute_seconds, workload.min_bytes / self.bandwidth)


def compute_features(
    workload: Conv, space: Space, points: np.ndarray, device_spec: DeviceSpec
) -> dict[str, np.ndarray]:
    """Columns of numbers by name, float32 (n,); the names do not depend on the workload, but some may be missing.

    Args:
        workload: the workload.
        space: of a schedule for it.
        points: configs (n, knobs).
        device_spec: where they run.
    """
    values, names = space.compute_features(points)
    columns_by_name = dict(zip(names, values.T, strict=True))
    for name, value in _compute_workload_features(workload, device_spec).items():
        columns_by_name[f"w.{name}"] = np.full(len(points), value, np.float32)
    if "blocks" in columns_by_name:
        waves = (2.0 ** columns_by_name["blocks"] - 1) / device_spec.multiprocessors
        columns_by_name["waves"] = np.log2(np.maximum(waves, 2**-10)).astype(np.float32)
        columns_by_name["tail"] = (waves / np.ceil(np.maximum(waves, 1e-6))).astype(np.float32)
    if "estimate" in columns_by_name:  # as a ratio, like what is to be told: trees are bad at differences of features
        estimate = 2.0 ** columns_by_name["estimate"].astype(np.float64) - 1
        columns_by_name["estimate/least"] = (
            np.log2(np.maximum(estimate, 1e-6)).astype(np.float32) - columns_by_name["w.least"]
        )
    return columns_by_name


def build_matrix(
    columns_by_name: dict[str, np.ndarray], names: tuple[str, ...], knobs: Collection[str] = ()
) -> np.ndarray:
    """Return the columns of these names, float32 (n, names).

    Args:
        columns_by_name: features of configs, as `compute_features` returns them.
        names: names of features, in the order of the columns.
        knobs: names of knobs that the schedule has for some workload; of those that this workload does not have, the
            features are `MISSING`.

    Raises:
        ValueError: a feature is missing, and no knob has it.
    """
    unknown = [name for name in names if name not in columns_by_name and split_feature(name)[0] not in knobs]
    if unknown:
        raise ValueError(f"the cost model has features that its schedule does not produce: {', '.join(unknown)}")
    num_points = len(next(iter(columns_by_name.values())))
    missing = np.full(num_points, MISSING, np.float32)
    return np.stack([columns_by_name.get(name, missing) for name in names], axis=1)


def _compute_workload_features(workload: Conv, device_spec: DeviceSpec) -> dict[str, float]:
    num_pixels, num_taps = math.prod(workload.output_size), math.prod(workload.kernel)
    itemsize = get_numpy_dtype(workload.storage).itemsize
    sizes = {
        "N": workload.N,
        "C": workload.C / workload.groups,
        "O": workload.O / workload.groups,
        "groups": workload.groups,
        "pixels": num_pixels,
        "line": workload.output_size[-1],
        "taps": num_taps,
        "filter": workload.kernel[-1],
        "stride": math.prod(workload.stride),
        "dilation": max(workload.dilation),
        "rows": workload.N * num_pixels,
        "depth": workload.C / workload.groups * num_taps,
        "flops": workload.flops,
        "bytes": workload.min_bytes,
        "least": device_spec.roofline_seconds(workload) * 1e6,
    }
    return {
        **{name: math.log2(size) for name, size in sizes.items()},
        "itemsize": itemsize,
        "tensor": TENSOR_CORE_RATE.get(workload.dtype, 1),
        "last": float(workload.layout == CHANNELS_LAST),
        "epilogue": len(workload.epilogue),
    }
