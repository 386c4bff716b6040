"""Depthwise convolution, channels first: vectors of columns, and a window of the input that slides in registers.

The kernel is that of `depthwise_nhwc` for arrays in which the columns of a row are contiguous. A thread computes one
channel for a strip of neighbouring pixels. It loads and stores vectors of up to 16 bytes of columns, which are aligned
if their number divides the width of the image. The columns to the left and to the right, which overlapping windows
share, are loaded one by one; the L1 cache has them. Neighbouring threads compute neighbouring columns, then rows, then
channels, so that a block has enough threads where images are small. No array is converted.

A short row has few sectors, and a warp that loads single columns of several rows touches all of them each time. Blocks
of small images may therefore copy whole planes to shared memory first, in vectors of 16 bytes (`input_scope`).

It differs from `depthwise`, whose blocks stage the input in shared memory element by element. Elements of 16 bits
profit most from the vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_FIRST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.target import MAX_THREADS_Z, STATIC_SHARED_BYTES
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import FLOAT32, get_itemsize

from ..nhwc_direct.depthwise_nhwc import DepthwiseConfig, DepthwiseNhwcKernel
from ..nhwc_direct.strip_config import THREADS_C_CHOICES, StripConfig
from ..nhwc_direct.strip_knobs import declare_knobs
from ..nhwc_direct.strip_thread import build_conv_schedule
from ..plane_shape import PLANE_NDIM
from ..reduction import FLOAT_DTYPES, has_filter_per_channel
from ..tile_config import Rule
from ..transposed_view import TransposedView
from .depthwise_latency import estimate_cycles

LIMIT_OF_THREADS_Z: Rule = (
    f"at most {MAX_THREADS_Z} threads along the channels",
    lambda t: t.channels.thread <= MAX_THREADS_Z,
)


class DepthwiseNchwConfig(DepthwiseConfig):
    """One config, or many configs as columns."""

    REQUIREMENTS: ClassVar[Mapping[str, Callable[[StripConfig], Any]]] = {
        **DepthwiseConfig.REQUIREMENTS,
        "a block computes whole planes of channels whose input planes are in shared memory": lambda config: (
            ~config.is_input_shared
            | (
                (config.rows.block * config.columns.block == 1)
                & (config.channels.thread * math.prod(config.shape.input_size) % config.copied_vector == 0)
            )
        ),
    }

    HAS_INNERMOST_CHANNELS: ClassVar[bool] = False
    LIMIT_OF_THREADS_Z: ClassVar[Rule] = LIMIT_OF_THREADS_Z

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles of the SM with the most blocks, as of `depthwise_latency`."""
        traffic = self.traffic
        return estimate_cycles(self, self._count_read_cycles(traffic), self._count_block_bytes(traffic))

    @classmethod
    def list_threads_c_choices(cls, w: Conv | TransposedView) -> tuple[int, ...]:
        """Return the options for threads per block along the channels, none of which are idle."""
        return tuple(threads for threads in THREADS_C_CHOICES if w.O % threads == 0)

    @classmethod
    def list_own_choices(cls, w: Conv | TransposedView) -> dict[str, Sequence[Any]]:
        """Return the options of the knobs besides those of the strip."""
        choices = super().list_own_choices(w)
        plane_bytes = math.prod(w.input_size) * get_itemsize(w.storage)
        has_planes = w.spatial_ndim < PLANE_NDIM and w.O == w.C and plane_bytes <= STATIC_SHARED_BYTES // 2
        return {**choices, "input_scope": ("global", "shared")} if has_planes else choices


def is_promising(w: Conv) -> bool:
    """Return whether there are tensor cores for the dtype; in float32, `depthwise` has been measured to be fast."""
    return has_filter_per_channel(w) and w.dtype != FLOAT32.name


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=FLOAT_DTYPES,
    usage=DepthwiseNchwConfig.compute_usage,
    condition=all_of(CHANNELS_FIRST_LAYOUT, has_filter_per_channel),
    search_if=is_promising,
)
def depthwise_nchw(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Compute vectors of columns for a strip of pixels per thread; tile rows and columns (block, thread, local)."""
    config = declare_knobs(DepthwiseNchwConfig, k, w)
    return build_conv_schedule(config, DepthwiseNhwcKernel)
