"""The convolution of 16-bit operands that the cost model covers in place of one of 8-bit operands.

A convolution of 8-bit operands with C input channels reads as many bytes as one of float16 with C / 2 channels, and
issues as many matrix instructions: `wgmma` and `mma.sync` multiply 32 bytes of each operand along K in either type.
Configs whose tiles are stated in bytes are therefore about as good for one as for the other. A depthwise convolution
widens its operands, and computes as many products as in float16.
"""

from __future__ import annotations

from tvmconv.workloads import Workload
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.dtypes import DTYPES, FLOAT16
from tvmconv.workloads.epilogue import QUANTIZE, ZERO_POINT

# Schedules whose knobs state tiles along K in bytes, or whose tiles have no extent along K.
SCHEDULES_IN_BYTES = ("hopper", "window_hopper", "depthwise_nhwc")

REMOVED_OPERATIONS = (QUANTIZE, ZERO_POINT)  # operations that need operands of 8 bits


def make_16_bit_equivalent(workload: Workload) -> Conv | None:
    """Return the float16 convolution with as many bytes along K; None for others than convolutions in 8 bits."""
    if not isinstance(workload, Conv) or not DTYPES[workload.dtype].has_8_bits:
        return None
    channels = workload.C
    if workload.groups != workload.C:
        if workload.C // workload.groups % 2:
            return None
        channels //= 2
    epilogue = tuple(operation for operation in workload.epilogue if operation not in REMOVED_OPERATIONS)
    return workload.with_fields(C=channels, dtype=FLOAT16.name, epilogue=epilogue, out_dtype="", weight_dtype="")
