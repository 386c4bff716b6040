"""Gradients of inputs of depthwise convolutions without a stride, whose windows of dY TMA copies ahead.

The gradient is the convolution of dY with the flipped filters, by the kernel of `depthwise_tma`: a warp copies windows
of dY to shared memory ahead, and the threads of the others compute vectors of channels for strips of pixels. With a
stride, several elements of dX have different taps; `depthwise_nhwc` computes those.
"""

from __future__ import annotations

import math

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient

from ...primitives import disable_buffer_reuse
from ...tir_builder import build_schedule
from ..gradient_operators import assign_roles
from ..reduction import FLOAT_DTYPES
from ..row_walk_config import is_promising
from .depthwise_tma import WINDOWS, emit_kernel, has_depthwise_windows
from .depthwise_tma_config import DepthwiseTmaConfig


def has_gradient_windows(w: InputGradient) -> bool:
    """Whether the gradient is a depthwise convolution of dY whose windows TMA can copy."""
    return w.direct_convolution is not None and has_depthwise_windows(w.direct_convolution)


GRADIENT_WINDOWS = Requirement(
    f"gradients at stride 1 of {WINDOWS.description}",
    has_gradient_windows,
    lambda w: f"stride {w.stride}, filters of {math.prod(w.kernel)} taps, {w.C} channels in {w.groups} groups",
)


def get_convolution(w: InputGradient) -> Conv:
    """Return the convolution of dY that the gradient is."""
    assert w.direct_convolution
    return w.direct_convolution


def compute_usage(w: InputGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    return DepthwiseTmaConfig.compute_usage(get_convolution(w), columns)


@schedule(
    "conv2d_dgrad",
    dtypes=FLOAT_DTYPES,
    usage=compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, GRADIENT_WINDOWS),
    search_if=lambda w: is_promising(get_convolution(w)),
    starting_configs=lambda w: DepthwiseTmaConfig.list_starting_configs(get_convolution(w)),
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_tma(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Copy windows of dY by TMA ahead, and compute a vector of channels for a strip of pixels per thread."""
    config = DepthwiseTmaConfig.declare_knobs(get_convolution(w), k)
    built = build_schedule(w, lambda arguments: emit_kernel(config, assign_roles(w, arguments), is_flipped=True))
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built
