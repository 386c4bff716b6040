"""Features of a config for the cost model: sizes of the workload, values of the knobs, and resource usage."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from tvmconv.compat import split_feature
from tvmconv.space.search_space import ResourceUsage, Space
from tvmconv.target import TENSOR_CORE_RATE, Target
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.dtypes import get_numpy_dtype
from tvmconv.workloads.layout import CHANNELS_LAST

DERIVED_KINDS = ("dgrad", "wgrad", "transpose")  # operators with a feature, which is 1 for their workloads
MISSING = -1.0  # value of a feature that a config lacks, as knobs depend on the workload


def compute_features(
    workload: ConvOperator, space: Space, points: np.ndarray, device_spec: Target
) -> dict[str, np.ndarray]:
    """Return the features of configs by name, each float32 (n,). The names do not depend on the workload, but some may
    be missing.
    """
    values, names = space.compute_features(points)
    columns_by_name = dict(zip(names, values.T, strict=True))
    usage = space.compute_usage(points)
    if usage and usage.layout_seconds is not None and usage.estimate is not None:
        columns_by_name["estimate"] = np.log2(1 + _estimate_channels_last(usage)).astype(np.float32)
    for name, value in _compute_workload_features(workload, device_spec).items():
        columns_by_name[f"w.{name}"] = np.full(len(points), value, np.float32)
    if "blocks" in columns_by_name:
        waves = (2.0 ** columns_by_name["blocks"] - 1) / device_spec.multiprocessors
        columns_by_name["waves"] = np.log2(np.maximum(waves, 2**-10)).astype(np.float32)
        columns_by_name["tail"] = (waves / np.ceil(np.maximum(waves, 1e-6))).astype(np.float32)
    if "estimate" in columns_by_name:  # a ratio, like the target, because trees are bad at differences of features
        estimate = 2.0 ** columns_by_name["estimate"].astype(np.float64) - 1
        log2_estimate = np.log2(np.maximum(estimate, 1e-6)).astype(np.float32)
        columns_by_name["estimate/least"] = log2_estimate - columns_by_name["w.least"]
    return columns_by_name


def _estimate_channels_last(usage: ResourceUsage) -> np.ndarray:
    """Return the estimate of the same configs for channels-last arrays, which the models were trained on."""
    assert usage.estimate is not None
    assert usage.layout_seconds is not None
    return np.maximum(usage.estimate - usage.layout_seconds / (usage.estimate_seconds_per_unit or 1.0), 0.0)


def build_matrix(
    columns_by_name: dict[str, np.ndarray], names: tuple[str, ...], knobs: Collection[str] = ()
) -> np.ndarray:
    """Return the features of `names` as a matrix, float32 (n, names). If this workload lacks one of `knobs`, knobs and
    features that the schedule has for some workload, its features are `MISSING`.
    """
    unknown = [name for name in names if name not in columns_by_name and split_feature(name)[0] not in knobs]
    if unknown:
        raise ValueError(f"the cost model has features that its schedule does not produce: {', '.join(unknown)}")
    num_points = len(next(iter(columns_by_name.values())))
    missing = np.full(num_points, MISSING, np.float32)
    return np.stack([columns_by_name.get(name, missing) for name in names], axis=1)


def _compute_workload_features(workload: ConvOperator, device_spec: Target) -> dict[str, float]:
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
        **{kind: float(workload.kind == kind) for kind in DERIVED_KINDS},
    }
