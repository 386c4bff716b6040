"""Narrow 1×1 layers by mma.sync: pixels go from global memory to registers and back, as in their gradients (`.dgrad`).

Such layers are bound by memory, and their rows of less than 128 bytes leave a part of each box of TMA empty. Here warps
load whole vectors of neighbouring pixels, which follow one another in memory, and store vectors of neighbouring
channels. The weight is in shared memory, and no thread waits for another one after it is there.
"""

from __future__ import annotations

import math
from typing import ClassVar

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import build_schedule
from ..hopper.tma_requirements import is_pixel_matrix
from ..implicit_gemm_shape import VECTOR_BYTES
from .dgrad import DTYPES, MAX_ROW_BYTES, emit_kernel
from .dgrad_config import PointwiseConfig

MIN_PROMISING_PIXELS = 1 << 13  # output pixels of layers that a search tries


class ForwardPointwiseConfig(PointwiseConfig):
    """Configs of a forward convolution, whose channels are those of dX, and the reduction those of dY."""

    # The best kernels of 18 layers on an H200 took 0.80 to 1.94 times their estimate at the boost clock of an H100, and
    # 1.28 times in geometric mean.
    SECONDS_PER_CYCLE: ClassVar[float | None] = 1.3 / 1.755e9

    @property
    def convolution(self) -> Conv:
        """The convolution, of one tap."""
        return self.w


def is_pointwise(w: Conv) -> bool:
    """Whether the convolution is a product of all pixels with few channels, which fill vectors of 16 bytes."""
    return (
        w.groups == 1
        and w.reads_x_only
        and is_pixel_matrix(w)
        and not w.has_large_tensors
        and not w.returns_stats
        and get_itemsize(w.argument_dtypes[-1]) == get_itemsize(w.storage)
        and w.C * get_itemsize(w.storage) % VECTOR_BYTES == 0
        and w.O % 2 == 0
        and ForwardPointwiseConfig.has_config(w)
    )


POINTWISE = Requirement(
    "filters of one tap without a stride, and channels that are multiples of 16 bytes and fit in registers",
    is_pointwise,
    lambda w: f"filters of {math.prod(w.kernel)} taps × {w.C} × {w.O} channels",
)


def is_narrow(w: Conv) -> bool:
    """Return whether X or Y has rows of at most 192 bytes, so that memory bounds the layer, and there are many."""
    pixels = w.N * math.prod(w.output_size)
    return min(w.C, w.O) * get_itemsize(w.storage) <= MAX_ROW_BYTES and pixels >= MIN_PROMISING_PIXELS


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=ForwardPointwiseConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, POINTWISE),
    search_if=is_narrow,
    starting_configs=ForwardPointwiseConfig.list_starting_configs,
    device_kinds=("cuda",),
    min_arch=80,
)
def pointwise_mma_sync(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Keep the weight in shared memory, and multiply tiles of pixels that warps load to registers."""
    config = ForwardPointwiseConfig.declare_knobs(w, k)
    return build_schedule(w, lambda arguments: emit_kernel(config, arguments, has_filter_rows=True))
