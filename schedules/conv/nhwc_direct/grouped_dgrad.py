"""Gradients of inputs of grouped convolutions, and grouped transposed convolutions, by the strips of forward ones.

The gradient is a grouped convolution of dY whose filters are flipped and transposed within their group. Threads read
the weight as it is: its channels are those of dX, and contiguous. With a stride, the filter rows that meet the same
output rows form a loop of their own, and products with zeros between the elements of dY are not emitted, as in the
gradients of depthwise convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient

from ..gradient_operators import DGRAD, TRANSPOSE
from ..plane_shape import PlaneShape
from ..reduction import FLOAT_DTYPES
from ..transposed_view import TransposedView
from .depthwise_dgrad import SMALL_STRIDE
from .grouped_nhwc import MAX_GRADIENT_GROUP_CHANNELS, GroupedConfig, GroupedNhwcKernel
from .strip_knobs import declare_knobs
from .strip_thread import build_conv_schedule


class GroupedGradientConfig(GroupedConfig):
    """One config, or many configs as columns."""

    @classmethod
    def list_own_choices(cls, w: Conv | TransposedView) -> dict[str, Sequence[Any]]:
        """Return the options of the knobs besides those of the strip; with a stride, filter rows are unrolled."""
        choices = super().list_own_choices(w)
        has_stride = max(PlaneShape.from_workload(w).upsampling) > 1
        return {**choices, "unroll_scope": ("row",)} if has_stride else choices


def has_gradient_groups(w: InputGradient) -> bool:
    """Whether there are groups, of several channels of dY each."""
    return 1 < w.groups < w.forward.O


def has_small_gradient_groups(w: InputGradient) -> bool:
    """Return whether the groups are smaller than tiles of a matrix product."""
    return has_gradient_groups(w) and w.forward.O // w.groups <= MAX_GRADIENT_GROUP_CHANNELS


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=FLOAT_DTYPES,
    usage=lambda w, columns: GroupedGradientConfig.compute_usage(TransposedView.from_workload(w), columns),
    condition=all_of(CHANNELS_LAST_LAYOUT, has_gradient_groups, SMALL_STRIDE),
    search_if=has_small_gradient_groups,
    supersedes=("implicit_gemm",),
)
def grouped_nhwc(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Compute a vector of channels for a strip of pixels of dX per thread; tiles count steps of the stride."""
    return build_conv_schedule(
        declare_knobs(GroupedGradientConfig, k, TransposedView.from_workload(w)), GroupedNhwcKernel
    )
