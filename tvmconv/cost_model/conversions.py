"""The time that schedules of channels-last arrays need in addition for channels-first ones."""

from __future__ import annotations

import math

from tvmconv.target import Target
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

MAX_STEM_CHANNELS = 8  # the schedule for first layers, which reads either layout, is for fewer channels of X


def estimate_conversion_seconds(workload: ConvOperator, target: Target) -> float:
    """Return the estimated seconds for the conversion of channels-first arrays around a channels-last kernel.

    Examples:
        >>> from tvmconv.target import H200
        >>> from tvmconv.workloads import parse
        >>> estimate_conversion_seconds(parse("conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc"), H200)
        0.0
    """
    if workload.layout == CHANNELS_LAST:
        return 0.0
    if workload.layout == CHANNELS_FIRST:  # the input, and often the output, are read and written once more
        return target.launch_seconds + 2 * workload.min_bytes / target.bandwidth
    if workload.input_layout == CHANNELS_FIRST and workload.C < MAX_STEM_CHANNELS and workload.spatial_ndim == 2:
        return 0.0
    shape = workload.input_shape if workload.input_layout == CHANNELS_FIRST else workload.output_shape
    return estimate_copy_seconds(math.prod(shape) * get_itemsize(workload.storage), target)


def estimate_copy_seconds(nbytes: int, target: Target) -> float:
    """Return the estimated seconds of a launch that reads and writes an array of `nbytes`."""
    return target.launch_seconds + 2 * nbytes / target.bandwidth
