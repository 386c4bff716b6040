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
from ..reduction import FLOAT_DTYPES
from ..transposed_view import TransposedView
from .strip_config import MAX_LOAD_BYTES, VECTOR_CHOICES, WORD_BYTES, OperandTraffic, StripConfig
from .strip_epilogue import make_strip_epilogue
from .strip_knobs import declare_knobs
from .strip_thread import (
    ROW_AXIS,
    InputWindow,
    StripThread,
    allocate_local,
    build_mixed_schedule,
    emit_vector_copy,
    list_row_residues,
    load_filters_to_smem,
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
    dtypes=FLOAT_DTYPES,
    usage=lambda w, columns: GroupedConfig.compute_usage(w.to_channels_last(), columns),
    condition=all_of(SOME_CHANNELS_LAST, has_groups),
    search_if=lambda w: has_groups(w) and w.C // w.groups <= MAX_GROUP_CHANNELS,
    supersedes=("direct", "implicit_gemm"),
    defers_when=can_fill_tensor_cores,
)
def grouped_nhwc(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Compute a vector of channels for a strip of pixels per thread; tile rows and columns (block, thread, local)."""
    return build_mixed_schedule(w, declare_knobs(GroupedConfig, k, w.to_channels_last()), GroupedNhwcKernel)


class GroupedNhwcKernel:
    """Emitter of a thread's work."""

    def __init__(self, thread: StripThread) -> None:
        self.thread, self.config, self.shape = thread, thread.config, thread.shape
        w, vector, block_k = self.config.w, self.config.vector, self.config.block_k
        self.num_unrolled_taps = w.kernel[-1] if self.config.unroll_scope == "row" else 1  # filter columns
        self.epilogue = make_strip_epilogue(thread)
        self.input_window = InputWindow(thread, block_k, self.config.rows.local, self.num_unrolled_taps)
        # The innermost axis is a vector. Output channels of a gradient are contiguous in global memory, too.
        self.is_output_innermost = self.config.is_weight_shared or self.shape.is_transposed
        weights_shape = (block_k, vector) if self.is_output_innermost else (vector, block_k)
        self.weight_regs = allocate_local("weights", weights_shape, w.storage)  # of one tap
        self.smem_filters: Any = load_filters_to_smem(thread) if self.config.is_weight_shared else None

    def emit(self) -> None:
        """Emit the thread's work."""
        config, shape = self.config, self.shape
        self.epilogue.init_accumulators()
        if max(shape.upsampling) == 1:
            with serial_loop(shape.num_taps // self.num_unrolled_taps, "tap") as tap_group:
                if config.unroll_scope == "tap":
                    filter_plane, filter_row, filter_column = shape.tap_from_index(tap_group)
                else:
                    filter_plane, filter_row, filter_column = (*shape.tap_row_from_index(tap_group), 0)
                first_input_row = filter_row * shape.dilations[ROW_AXIS]
                input_rows = {i: i * shape.strides[ROW_AXIS] + first_input_row for i in range(config.rows.local)}
                self.accumulate_taps((filter_plane, filter_row), filter_column, input_rows)
        else:
            for residue in list_row_residues(shape):
                with serial_loop(shape.kernel_size[0] * residue.num_rows, "tap") as tap_group:
                    filter_plane, repetition = tap_group // residue.num_rows, tap_group % residue.num_rows
                    filter_row = residue.filter_row(repetition)
                    input_rows = residue.input_rows(repetition, config.rows.local)
                    self.accumulate_taps((filter_plane, filter_row), 0, input_rows)
        for row_idx in range(config.rows.local):
            self.epilogue.store_row(row_idx)

    def accumulate_taps(self, filter_row: tuple[Any, Any], first_column: Any, input_rows: dict[int, Any]) -> None:
        """Accumulate the unrolled taps of a filter row, given by plane and row, over all channels of the group.

        `input_rows` has the offset of the input row of each output row of the strip that has one.
        """
        config, shape = self.config, self.shape
        outputs_per_group = config.w.O // config.w.groups
        first_channel = self.thread.first_channel // outputs_per_group * config.channels_per_group
        with serial_loop(config.channels_per_group // config.block_k, "step") as k_tile:
            channel = first_channel + k_tile * config.block_k
            for row_idx, input_row in input_rows.items():
                input_column = first_column * shape.dilations[2]
                self.input_window.load_row(row_idx, filter_row[0], input_row, channel, input_column)
            for column in range(self.num_unrolled_taps):
                self.load_weights(shape.weight_tap(shape.tap_index((*filter_row, first_column + column))), k_tile)
                for row_idx in input_rows:
                    self.accumulate_row(row_idx, column)

    def load_weights(self, tap: Any, k_tile: Any) -> None:
        """Load the weights of a tap for the thread's outputs and the channels of a k-tile to registers."""
        thread, config = self.thread, self.config
        first_k = k_tile * config.block_k

        def read_weight(channel: Any, channel_in: Any) -> Any:
            return thread.arrays["K"][self.shape.weight_index(thread.first_channel + channel, tap, channel_in)]

        if not self.is_output_innermost:
            with unrolled_loop(config.vector, "channel") as channel:
                emit_vector_copy(
                    config.block_k,
                    self.weight_regs,
                    lambda lane: (channel, lane),
                    lambda lane: read_weight(channel, first_k + lane),
                )
            return
        lane_offset = thread.vector_idx * config.vector - thread.block_channel
        with unrolled_loop(config.block_k, "d") as channel_in:
            filter_row = tap * config.channels_per_group + first_k + channel_in
            emit_vector_copy(
                config.vector,
                self.weight_regs,
                lambda lane: (channel_in, lane),
                lambda lane: (
                    self.smem_filters[filter_row, lane_offset + lane]
                    if config.is_weight_shared
                    else read_weight(lane, first_k + channel_in)
                ),
            )

    def accumulate_row(self, row_idx: int, filter_column: int) -> None:
        """Accumulate the window of an output row below a column of the filter, with the loaded weights."""
        with (
            unrolled_loop(self.config.block_k, "d") as channel_in,
            self.input_window.open_columns(filter_column) as columns,
            unrolled_loop(self.config.vector, "channel") as channel,
        ):
            index = (channel_in, channel) if self.is_output_innermost else (channel, channel_in)
            for j, position in columns:
                input_value = self.input_window.values[row_idx, position, channel_in]
                self.epilogue.accumulate_product(row_idx, j, channel, input_value, self.weight_regs[index])
