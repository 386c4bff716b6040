"""The choice of layouts: which convolutions run channels last inside a model that is channels first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from tvmconv.devices import Device
from tvmconv.errors import TuningError
from tvmconv.registry import schedules
from tvmconv.relax.sites import RelaxConvolution
from tvmconv.workloads import dtypes
from tvmconv.workloads.conv_operator import ConvOperator

Layout = Literal["auto", "nchw", "nhwc"]
TENSOR_CORE_DTYPES = ("float16", "bfloat16", "tf32")


def validate_layout(layout: str) -> Layout:
    """Return `layout` if it is valid; raise TuningError otherwise."""
    if layout not in get_args(Layout):
        raise TuningError(f"layout={layout!r}: expected one of {', '.join(get_args(Layout))}")
    return layout  # type: ignore[return-value]


def plan_layouts(
    sites: Sequence[RelaxConvolution], device: Device | None, layout: Layout, *, tf32: bool = False
) -> list[ConvOperator]:
    """Return the workload of each site with its layout and dtype.

    Args:
        sites: Convolutions of a function, channels first.
        device: Device that they run on; None for a CPU.
        layout: "nchw" and "nhwc" for one layout everywhere. "auto" stands for channels last where CUDA kernels compute
            16-bit tensors or TF32, because tensor cores read those without a conversion, and for channels first
            elsewhere.
        tf32: Whether CUDA kernels may round the operands of float32 convolutions to TF32.
    """
    is_cuda = device is not None and device.kind == "cuda"

    def is_channels_last(workload: ConvOperator) -> bool:
        return layout == "nhwc" or (layout == "auto" and is_cuda and workload.dtype in TENSOR_CORE_DTYPES)

    workloads = [to_tf32(site.workload) if tf32 and is_cuda else site.workload for site in sites]
    return [each.to_channels_last() if is_channels_last(each) else each for each in workloads]


def to_tf32(workload: ConvOperator) -> ConvOperator:
    """Return a workload whose float32 operands are rounded to TF32; one of another dtype as it is.

    Example:
        >>> import tvmconv
        >>> to_tf32(tvmconv.parse("conv2d:1x8x9x9,8x8x3x3,s1,p1,relu")).text
        'conv2d:1x8x9x9,8x8x3x3,s1,p1,tf32,relu'
    """
    if workload.dtype != dtypes.FLOAT32.name:
        return workload
    return workload.with_fields(dtype=dtypes.TF32.name)


def is_truncating(workload: ConvOperator, schedule: str) -> bool:
    """Return whether the kernels of a schedule truncate their float32 operands to TF32, as tensor cores do. Schedules
    that compute float32 workloads, too, use no tensor cores.
    """
    if workload.dtype != dtypes.TF32.name:
        return False
    exact = workload.with_fields(dtype=dtypes.FLOAT32.name)
    return all(each.name != schedule for each in schedules(exact))
