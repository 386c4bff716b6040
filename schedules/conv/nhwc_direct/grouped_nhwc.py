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

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import SOME_CHANNELS_LAST, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ...tir_builder import serial_loop, unrolled_loop
from ..reduction import DTYPES
from ..transposed_view import TransposedView
from .strip_config import MAX_LOAD_BYTES, VECTOR_CHOICES, WORD_BYTES, OperandTraffic, StripConfig
from .strip_thread import (
    ROW_AXIS,
    InputWindow,
    StripThread,
    allocate_local,
    build_mixed_schedule,
    emit_vector_copy,
    list_row_residues,
    load_filters_to_smem,
    make_strip_epilogue,
)

MAX_GROUP_CHANNELS = 32  # larger groups are faster as matrix products
MAX_GRADIENT_GROUP_CHANNELS = 64  # the same for gradients
MIN_TENSOR_CORE_CHANNELS = 16  # 16-bit channels per mma; tensor cores then take half the time (ResNeXt, RegNet)


class GroupedConfig(StripConfig):
    """One config, or many configs as columns."""

    UNROLL_SCOPES = ("row", "tap")
    WEIGHT_SCOPES = ("shared", "global")

    @classmethod
    def list_own_choices(cls, w: Conv | TransposedView) -> dict[str, Sequence[Any]]:
        """Return the options of the knobs besides those of the strip; one load reads the channels of a k-tile."""
        block_k_choices = tuple(
            channels
            for channels in VECTOR_CHOICES
            if channels * get_itemsize(w.storage) <= MAX_LOAD_BYTES and w.C // w.groups % channels == 0
        )
        return {"block_k": block_k_choices, **super().list_own_choices(w)}

    @classmethod
    def is_vector_allowed(cls, w: Conv | TransposedView, vector: int) -> bool:
        """Return whether the channels are of one group."""
        return w.O // w.groups % vector == 0

    @property
    def traffic(self) -> OperandTraffic:
        """Work of a thread with its operands; registers hold the window of a k-tile and the weights of a tap."""
        vectors_per_tap = self.channels_per_group // self.block_k * self.vector
        vectors_of_outputs = self.is_weight_shared | self.shape.is_transposed
        filter_vectors = self.num_taps * np.where(vectors_of_outputs, self.channels_per_group, vectors_per_tap)
        loaded_vectors = self.rows.local * self.window_vectors + self.vector
        return OperandTraffic(
            filter_vectors,
            widened_elements=self.loaded_vectors * self.block_k + self.num_taps * self.channels_per_group * self.vector,
            operand_registers=self.block_k * loaded_vectors * get_itemsize(self.w.storage) / WORD_BYTES,
            scattered_vectors=filter_vectors,
        )


def has_groups(w: Conv) -> bool:
    """Whether there are groups, of several input channels each."""
    return 1 < w.groups < w.C


