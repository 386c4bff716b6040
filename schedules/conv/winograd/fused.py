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

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)
from tvm.tirx.script.builder import ir

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
    is_below,
    items_loop,
    logical_and,
    open_block,
    serial_loop,
    store,
    thread_axis,
    thread_per_item,
    unrolled_loop,
    vectorized_loop,
)
from ..direct_config import ACCUMULATOR_BYTES
from ..reduction import FLOAT_DTYPES
from .cook_toom import FractionMatrix, make_winograd_matrices
from .fused_config import WinogradTileConfig, compute_usage, declare_knobs, estimate_seconds
from .knobs import is_supported
from .te_stages import transpose
from .transform import transform_both_axes

FILTER_TRANSFORM_THREADS = 128  # threads per block


@schedule(
    "conv2d",
    dtypes=FLOAT_DTYPES,
    usage=compute_usage,
    condition=all_of(ONE_GROUP, STRIDE_1, DILATION_1, is_supported),
    estimate_seconds=estimate_seconds,
)
def winograd_fused(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Tile output channels × output tiles per block, each as (thread, local), for all points."""
    fused_schedule = build_schedule(w, functools.partial(emit_kernels, declare_knobs(w, k)))
    mark_constant_args(fused_schedule, "K")
    keep_allocated_sizes(fused_schedule)
    return fused_schedule


def emit_kernels(config: WinogradTileConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the filter transform, and the kernel that transforms inputs, multiplies and transforms outputs."""
    filters = allocate("U", config.num_points * config.num_filters, ACCUMULATOR, "global")
    emit_filter_transform(config, arguments, filters)
    grid = block_axes(*config.grid_shape)
    with grid as (block_y, block_x), thread_axis(config.num_threads, "threadIdx.x") as thread:
        smem = allocate("staged", config.shared_bytes // ACCUMULATOR_BYTES, ACCUMULATOR, "shared")
        sums = allocate("sums", config.num_accumulators, ACCUMULATOR)
        fill_zeros(sums, config.num_accumulators)
        block = FusedBlock(config, arguments, filters, smem, sums, block_y, block_x, thread)
        with serial_loop(config.padded_channels // config.block_k, "step") as k_tile:
            block.load_filters(k_tile)
            block.transform_inputs(k_tile)
            block.multiply_points()
        block.transform_outputs()


def emit_filter_transform(config: WinogradTileConfig, arguments: Mapping[str, Buffer], filters: Buffer) -> None:
    """Emit the filter transform: a thread transforms one filter of one channel, or writes padding zeros."""
    w = config.w
    with thread_per_item(config.num_filters, FILTER_TRANSFORM_THREADS) as filter_idx, open_block("filters"):
        channel_in, channel_out = (
            filter_idx // config.padded_output_channels,
            filter_idx % config.padded_output_channels,
        )
        is_inside = logical_and(channel_in < w.C, channel_out < w.O)

        def read_filter(r: int, s: int) -> Expr:
            return read_element(w, arguments["K"], is_inside, (channel_out, channel_in, r, s))

        matrix = transpose(make_winograd_matrices(config.grid.m, w.R).G)
        for point, value in enumerate(transform_elements(matrix, read_filter)):
            store(filters, point * config.num_filters + filter_idx, value)


@dataclass(frozen=True)
class FusedBlock:
    """The work of a thread of a block."""

    config: WinogradTileConfig  # tile of the block
    arguments: Mapping[str, Buffer]  # argument buffers by name
    filters: Buffer  # transformed filters (points, input channels, output channels), padded to whole blocks
    smem: Buffer  # transformed filters, then inputs of a k-tile; at the end the products of some channels
    sums: Buffer  # products of this thread (points, channels, tiles)
    block_y: Expr  # index of the block along the output channels
    block_x: Expr  # index of the block along the output tiles
    thread: Expr  # index of the thread

    @property
    def inputs_offset(self) -> int:
        """Offset of the transformed inputs in shared memory, in elements."""
        return int(self.config.num_points * self.config.block_k * self.config.block_channels)

    @property
    def position(self) -> tuple[Expr, Expr, Expr]:
        """Index of the thread along the points, the channels and the tiles."""
        threads_x, threads_y = self.config.threads_x, self.config.threads_y
        return self.thread // (threads_x * threads_y), self.thread // threads_x % threads_y, self.thread % threads_x

    def load_filters(self, k_tile: Expr) -> None:
        """Copy the filters of some input channels, in vectors of neighbouring output channels."""
        config, vector = self.config, self.config.vector_elements
        vectors_per_row = config.block_channels // vector
        num_vectors = config.num_points * config.block_k * config.block_channels // vector
        with items_loop(num_vectors, self.thread, config.num_threads, is_unrolled=True) as vector_idx:
            channel_out, row = vector_idx % vectors_per_row * vector, vector_idx // vectors_per_row
            channel_in, point = row % config.block_k, row // config.block_k
            source_row = point * config.padded_channels + k_tile * config.block_k + channel_in
            source = source_row * config.padded_output_channels + self.block_y * config.block_channels + channel_out
            with vectorized_loop(vector) as lane:
                store(self.smem, vector_idx * vector + lane, self.filters[source + lane])

    def transform_inputs(self, k_tile: Expr) -> None:
        """Transform the inputs of one k-tile to shared memory; a thread transforms pairs of tile and channel."""
        config, grid, w = self.config, self.config.grid, self.config.w
        num_transforms = config.block_k * config.block_tiles
        items = items_loop(num_transforms, self.thread, config.num_threads)
        with items as transform_idx, open_block("transform"):
            channel_in = k_tile * config.block_k + transform_idx // config.block_tiles
            tile_idx = self.block_x * config.block_tiles + transform_idx % config.block_tiles
            image, top, left = grid.tile_origin(tile_idx)
            is_inside = logical_and(tile_idx < grid.count, channel_in < w.C)

            def read_input(i: int, j: int) -> Expr:
                row, column = top + (i - w.pad_low[0]), left + (j - w.pad_low[1])
                is_inside_image = logical_and(is_inside, row >= 0, row < w.H, column >= 0, column < w.W)
                return read_element(w, self.arguments["X"], is_inside_image, (image, channel_in, row, column))

            matrix = make_winograd_matrices(grid.m, w.R).B
            for point, value in enumerate(transform_elements(matrix, read_input)):
                store(self.smem, self.inputs_offset + point * num_transforms + transform_idx, value)

    def multiply_points(self) -> None:
        """Accumulate the products of the input channels in shared memory."""
        config, (point_idx, channel_idx, tile_idx) = self.config, self.position
        num_channels, num_tiles = config.local_y, config.local_x
        filter_regs, input_regs = allocate("u", num_channels, ACCUMULATOR), allocate("v", num_tiles, ACCUMULATOR)
        with unrolled_loop(config.points_per_thread, "b") as b, unrolled_loop(config.block_k, "c") as c:
            row = (point_idx * config.points_per_thread + b) * config.block_k + c
            with unrolled_loop(num_channels, "i") as i:
                store(filter_regs, i, self.smem[row * config.block_channels + channel_idx * num_channels + i])
            with unrolled_loop(num_tiles, "j") as j:
                element = self.inputs_offset + row * config.block_tiles + tile_idx * num_tiles + j
                store(input_regs, j, self.smem[element])
            with unrolled_loop(num_channels, "i") as i, unrolled_loop(num_tiles, "j") as j:
                accum_idx = (b * num_channels + i) * num_tiles + j
                store(self.sums, accum_idx, self.sums[accum_idx] + filter_regs[i] * input_regs[j])

    def transform_outputs(self) -> None:
        """Exchange the products of some channels in shared memory, where each thread transforms a tile's outputs."""
        config, tiles_per_block = self.config, self.config.block_tiles
        channels_per_thread = config.exchanged_channels // config.threads_y
        num_items = config.exchanged_channels * tiles_per_block
        for exchange_idx in range(config.local_y // channels_per_thread):
            first_channel = exchange_idx * channels_per_thread
            self.store_products(first_channel, channels_per_thread)
            with items_loop(num_items, self.thread, config.num_threads) as item_idx, open_block("outputs"):
                exchanged_channel = item_idx // tiles_per_block
                channel_in_thread = first_channel + exchanged_channel % channels_per_thread
                channel = exchanged_channel // channels_per_thread * config.local_y + channel_in_thread
                self.store_outputs(
                    item_idx,
                    num_items,
                    self.block_y * config.block_channels + channel,
                    self.block_x * tiles_per_block + item_idx % tiles_per_block,
                )

    def store_products(self, first_channel: int, num_channels: int) -> None:
        """Store the products of some of the thread's channels to shared memory (points, channels, tiles)."""
        config, (point_idx, channel_idx, tile_idx) = self.config, self.position
        loops = unrolled_loop(num_channels, "i"), unrolled_loop(config.local_x, "j")
        with unrolled_loop(config.points_per_thread, "b") as b, loops[0] as i, loops[1] as j:
            point = point_idx * config.points_per_thread + b
            row = point * config.exchanged_channels + channel_idx * num_channels + i
            accum_idx = (b * config.local_y + first_channel + i) * config.local_x + j
            store(self.smem, row * config.block_tiles + tile_idx * config.local_x + j, self.sums[accum_idx])

    def store_outputs(self, item_idx: Expr, num_items: int, output_channel: Expr, tile_idx: Expr) -> None:
        """Transform the products of one tile and channel, and store them with the epilogue."""
        w, grid = self.config.w, self.config.grid
        matrix = make_winograd_matrices(grid.m, w.R).A

        def read_product(i: int, j: int) -> Expr:
            return self.smem[(i * grid.alpha + j) * num_items + item_idx]

        output_regs = store_in_registers("y", transform_elements(matrix, read_product))
        image, top, left = grid.tile_origin(tile_idx)
        with if_(logical_and(output_channel < w.O, tile_idx < grid.count)):
            for i, j in itertools.product(range(grid.m), repeat=2):
                row, column = top + i, left + j
                with if_(logical_and(is_below(row, w.P, grid.m), is_below(column, w.Q, grid.m))):
                    output_index = tuple(to_storage_order(w.output_layout, (image, output_channel, row, column)))
                    value = self.apply_epilogue(output_regs[i * grid.m + j], output_index, output_channel)
                    ir.buffer_store(self.arguments["Y"], value, list(output_index))

    def apply_epilogue(self, value: Expr, output_index: Sequence[Expr], output_channel: Expr) -> Expr:
        """Return the value of one output after the epilogue operations."""

        def read_argument(name: str) -> Expr:
            tensor = self.arguments[name]
            return T.Cast(ACCUMULATOR, tensor[tuple(output_index)] if len(tensor.shape) > 1 else tensor[output_channel])

        w = self.config.w
        return T.Cast(w.storage, epilogue.apply_to_expression(w.epilogue, value, read_argument))


def read_element(w: Conv2d, array: Buffer, is_inside: Expr, index: Sequence[Expr]) -> Expr:
    """Return an element of X or K, indexed with channels second; zero if it is not inside."""
    value = T.Cast(ACCUMULATOR, array[tuple(to_storage_order(w.input_layout, index))])
    return T.if_then_else(is_inside, value, T.float32(0))


def transform_elements(matrix: FractionMatrix, read: Callable[[int, int], Expr]) -> Iterable[Expr]:
    """Return the elements of matrixᵀ · X · matrix, given a function that reads an element of X."""

    def read_column(j: int) -> list[list[Expr]]:
        return [[value] for value in store_in_registers("column", (read(i, j) for i in range(len(matrix))))]

    return (value for _, (value,) in transform_both_axes(matrix, read_column))


def store_in_registers(name: str, values: Iterable[Expr]) -> list[Expr]:
    """Store values in registers, in order, and return these."""
    expressions = list(values)
    registers = allocate(name, len(expressions), ACCUMULATOR)
    for i, value in enumerate(expressions):
        store(registers, i, value)
    return [registers[i] for i in range(len(expressions))]
