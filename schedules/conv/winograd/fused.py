"""Winograd's convolution in one kernel: neither the transformed inputs nor the products ever pass through memory.

`winograd` writes and reads α²/m² times the inputs and as many times the outputs. This matters little on an H200, where
`winograd` was faster on all measured layers, and more on a GPU with less bandwidth per arithmetic. Here a block
computes all α² products of a tile of output channels × output tiles. For every few input channels, its threads
transform the block's inputs directly to shared memory, copy the filters, which a separate kernel transforms once, and
multiply. At the end the products are exchanged through shared memory, some channels at a time, and transformed to
outputs. Blocks of other output channels transform the same inputs again.

A thread accumulates one or several of the α² points, for some channels and tiles. Threads are ordered (point, channel,
tile), tiles innermost, so that the threads of a warp read few distinct words.

Tensor expressions cannot express this, because the tiles of the products divide a flat axis, unlike those of the
outputs. It is emitted as TIR. Sources: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", 2015; Yan,
Wang, Chu, "Optimizing Batched Winograd Convolution on GPUs", 2020.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)
from tvm.tirx.script.builder import ir

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.requirements import DILATION_1, ONE_GROUP, STRIDE_1, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv2d, epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.layout import to_storage_order

from ...primitives import keep_allocated_sizes, mark_constant_args
from ...tir_builder import (
    Buffer,
    Expr,
    allocate,
    block_axes,
    build_schedule,
    fill_zeros,
    if_,
    logical_and,
    open_block,
    serial_loop,
    store,
    thread_axis,
    unrolled_loop,
    vectorized_loop,
)
from ..direct_config import ACCUMULATOR_BYTES
from ..reduction import DTYPES
from .cook_toom import FractionMatrix, make_winograd_matrices
from .fused_config import WinogradTileConfig, compute_usage, declare_knobs
from .knobs import is_supported
from .te_stages import transpose, weighted_sum

FILTER_TRANSFORM_THREADS = 128  # threads per block


@schedule("conv2d", dtypes=DTYPES, usage=compute_usage, condition=all_of(ONE_GROUP, STRIDE_1, DILATION_1, is_supported))
def winograd_fused(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Tile output channels × output tiles per block, each as (thread, local), for all points."""
    fused_schedule = build_schedule(w, WinogradFusedKernels(declare_knobs(w, k)).emit)
    mark_constant_args(fused_schedule, "K")
    keep_allocated_sizes(fused_schedule)
    return fused_schedule