def can_fill_tensor_cores(w: Conv) -> bool:
    """Return whether the channels of a group fill the depth of an mma."""
    return w.storage != "float32" and w.C // w.groups >= MIN_TENSOR_CORE_CHANNELS


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=lambda w, columns: GroupedConfig.compute_usage(w.to_channels_last(), columns),
    condition=all_of(SOME_CHANNELS_LAST, has_groups),
    search_if=lambda w: has_groups(w) and w.C // w.groups <= MAX_GROUP_CHANNELS,
    supersedes=("direct", "implicit_gemm"),
    defers_when=can_fill_tensor_cores,
)
def grouped_nhwc(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Compute a vector of channels for a strip of pixels per thread; tile rows and columns (block, thread, local)."""
    return build_mixed_schedule(w, GroupedConfig.declare_knobs(k, w.to_channels_last()), emit_thread)


def emit_thread(thread: StripThread) -> None:
    """Emit a thread's work."""
    config, shape = thread.config, thread.shape
    w, vector, block_k, rows_per_thread = config.w, config.vector, config.block_k, config.rows.local
    num_unrolled_taps = w.kernel[-1] if config.unroll_scope == "row" else 1  # filter columns
    epilogue = make_strip_epilogue(thread)
    input_window = InputWindow(thread, block_k, rows_per_thread, num_unrolled_taps)
    is_weight_shared = bool(config.is_weight_shared)
    # The innermost axis is a vector. Output channels of a gradient are contiguous in global memory, too.
    is_output_innermost = is_weight_shared or shape.is_transposed
    weights_shape = (block_k, vector) if is_output_innermost else (vector, block_k)
    weight_regs = allocate_local("weights", weights_shape, w.storage)  # of one tap
    smem_filters: Any = load_filters_to_smem(thread) if is_weight_shared else None

    def load_weights(tap: Any, k_tile: Any) -> None:
        if is_output_innermost:
            lane_offset = thread.vector_idx * vector - thread.block_channel
            with unrolled_loop(block_k, "d") as channel_in:
                filter_row = tap * config.channels_per_group + k_tile * block_k + channel_in

                def read_weight(lane: Any) -> Any:
                    if is_weight_shared:
                        return smem_filters[filter_row, lane_offset + lane]
                    input_channel = k_tile * block_k + channel_in
                    return thread.arrays["K"][shape.weight_index(thread.first_channel + lane, tap, input_channel)]

                emit_vector_copy(vector, weight_regs, lambda lane: (channel_in, lane), read_weight)
        else:
            with unrolled_loop(vector, "channel") as channel:
                output_channel = thread.first_channel + channel
                emit_vector_copy(
                    block_k,
                    weight_regs,
                    lambda lane: (channel, lane),
                    lambda lane: thread.arrays["K"][shape.weight_index(output_channel, tap, k_tile * block_k + lane)],
                )

    def accumulate_row(row_idx: int, filter_column: int) -> None:
        with (
            unrolled_loop(block_k, "d") as channel_in,
            input_window.open_columns(filter_column) as columns,
            unrolled_loop(vector, "channel") as channel,
        ):
            weight = weight_regs[channel_in, channel] if is_output_innermost else weight_regs[channel, channel_in]
            for j, position in columns:
                input_value = input_window.values[row_idx, position, channel_in]
                epilogue.accumulate_product(row_idx, j, channel, input_value, weight)

    first_input_channel = thread.first_channel // (w.O // w.groups) * config.channels_per_group
    epilogue.init_accumulators()

    def emit_tap_group(filter_row: tuple[Any, Any], filter_column: Any, input_rows: dict[int, Any]) -> None:
        with serial_loop(config.channels_per_group // block_k, "step") as k_tile:
            channel, first_column = first_input_channel + k_tile * block_k, filter_column * shape.dilations[2]
            for row_idx, input_row in input_rows.items():
                input_window.load_row(row_idx, filter_row[0], input_row, channel, first_column)
            for column in range(num_unrolled_taps):
                load_weights(shape.weight_tap(shape.tap_index((*filter_row, filter_column + column))), k_tile)
                for row_idx in input_rows:
                    accumulate_row(row_idx, column)

    if max(shape.upsampling) == 1:
        with serial_loop(shape.num_taps // num_unrolled_taps, "tap") as tap_group:
            filter_plane, filter_row, filter_column = (
                shape.tap_from_index(tap_group)
                if config.unroll_scope == "tap"
                else (*shape.tap_row_from_index(tap_group), 0)
            )
            input_rows = {
                row_idx: row_idx * shape.strides[ROW_AXIS] + filter_row * shape.dilations[ROW_AXIS]
                for row_idx in range(rows_per_thread)
            }
            emit_tap_group((filter_plane, filter_row), filter_column, input_rows)
    else:
        for residue in list_row_residues(shape):
            with serial_loop(shape.kernel_size[0] * residue.num_rows, "tap") as tap_group:
                filter_plane, repetition = tap_group // residue.num_rows, tap_group % residue.num_rows
                filter_row = residue.filter_row(repetition)
                emit_tap_group((filter_plane, filter_row), 0, residue.input_rows(repetition, rows_per_thread))
    for row_idx in range(rows_per_thread):
        epilogue.store_row(row_idx)
