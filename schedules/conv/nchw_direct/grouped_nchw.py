"""Grouped convolution, channels first: a thread sums columns of a group's few input channels for some of its outputs.

The kernel is that of `grouped_nhwc` for arrays in which the columns of a row are contiguous. A thread computes some
output channels of a group for a strip of neighbouring pixels. For each input channel of the group and each filter row
it loads a row of its window in vectors of columns, and uses it for all of its output channels. The filters of the block
are transposed in shared memory, from which a thread reads the weights of its outputs as a vector. Results are stored in
vectors of columns. No array is converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_FIRST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import FLOAT32

from ..nhwc_direct.grouped_nhwc import (
    MAX_GROUP_CHANNELS,
    GroupedConfig,
    GroupedNhwcKernel,
    can_fill_tensor_cores,
    has_groups,
)
from ..nhwc_direct.strip_config import THREADS_C_CHOICES, StripConfig
from ..nhwc_direct.strip_knobs import declare_knobs
from ..nhwc_direct.strip_thread import build_conv_schedule
from ..reduction import FLOAT_DTYPES
from ..tile_config import Rule
from ..transposed_view import TransposedView
from .depthwise_nchw import LIMIT_OF_THREADS_Z


class GroupedNchwConfig(GroupedConfig):
    """One config, or many configs as columns."""

    HAS_INNERMOST_CHANNELS: ClassVar[bool] = False
    HAS_VECTORS_OF_CHANNELS: ClassVar[bool] = True
    LIMIT_OF_THREADS_Z: ClassVar[Rule] = LIMIT_OF_THREADS_Z

    @classmethod
    def list_threads_c_choices(cls, w: Conv | TransposedView) -> tuple[int, ...]:
        """Return the options for threads per block along the channels."""
        return tuple(threads for threads in THREADS_C_CHOICES if threads <= w.O)

    @classmethod
    def list_own_choices(cls, w: Conv | TransposedView) -> dict[str, Sequence[Any]]:
        """Return the options of the knobs besides those of the strip; input channels are not contiguous."""
        return {**StripConfig.list_own_choices.__func__(cls, w), "block_k": (1,)}  # type: ignore[attr-defined]


def is_promising(w: Conv) -> bool:
    """Return whether there are tensor cores for the dtype, and groups are too small for a matrix product."""
    return has_groups(w) and w.dtype != FLOAT32.name and w.C // w.groups <= MAX_GROUP_CHANNELS


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=FLOAT_DTYPES,
    usage=GroupedNchwConfig.compute_usage,
    condition=all_of(CHANNELS_FIRST_LAYOUT, has_groups),
    search_if=is_promising,
    supersedes=("direct", "implicit_gemm", "tensor_core"),
    defers_when=can_fill_tensor_cores,
)
def grouped_nchw(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Compute some channels for a strip of pixels per thread; tile rows and columns (block, thread, local)."""
    return build_conv_schedule(declare_knobs(GroupedNchwConfig, k, w), GroupedNhwcKernel)