class WinogradFusedKernels:
    """The two kernels of `winograd_fused`."""

    def __init__(self, config: WinogradTileConfig) -> None:
        self.config = config
        self.w, self.grid = config.w, config.grid
        self.alpha = self.grid.alpha
        self.A, self.B, self.G = make_winograd_matrices(self.grid.m, self.w.R)

    def emit(self, arguments: dict[str, Buffer]) -> None:
        """Emit both kernels."""
        self.arguments = arguments
        config = self.config
        channel_blocks, tile_blocks = config.grid_shape
        self.padded_output_channels = channel_blocks * config.block_channels  # includes zeros in the last block
        self.transformed_filters = allocate(
            "U", config.num_points * config.padded_channels * self.padded_output_channels, ACCUMULATOR, "global"
        )
        self.transform_filters()
        with ExitStack() as stack:
            block_y, block_x = stack.enter_context(block_axes(channel_blocks, tile_blocks))
            thread = stack.enter_context(thread_axis(config.num_threads, "threadIdx.x"))
            self.emit_main_kernel(block_x, block_y, thread)

    # --- filter transform ---

    def transform_filters(self) -> None:
        """Emit the filter transform: a thread transforms one filter of one channel, or writes padding zeros."""
        config, w = self.config, self.w
        num_filters = config.padded_channels * self.padded_output_channels
        num_blocks = ceil_div(num_filters, FILTER_TRANSFORM_THREADS)
        with (
            thread_axis(num_blocks, "blockIdx.x") as block_idx,
            thread_axis(FILTER_TRANSFORM_THREADS, "threadIdx.x") as thread,
        ):
            filter_idx = block_idx * FILTER_TRANSFORM_THREADS + thread
            channel_in = filter_idx // self.padded_output_channels
            channel_out = filter_idx % self.padded_output_channels
            is_inside = logical_and(channel_in < w.C, channel_out < w.O)
            with if_(filter_idx < num_filters), open_block("filters"):
                values = transform_both_axes(
                    lambda r, s: self.read_element("K", is_inside, (channel_out, channel_in, r, s)), transpose(self.G)
                )
                for point, value in enumerate(values):
                    store(self.transformed_filters, point * num_filters + filter_idx, value)

    def read_element(self, name: str, is_inside: Expr, index: Sequence[Expr]) -> Expr:
        """Return an element of X or K, indexed with channels second; zero if it is not inside."""
        value = T.Cast(ACCUMULATOR, self.arguments[name][tuple(to_storage_order(self.w.layout, index))])
        return T.if_then_else(is_inside, value, T.float32(0))

    # --- products ---

    def emit_main_kernel(self, block_x: Expr, block_y: Expr, thread: Expr) -> None:
        """Emit the kernel that transforms inputs, multiplies and transforms outputs."""
        config = self.config
        self.thread_idx = thread
        self.tile_offset, self.channel_offset = block_x * config.block_tiles, block_y * config.block_channels
        self.smem = allocate("staged", config.shared_bytes // ACCUMULATOR_BYTES, ACCUMULATOR, "shared")
        self.inputs_offset = config.num_points * config.block_k * config.block_channels  # after the filters
        threads_x, threads_y = config.threads_x, config.threads_y
        self.thread_tile_idx, self.thread_channel_idx = thread % threads_x, thread // threads_x % threads_y
        self.thread_point_idx = thread // (threads_x * threads_y)
        self.accum = allocate("sums", config.num_accumulators, ACCUMULATOR)
        fill_zeros(self.accum, config.num_accumulators)
        with serial_loop(config.padded_channels // config.block_k, "step") as k_tile:
            self.load_filters(k_tile)
            self.transform_inputs(k_tile)
            self.multiply_points()
        self.transform_outputs()

    def load_filters(self, k_tile: Expr) -> None:
        """Copy the filters of some input channels, in vectors of neighbouring output channels."""
        config = self.config
        row_elements, vector_elements = config.block_channels, config.vector_elements
        num_vectors = config.num_points * config.block_k * row_elements // vector_elements
        with unrolled_loop(ceil_div(num_vectors, config.num_threads), "i") as i:
            vector_idx = i * config.num_threads + self.thread_idx
            with if_(vector_idx < num_vectors if num_vectors % config.num_threads else True):
                channel_out, point_and_channel = (
                    vector_idx % (row_elements // vector_elements) * vector_elements,
                    vector_idx // (row_elements // vector_elements),
                )
                channel_in, point = point_and_channel % config.block_k, point_and_channel // config.block_k
                source = (
                    (point * config.padded_channels + k_tile * config.block_k + channel_in)
                    * self.padded_output_channels
                    + self.channel_offset
                    + channel_out
                )
                with vectorized_loop(vector_elements) as lane:
                    store(self.smem, vector_idx * vector_elements + lane, self.transformed_filters[source + lane])

    def transform_inputs(self, k_tile: Expr) -> None:
        """Transform the inputs of one k-tile to shared memory; a thread transforms pairs of tile and channel."""
        config, grid, w = self.config, self.grid, self.w
        num_transforms = config.block_k * config.block_tiles
        with serial_loop(ceil_div(num_transforms, config.num_threads), "i") as i:
            transform_idx = i * config.num_threads + self.thread_idx
            with (
                if_(transform_idx < num_transforms if num_transforms % config.num_threads else True),
                open_block("transform"),
            ):
                channel_in = k_tile * config.block_k + transform_idx // config.block_tiles
                tile_idx = self.tile_offset + transform_idx % config.block_tiles
                image, top, left = grid.tile_origin(tile_idx)
                is_inside = logical_and(tile_idx < grid.count, channel_in < w.C)

                def read_input(i: int, j: int) -> Expr:
                    row, column = top + (i - w.pad_low[0]), left + (j - w.pad_low[1])
                    is_inside_image = logical_and(is_inside, row >= 0, row < w.H, column >= 0, column < w.W)
                    return self.read_element("X", is_inside_image, (image, channel_in, row, column))

                for point, value in enumerate(transform_both_axes(read_input, self.B)):
                    store(self.smem, self.inputs_offset + point * num_transforms + transform_idx, value)

    def multiply_points(self) -> None:
        """Accumulate the products of the input channels in shared memory."""
        config = self.config
        num_channels, num_tiles = config.local_y, config.local_x
        filter_regs, input_regs = allocate("u", num_channels, ACCUMULATOR), allocate("v", num_tiles, ACCUMULATOR)
        with unrolled_loop(config.points_per_thread, "b") as b, unrolled_loop(config.block_k, "c") as c:
            row = (self.thread_point_idx * config.points_per_thread + b) * config.block_k + c
            with unrolled_loop(num_channels, "i") as i:
                store(
                    filter_regs, i, self.smem[row * config.block_channels + self.thread_channel_idx * num_channels + i]
                )
            with unrolled_loop(num_tiles, "j") as j:
                store(
                    input_regs,
                    j,
                    self.smem[self.inputs_offset + row * config.block_tiles + self.thread_tile_idx * num_tiles + j],
                )
            with unrolled_loop(num_channels, "i") as i, unrolled_loop(num_tiles, "j") as j:
                accum_idx = (b * num_channels + i) * num_tiles + j
                store(self.accum, accum_idx, self.accum[accum_idx] + filter_regs[i] * input_regs[j])

    # --- output transform ---

    def transform_outputs(self) -> None:
        """Exchange the products of some channels in shared memory, where each thread transforms a tile's outputs."""
        config, tiles_per_block = self.config, self.config.block_tiles
        channels_per_thread = config.exchanged_channels // config.threads_y
        num_items = config.exchanged_channels * tiles_per_block
        for exchange_idx in range(config.local_y // channels_per_thread):
            with (
                unrolled_loop(config.points_per_thread, "b") as b,
                unrolled_loop(channels_per_thread, "i") as i,
                unrolled_loop(config.local_x, "j") as j,
            ):
                point = self.thread_point_idx * config.points_per_thread + b
                row = point * config.exchanged_channels + self.thread_channel_idx * channels_per_thread + i
                accum_idx = (b * config.local_y + exchange_idx * channels_per_thread + i) * config.local_x + j
                store(
                    self.smem, row * tiles_per_block + self.thread_tile_idx * config.local_x + j, self.accum[accum_idx]
                )
            with serial_loop(ceil_div(num_items, config.num_threads), "i") as i:
                item_idx = i * config.num_threads + self.thread_idx
                with if_(item_idx < num_items if num_items % config.num_threads else True), open_block("outputs"):
                    exchanged_channel = item_idx // tiles_per_block
                    channel = (
                        exchanged_channel // channels_per_thread * config.local_y
                        + exchange_idx * channels_per_thread
                        + exchanged_channel % channels_per_thread
                    )
                    self.store_outputs(
                        item_idx,
                        num_items,
                        self.channel_offset + channel,
                        self.tile_offset + item_idx % tiles_per_block,
                    )

    def store_outputs(self, item_idx: Expr, num_items: int, output_channel: Expr, tile_idx: Expr) -> None:
        """Transform the products of one tile and channel, and store them with the epilogue."""
        w, grid = self.w, self.grid
        values = transform_both_axes(lambda i, j: self.smem[(i * self.alpha + j) * num_items + item_idx], self.A)
        output_regs = store_in_registers("y", values)
        image, top, left = grid.tile_origin(tile_idx)
        with if_(logical_and(output_channel < w.O, tile_idx < grid.count)):
            for i, j in itertools.product(range(grid.m), repeat=2):
                row, column = top + i, left + j
                with if_(logical_and(row < w.P if w.P % grid.m else True, column < w.Q if w.Q % grid.m else True)):
                    output_index = tuple(to_storage_order(w.layout, (image, output_channel, row, column)))
                    ir.buffer_store(
                        self.arguments["Y"],
                        self.apply_epilogue_ops(output_regs[i * grid.m + j], output_index, output_channel),
                        list(output_index),
                    )

    def apply_epilogue_ops(self, value: Expr, output_index: Sequence[Expr], output_channel: Expr) -> Expr:
        """Return the value of one output after the epilogue operations."""

        def read_argument(name: str) -> Expr:
            tensor = self.arguments[name]
            return T.Cast(ACCUMULATOR, tensor[tuple(output_index)] if len(tensor.shape) > 1 else tensor[output_channel])

        return T.Cast(self.w.storage, epilogue.apply_to_expression(self.w.epilogue, value, read_argument))


def transform_both_axes(read: Callable[[int, int], Expr], matrix: FractionMatrix) -> Iterator[Expr]:
    """Yield the elements of matrixᵀ · X · matrix, row by row.

    X is read one column at a time, so that few of its elements are in registers at once.
    """
    columns, size = transpose(matrix), len(matrix)
    half = allocate("half", len(columns) * size, ACCUMULATOR)
    for j in range(size):
        column = store_in_registers("column", (read(i, j) for i in range(size)))
        for u, weights in enumerate(columns):
            store(half, u * size + j, weighted_sum(column.__getitem__, weights))
    for u in range(len(columns)):
        row = [half[u * size + j] for j in range(size)]
        for weights in columns:
            yield weighted_sum(row.__getitem__, weights)


def store_in_registers(name: str, values: Iterable[Expr]) -> list[Expr]:
    """Store values in registers, in order, and return these."""
    expressions = list(values)
    registers = allocate(name, len(expressions), ACCUMULATOR)
    for i, value in enumerate(expressions):
        store(registers, i, value)
    return [registers[i] for i in range(len(expressions))]
