"""The time that schedules of channels-last arrays need in addition for channels-first ones."""

from __future__ import annotations

import math

from tvmconv.target import Target
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

DERIVED_KINDS = ("dgrad", "wgrad", "transpose")  # operators whose kernels convert all arrays
MIN_TENSOR_CORE_CHANNELS = 8  # channels of a group below which kernels without tensor cores are the fastest
PIXEL_STORE_RATIO = 0.05  # time of a store in vectors of pixels beyond one by TMA, relative to its bytes; assumed
MIN_BOX_PIXELS = 16  # pixels of the narrowest box in which TMA copies channels-first pixels
MAX_STEM_CHANNELS = 8  # the schedule for first layers, which reads either layout, is for fewer channels of X


def estimate_conversion_seconds(workload: ConvOperator, target: Target) -> float:
    """Return the estimated seconds for the conversion of channels-first arrays around the fastest kernel.

    Kernels on tensor cores store their output as it lies, and read inputs below filters of one tap as they lie.

    Examples:
        >>> from tvmconv.target import H200
        >>> from tvmconv.workloads import parse
        >>> estimate_conversion_seconds(parse("conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc"), H200)
        0.0
    """
    if workload.layout == CHANNELS_LAST:
        return 0.0
    if workload.kind in DERIVED_KINDS:  # the input, and often the output, are read and written once more
        return target.launch_seconds + 2 * workload.min_bytes / target.bandwidth
    channels, is_16_bit = workload.C // workload.groups, get_itemsize(workload.storage) == 2
    converts_input = workload.input_layout == CHANNELS_FIRST
    if workload.groups > 1 and channels < MIN_TENSOR_CORE_CHANNELS:  # direct kernels of one layout
        converts_input = converts_input and workload.layout != CHANNELS_FIRST
        if workload.layout != CHANNELS_FIRST and not converts_input:
            return estimate_copy_seconds(math.prod(workload.output_shape) * get_itemsize(workload.storage), target)
    elif channels < MAX_STEM_CHANNELS and workload.spatial_ndim == 2:
        converts_input = False
    elif is_16_bit and math.prod((*workload.kernel, *workload.stride)) == 1 and not any(workload.padding):
        converts_input = converts_input and math.prod(workload.input_size) % MIN_BOX_PIXELS > 0
    input_bytes, output_bytes = (
        math.prod(shape) * get_itemsize(workload.storage) for shape in (workload.input_shape, workload.output_shape)
    )
    stores_pixels = workload.output_layout == CHANNELS_FIRST
    store_seconds = stores_pixels * PIXEL_STORE_RATIO * output_bytes / target.bandwidth
    return store_seconds + (estimate_copy_seconds(input_bytes, target) if converts_input else 0.0)


def estimate_copy_seconds(nbytes: int, target: Target) -> float:
    """Return the estimated seconds of a launch that reads and writes an array of `nbytes`."""
    return target.launch_seconds + 2 * nbytes / target.bandwidth
