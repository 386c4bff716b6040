"""The choice of layouts: which convolutions run channels last inside a model that is channels first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from tvmconv.devices import Device
from tvmconv.errors import TuningError
from tvmconv.relax.sites import RelaxConvolution
from tvmconv.workloads.conv_operator import ConvOperator

Layout = Literal["auto", "nchw", "nhwc"]
TENSOR_CORE_DTYPES = ("float16", "bfloat16")


def validate_layout(layout: str) -> Layout:
    """Return `layout` if it is valid; raise TuningError otherwise."""
    if layout not in get_args(Layout):
        raise TuningError(f"layout={layout!r}: expected one of {', '.join(get_args(Layout))}")
    return layout  # type: ignore[return-value]


def plan_layouts(sites: Sequence[RelaxConvolution], device: Device | None, layout: Layout) -> list[ConvOperator]:
    """Return the workload of each site with its layout.

    Args:
        sites: Convolutions of a function, channels first.
        device: Device that they run on; None for a CPU.
        layout: "nchw" and "nhwc" for one layout everywhere. "auto" stands for channels last where CUDA kernels compute
            16-bit tensors, because tensor cores read those without a conversion, and for channels first elsewhere.
    """
    is_cuda = device is not None and device.kind == "cuda"

    def is_channels_last(workload: ConvOperator) -> bool:
        return layout == "nhwc" or (layout == "auto" and is_cuda and workload.storage in TENSOR_CORE_DTYPES)

    workloads = [site.workload for site in sites]
    return [each.to_channels_last() if is_channels_last(each) else each for each in workloads]
