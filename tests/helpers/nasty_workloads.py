"""Workloads that are easy to get wrong: sizes of one, unequal sides, strides that skip, masks wider than signals."""

import numpy as np
import tvm

from tvmconv.devices.comparison import compute_relative_error
from tvmconv.workloads.dtypes import get_numpy_dtype, get_tir_dtype

CONVOLUTIONS = [
    "conv2d:1x1x1x1,1x1x1x1",
    "conv2d:2x3x7x11,5x3x3x3,p1",
    "conv2d:1x3x9x8,4x3x2x5,s2x3,p1x2x0x3",
    "conv2d:1x2x13x12,3x2x3x2,p2,d2x3",
    "conv2d:1x4x5x6,2x4x1x1,s2",
    "conv2d:2x6x8x7,9x2x3x3,s2x1,p1x0,g3",
    "conv2d:3x7x6x6,7x1x3x3,p1,g7",
    "conv2d:1x2x5x5,6x1x3x3,s3,p3x0x1x2,d2,g2",
    "conv2d:1x4x6x6,4x4x3x3,p1,f16",
    "conv2d:1x4x6x6,4x2x3x3,p1,g2,f16",
    "conv2d:1x4x6x6,4x4x3x3,p1,tf32",
    "conv2d:2x4x5x7,6x2x3x3,p1x0x2x1,g2,bf16",
    "conv2d:2x6x8x7,9x2x3x3,s2x1,p1x0,g3,nhwc",
    "conv2d:2x4x5x7,6x2x3x3,p1x0x2x1,g2,f16,nhwc",
    "conv1d:1x1x1,1x1x1",
    "conv1d:3x4x17,6x4x5,s2,p1x3,d2",
    "conv1d:1x6x13,9x2x3,p1,g3,nhwc",
    "conv3d:1x1x1x1x1,1x1x1x1x1",
    "conv3d:2x3x4x5x6,4x3x2x3x1,s1x2x1,p1x0x2x0x1x1,d2x1x1",
    "conv3d:1x4x3x5x4,4x1x3x3x3,p1,g4,nhwc",
    "conv3d:1x4x3x5x4,2x4x1x3x3,p0x1x1,bf16",
]

FILTERS = [
    "filter1d:1,k1",
    "filter1d:1,k31,clamp",
    "filter1d:13,k5",
    "filter1d:5,k9",
    "filter2d:1x1x1,1x1",
    "filter2d:7x11x3,3x5",
    "filter2d:3x2x2,17x17,clamp",
    "filter2d:1x13x1,1x3",
    "filter2d:13x1x4,7x1,clamp",
]


def evaluate(workload, *inputs):
    """What the declaration computes, compiled for the CPU."""
    output = np.full(workload.argument_shapes[-1], np.nan, get_numpy_dtype(workload.argument_dtypes[-1]))
    arrays = [
        array.view(get_tir_dtype(array.dtype.name)) if array.itemsize == 1 else array for array in (*inputs, output)
    ]
    arguments = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(workload.prim_func(), target="llvm")["main"](*arguments)
    return arguments[-1].numpy().view(output.dtype)


def declares_its_reference(workload):
    """Whether the declaration computes the reference, up to rounding."""
    inputs = workload.inputs(seed=0)
    return compute_relative_error(evaluate(workload, *inputs), workload.reference(*inputs)) <= workload.tolerance
