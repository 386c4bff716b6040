"""Grouped convolution, channels last: a thread sums vectors of a group's few input channels for a few of its outputs.

If groups are small, as in ResNeXt and RegNet, each group is a matrix product of 4 to 32 channels by as many, too small
for the tiles of a matrix-product kernel. A thread computes a vector of output channels of one group for a strip of
neighbouring pixels. Each k-tile covers a filter row and a few input channels. The thread loads the rows of its input
window in vectors; threads of other outputs of the group load the same vectors by the same instructions. It then loads
the weights of its outputs for each tap, and uses every weight for all pixels of the strip.

A block transposes its weights in shared memory, so that a thread reads those of its outputs as a vector. Alternatively,
each thread loads them from global memory, a vector of input channels for each output.

The thread tiles are those of `depthwise_nhwc`, also for signals and volumes; the difference is a loop over the k-tiles
of a group's channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.s_tir import Schedule
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv

from ..plane_shape import PlaneShape
from ..reduction import DTYPES
from .epilogue import StripEpilogue
from .grouped_config import GroupedTileConfig, compute_usage, declare_knobs
from .input_window import InputWindow
from .thread_loops import (
    ThreadCoords,
    allocate_local,
    build_conv_schedule,
    emit_vector_copy,
    get_thread_channel,
    load_filters_to_smem,
    open_loop,
)

MAX_GROUP_CHANNELS = 32  # larger groups are faster as matrix products
MIN_TENSOR_CORE_CHANNELS = 16  # 16-bit channels per mma; tensor cores then take half the time (ResNeXt, RegNet)


def has_groups(w: Conv) -> bool:
    """Whether there are groups, of several input channels each."""
    return 1 < w.groups < w.C


def can_fill_tensor_cores(w: Conv) -> bool:
    """Return whether the channels of a group fill the depth of an mma."""
    return w.storage != "float32" and w.C // w.groups >= MIN_TENSOR_CORE_CHANNELS


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_groups),
    search_if=lambda w: has_groups(w) and w.C // w.groups <= MAX_GROUP_CHANNELS,
    supersedes=("direct", "implicit_gemm"),
    defers_when=can_fill_tensor_cores,
)
def grouped_nhwc(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Compute a vector of channels for a strip of pixels per thread; tile rows and columns (block, thread, local)."""
    config = declare_knobs(w, k)
    return build_conv_schedule(
        w, config.thread_tile, lambda arrays, at: GroupedNhwcKernel(w, config, arrays, at).emit()
    )


class GroupedNhwcKernel:
    """Emitter of a thread's work."""

    def __init__(
        self, w: Conv, config: GroupedTileConfig, arrays: Mapping[str, Any], thread_coords: ThreadCoords
    ) -> None:
        self.w, self.config, self.thread_tile = w, config, config.thread_tile
        self.thread_coords, self.K = thread_coords, arrays["K"]
        self.channels_per_group, self.plane_shape = w.C // w.groups, PlaneShape.from_workload(w)
        self.first_channel = get_thread_channel(self.thread_tile, thread_coords)
        self.num_unrolled_taps = w.kernel[-1] if config.unroll_scope == "row" else 1  # filter columns
        self.epilogue = StripEpilogue(w, arrays, self.thread_tile, thread_coords)
        rows_per_thread = self.thread_tile.rows.local
        self.input_window = InputWindow(
            w,
            arrays["X"],
            self.thread_tile,
            thread_coords,
            config.block_k,
            num_rows=rows_per_thread,
            num_unrolled_taps=self.num_unrolled_taps,
        )
        self.is_weight_shared = config.weight_scope == "shared"
        shape = (config.block_k, self.thread_tile.vector)  # one tap; the axis that is loaded in vectors is innermost
        self.weight_regs = allocate_local("weights", shape if self.is_weight_shared else shape[::-1], w.storage)

    def emit(self) -> None:
        """Emit the thread's work."""
        w, config, rows_per_thread = self.w, self.config, self.thread_tile.rows.local
        if self.is_weight_shared:
            self.smem_filters = load_filters_to_smem(w, self.thread_tile, self.thread_coords, self.K)
        first_channel = self.first_channel // (w.O // w.groups) * self.channels_per_group
        self.epilogue.init_accumulators()
        (_, stride, _), (_, *spatial_dilations) = self.plane_shape.strides, self.plane_shape.dilations
        num_tap_groups = self.plane_shape.num_taps // self.num_unrolled_taps
        with (
            open_loop("tap", num_tap_groups, T.serial) as tap_group,
            open_loop("step", self.k_tiles_per_group, T.serial) as k_tile,
        ):
            filter_plane, filter_row, filter_column = self.first_tap(tap_group)
            for row_idx in range(rows_per_thread):
                input_row = row_idx * stride + filter_row * spatial_dilations[0]
                self.input_window.load_row(
                    row_idx,
                    filter_plane,
                    input_row,
                    first_channel + k_tile * config.block_k,
                    filter_column * spatial_dilations[1],
                )
            for column in range(self.num_unrolled_taps):
                self.load_weights((filter_plane, filter_row, filter_column + column), k_tile)
                for row_idx in range(rows_per_thread):
                    self.accumulate_row(row_idx, column)
        for row_idx in range(rows_per_thread):
            self.epilogue.store_row(row_idx)

    def first_tap(self, tap_group: Any) -> tuple[Any, Any, Any]:
        """Return plane, row and column of the first tap of a group of unrolled taps."""
        return (
            self.plane_shape.tap_from_index(tap_group)
            if self.config.unroll_scope == "tap"
            else (*self.plane_shape.tap_row_from_index(tap_group), 0)
        )

    @property
    def k_tiles_per_group(self) -> int:
        """K-tiles of a group's input channels."""
        return self.channels_per_group // self.config.block_k

    def load_weights(self, tap: tuple[Any, Any, Any], k_tile: Any) -> None:
        """Load the weights of one tap and k-tile."""
        vector_elements, block_k = self.thread_tile.vector, self.config.block_k
        if self.is_weight_shared:
            lane_offset = self.thread_coords.vector_idx * vector_elements - self.thread_coords.block_channel
            with open_loop("d", block_k) as channel_in:
                filter_row_idx = (
                    self.plane_shape.tap_index(tap) * self.channels_per_group + k_tile * block_k + channel_in
                )
                emit_vector_copy(
                    vector_elements,
                    self.weight_regs,
                    lambda lane: (channel_in, lane),
                    lambda lane: self.smem_filters[filter_row_idx, lane_offset + lane],
                )
        else:
            with open_loop("channel", vector_elements) as channel:
                emit_vector_copy(
                    block_k,
                    self.weight_regs,
                    lambda lane: (channel, lane),
                    lambda lane: self.K[
                        self.plane_shape.array_index(self.first_channel + channel, tap, k_tile * block_k + lane)
                    ],
                )

    def accumulate_row(self, row_idx: int, column: int) -> None:
        """Accumulate the products of one unrolled filter column to output row `row_idx` of the strip."""
        columns, vector, block_k = self.thread_tile.columns.local, self.thread_tile.vector, self.config.block_k
        with (
            open_loop("d", block_k) as channel_in,
            open_loop("j", columns) as j,
            open_loop("channel", vector) as channel,
        ):
            input_value = self.input_window.values[row_idx, self.input_window.window_column(j, column), channel_in]
            weight = (
                self.weight_regs[channel_in, channel]
                if self.is_weight_shared
                else self.weight_regs[channel, channel_in]
            )
            self.epilogue.accumulate_product(row_idx, j, channel, input_value, weight)
