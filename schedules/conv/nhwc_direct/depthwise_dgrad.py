"""Gradients of inputs of depthwise convolutions, and depthwise transposed convolutions, by the strips of forward ones.

The gradient of stride 1 is a depthwise convolution of dY with flipped taps, so a thread computes a strip of dX as in
`depthwise_nhwc` of convolutions. Taps are flipped where they are read; no filter is rearranged in memory.

With a stride, only every second output meets an input below a tap, for example. Tiles begin at multiples of the stride,
so the taps that connect an input with an output are known when the kernel is emitted. Products with zeros between the
elements of dY are not emitted, and there is no branch. The knobs `tile_y` and `tile_x` therefore count steps of the
stride.

Large filters have too many taps to be unrolled. `unroll_scope` "input_row" loops over the rows of dY: each is loaded
once, and the filter rows that connect it with the rows of the strip are read from shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.text import join_sizes

from ..gradient_operators import DGRAD, TRANSPOSE
from ..plane_shape import PlaneShape
from ..reduction import FLOAT_DTYPES
from ..transposed_view import TransposedView
from .depthwise_nhwc import DepthwiseConfig, DepthwiseNhwcKernel
from .strip_knobs import declare_knobs
from .strip_thread import build_conv_schedule

MAX_STRIDE = 4  # a thread computes at least stride × stride pixels


class DepthwiseGradientConfig(DepthwiseConfig):
    """One config, or many configs as columns."""

    @classmethod
    def list_own_choices(cls, w: Conv | TransposedView) -> dict[str, Sequence[Any]]:
        """Return the options of the knobs besides those of the strip."""
        shape = PlaneShape.from_workload(w)
        unroll_scopes = ["filter", "row"]
        if shape.dilations[1] == 1 and shape.kernel_size[1] > 1:  # neighbouring input rows meet neighbouring taps
            unroll_scopes.append(cls.INPUT_ROW_SCOPE)
        if max(shape.upsampling) == 1:
            unroll_scopes.append("tap")
        return {**super().list_own_choices(w), "unroll_scope": unroll_scopes}


SMALL_STRIDE = Requirement(
    f"strides of at most {MAX_STRIDE}",
    lambda w: max(w.stride) <= MAX_STRIDE,
    lambda w: f"stride {join_sizes(w.stride)}",
)


def has_gradient_per_channel(w: InputGradient) -> bool:
    """Whether each group is one channel of dY."""
    return w.forward.O == w.groups > 1


def compute_usage(w: InputGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    return DepthwiseGradientConfig.compute_usage(TransposedView.from_workload(w), columns)


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=FLOAT_DTYPES,
    usage=compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_gradient_per_channel, SMALL_STRIDE),
    search_if=has_gradient_per_channel,
    supersedes=("implicit_gemm",),
)
def depthwise_nhwc(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Compute a vector of channels for a strip of pixels of dX per thread; tiles count steps of the stride."""
    config = declare_knobs(DepthwiseGradientConfig, k, TransposedView.from_workload(w))
    return build_conv_schedule(config, DepthwiseNhwcKernel)
