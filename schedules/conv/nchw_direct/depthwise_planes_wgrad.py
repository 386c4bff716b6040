"""Gradients of the weights of depthwise convolutions, channels first, whose whole planes TMA copies to shared memory.

The planes of a channel are contiguous, whatever the width of a row, so that a box of TMA copies them as long lines. A
warp copies planes of dY and X of some images ahead, while other warps compute those before.

A thread has a channel, and a strip of columns and a group of rows of dY. It loads words of neighbouring columns, walks
down the rows of X, and adds the products with all rows of dY that meet a row of X below a tap to float32 sums in
registers, over all images of the CTA. Only the rows and columns that may lie outside of a plane have guards. The lanes
of a warp then add their sums by shuffles, the warps of a CTA in shared memory, and a second kernel adds the parts. The
order of all sums is fixed, so that each run returns the same bits.

Source: PTX ISA, "cp.async.bulk.tensor" and "shfl.sync".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_FIRST_LAYOUT, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    block_axes,
    declare_tensor_map,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    is_below,
    items_loop,
    load_shared,
    logical_and,
    serial_loop,
    store,
    thread_axis,
    to_uint32,
    unpack,
)
from ..nhwc_direct.depthwise_sums import StoreResult, build_depthwise_sums
from ..nhwc_direct.depthwise_tma_config import STAGE_ALIGNMENT_BYTES
from ..nhwc_direct.wgrad_config import list_positions
from ..reduction import FLOAT_DTYPES
from ..tensor_cores.gemm.atoms import ThreadPosition
from ..tensor_cores.gemm.channel_stats import add_across_lanes
from ..tensor_cores.gemm.cta import allocate_smem, allow_dependent_launch
from ..tensor_cores.gemm.pipelines import PipelineState, TmaPipeline, fence_barrier_init
from ..tensor_cores.gemm.tma import TmaCopy, prefetch_tensor_maps
from .plane_wgrad_config import WORD_BYTES, Lines, PlaneWgradConfig


def has_planes(w: WeightGradient) -> bool:
    """Whether each channel has one filter, TMA can copy planes of some channels, and tiles fit in shared memory."""
    if not w.C == w.O == w.groups > 1:
        return False
    lines = PlaneWgradConfig.find_lines(w)
    return all(each.count and w.C % each.channels == 0 for each in lines) and PlaneWgradConfig.has_config(w)


PLANES = Requirement(
    "depthwise layers whose planes fit in shared memory, and small filters",
    has_planes,
    lambda w: f"filters of {math.prod(w.kernel)} taps for {w.C} to {w.O} channels in {w.groups} groups",
)


@schedule(
    "conv1d_wgrad",
    "conv2d_wgrad",
    dtypes=FLOAT_DTYPES,
    usage=PlaneWgradConfig.compute_usage,
    condition=all_of(CHANNELS_FIRST_LAYOUT, PLANES),
    search_if=has_planes,
    starting_configs=PlaneWgradConfig.list_starting_configs,
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_planes(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Copy planes of dY and X by TMA ahead, and sum products of a strip of columns and some rows per thread."""
    config = PlaneWgradConfig.declare_knobs(w, k)
    num_parts, num_taps = int(config.num_parts), config.shape.num_taps
    return build_depthwise_sums(
        w,
        num_parts if num_parts > 1 else None,
        functools.partial(emit_products, config),
        lambda number: (number % num_taps, number // num_taps),
    )


def emit_products(
    config: PlaneWgradConfig, arguments: dict[str, Buffer], workspace: Buffer | None, store_result: StoreResult
) -> None:
    """Emit the first kernel, which stores sums (parts, channels, taps), or the gradient if there is no workspace."""
    names, lines = config.w.OPERANDS, config.find_lines(config.w)
    gradient_map, input_map = (
        declare_tensor_map(f"{name}_map", arguments[name], make_lines_map(config, each))
        for name, each in zip(names, lines, strict=True)
    )
    compute_threads = int(config.compute_threads)
    with (
        block_axes(int(config.num_parts), int(config.channel_blocks)) as (part, block),
        thread_axis(int(config.num_threads), "threadIdx.x") as thread,
    ):
        smem = allocate_smem(int(config.smem_bytes), STAGE_ALIGNMENT_BYTES)
        pipeline = TmaPipeline(
            smem,
            int(config.stage_bytes),
            smem + to_uint32(int(config.barrier_offset_bytes)),
            int(config.stages),
            int(config.input_bytes) + int(config.gradient_bytes),
            num_consumers=compute_threads // WARP_SIZE,
        )
        with if_(thread == compute_threads):
            prefetch_tensor_maps([gradient_map, input_map])
        with if_(thread == 0):
            pipeline.init_barriers()
            fence_barrier_init()
        emit_call(T.cuda.cta_sync())
        allow_dependent_launch()
        kernel = PlaneWgradKernel(config, workspace, store_result, pipeline, smem, part, block, thread)
        with if_(thread < compute_threads):
            kernel.compute()
        with kernel.position.elect_in_warp(compute_threads // WARP_SIZE):
            kernel.copy_tiles(gradient_map, input_map)
        kernel.add_warps()


def make_lines_map(config: PlaneWgradConfig, lines: Lines) -> maps.TensorMap:
    """Return the tensor map of dY or X: elements of a line, lines, channels in units of TMA, and images."""
    w, total = config.w, lines.elements * lines.count
    extents = lines.elements, lines.count, w.C // lines.channels, w.N
    strides = lines.elements, total, total * (w.C // lines.channels)
    box = lines.elements, lines.count, int(config.channels) // lines.channels, int(config.images)
    return maps.make_tiled_map(w.storage, config.itemsize, extents, strides, box, 0)


class PlaneWgradKernel:
    """What the warps of a CTA share, whatever their roles."""

    def __init__(
        self,
        config: PlaneWgradConfig,
        workspace: Buffer | None,
        store_result: StoreResult,
        pipeline: TmaPipeline,
        smem: Expr,
        part: Expr,
        block: Expr,
        thread: Expr,
    ) -> None:
        self.config, self.shape, self.workspace, self.store_result = config, config.shape, workspace, store_result
        self.pipeline, self.smem, self.part, self.block, self.thread = pipeline, smem, part, block, thread
        self.position, self.state = ThreadPosition(thread), PipelineState("tile", int(config.stages))

    @contextmanager
    def for_each_tile(self) -> Iterator[Expr]:
        """Open the loop over the tiles of the CTA."""
        iterations = int(self.config.iterations)
        with serial_loop(iterations, "iteration") as iteration:
            tile = self.part * iterations + iteration
            with if_(is_below(tile, int(self.config.num_tiles), iterations)):
                yield tile

    def copy_tiles(self, gradient_map: Expr, input_map: Expr) -> None:
        """Copy the planes of dY and X, with zeros for images that do not exist; run by one thread."""
        config, pipeline, state = self.config, self.pipeline, self.state
        gradient_lines, input_lines = config.find_lines(config.w)
        with self.for_each_tile() as tile:
            pipeline.producer_acquire(state.index, state.phase)
            stage, barrier = pipeline.stage_address(state.index), pipeline.full_barrier(state.index)
            image, offset = tile * int(config.images), to_uint32(int(config.gradient_offset_bytes))
            for tensor_map, lines, destination in (
                (input_map, input_lines, stage),
                (gradient_map, gradient_lines, stage + offset),
            ):
                channel = self.block * (int(config.channels) // lines.channels)
                TmaCopy(tensor_map, barrier).issue(destination, (0, 0, channel, image))
            state.advance()

    def compute(self) -> None:
        """Add up the products of all tiles, and over the lanes of a warp; run by all threads but the last warp's."""
        config, shape = self.config, self.shape
        per_channel, pixel_threads, strips, groups, num_sums, channels = (
            int(value)
            for value in (
                config.threads_per_channel,
                config.pixel_threads,
                config.strips,
                config.row_groups,
                config.num_accumulators,
                config.channels,
            )
        )
        self.sums = allocate("sums", num_sums, ACCUMULATOR)
        fill_zeros(self.sums, num_sums)
        item = self.thread % per_channel
        if pixel_threads < per_channel:  # a thread without pixels computes the first ones
            item = Register("item", value=T.Select(item < pixel_threads, item, 0)).value
        self.row = Register("row", value=item // strips % groups * int(config.rows)).value
        self.column = Register("column", value=item % strips * int(config.strip)).value
        plane = item // (strips * groups) * channels + self.thread // per_channel
        (_, step_y, step_x), (_, height, width), (_, _, output_width) = (
            shape.strides,
            shape.input_size,
            shape.output_size,
        )
        first_input = plane * (height * width) + self.row * (step_y * width) + self.column * step_x
        first_gradient = plane * config.gradient_plane + self.row * output_width + self.column
        input_offset, gradient_offset = (
            Register(name, "uint32", to_uint32(element * config.itemsize)).value
            for name, element in (("input_offset", first_input), ("gradient_offset", first_gradient))
        )
        with self.for_each_tile():
            self.pipeline.consumer_wait(self.state.index, self.state.phase)
            stage = self.pipeline.stage_address(self.state.index)
            inputs = Register("input_address", "uint32", stage + input_offset).value
            offset = to_uint32(int(config.gradient_offset_bytes))
            gradients = Register("gradient_address", "uint32", stage + offset + gradient_offset).value
            self.walk(inputs, gradients)
            self.state.advance()
        for number in range(num_sums):
            if pixel_threads < per_channel:
                exists = self.thread % per_channel < pixel_threads
                store(self.sums, number, T.Select(exists, self.sums[number], T.float32(0)))
            for bit in range(WARP_SIZE.bit_length() - 1):
                store(self.sums, number, add_across_lanes(self.sums[number], 1 << bit))

    def walk(self, input_address: Expr, gradient_address: Expr) -> None:
        """Add the products of each row of X with the rows of dY that it meets below a tap."""
        config, shape = self.config, self.shape
        rows, strip = int(config.rows), int(config.strip)
        (_, step_y, step_x), (_, dilation_y, dilation_x) = shape.strides, shape.dilations
        (_, pad_y, pad_x), (_, height, width), (_, taps_y, taps_x) = shape.pad_low, shape.input_size, shape.kernel_size
        (_, output_height, output_width) = shape.output_size
        lines = list_positions(rows, taps_y, step_y, dilation_y)
        columns = list_positions(strip, taps_x, step_x, dilation_x)
        self.words = allocate("words", 1, "uint32")
        inputs = allocate("inputs", len(columns), ACCUMULATOR)
        gradients = allocate("gradients", rows * strip, ACCUMULATOR)
        loaded_rows: set[int] = set()
        last_row = (int(config.row_groups) - 1) * rows  # first row of the last thread along a column
        last_column = (int(config.strips) - 1) * strip
        for line in lines:
            is_inside = self.list_guards(self.row * step_y, line - pad_y, last_row * step_y, height)
            offsets = [column - pad_x for column in columns]
            bounds = self.column * step_x, last_column * step_x, width
            self.load_row(inputs, 0, input_address, (line - pad_y) * width, offsets, bounds, is_inside)
            users = [(y, r) for y in range(rows) for r in range(taps_y) if y * step_y + r * dilation_y == line]
            for y in sorted({y for y, _ in users} - loaded_rows):
                loaded_rows.add(y)
                is_inside = self.list_guards(self.row, y, last_row, output_height)
                bounds = self.column, last_column, output_width
                row = y * output_width
                self.load_row(gradients, y * strip, gradient_address, row, range(strip), bounds, is_inside)
            if line == lines[-1]:
                emit_call(T.cuda.warp_sync())
                with if_(self.position.lane == 0):
                    self.pipeline.consumer_arrive(self.state.index)
            for j in range(strip):
                for y, r in users:
                    for s in range(taps_x):
                        value = inputs[columns.index(j * step_x + s * dilation_x)]
                        place = r * taps_x + s
                        store(self.sums, place, self.sums[place] + value * gradients[y * strip + j])

    @staticmethod
    def list_guards(first: Expr, offset: int, last: int, size: int) -> list[Expr]:
        """Return the conditions that a position is in an axis; `first` is a thread's, and at most `last`."""
        return [first + offset >= 0] * (offset < 0) + [first + offset < size] * (last + offset >= size)

    def load_row(
        self,
        values: Buffer,
        first_value: int,
        address: Expr,
        row_offset: int,
        offsets: Sequence[int],
        bounds: tuple[Expr, int, int],
        row_guards: list[Expr],
    ) -> None:
        """Load elements of a row in words, and convert them to the dtype of the sums, with zeros outside of the plane.

        Args:
            values: Where the elements go, from `first_value` on.
            first_value: Index of the first one.
            address: Address of the thread's first pixel.
            row_offset: Elements from there to the row.
            offsets: Elements from there to the columns, in order.
            bounds: The column of the thread, its largest value, and the columns of a row.
            row_guards: Conditions that the row exists.
        """
        config, size = self.config, int(self.config.elements_per_load)
        word = None
        for i, offset in enumerate(offsets):
            if word != offset // size:
                word = offset // size
                guards = [*row_guards, *self.list_guards(bounds[0], word * size, *bounds[1:])]
                if guards:
                    store(self.words, 0, T.uint32(0))
                with if_(logical_and(*guards)):
                    place = (row_offset + word * size) * config.itemsize % 2**32  # addresses have 32 bits
                    load_shared(self.words, address + to_uint32(place), size * config.itemsize)
                unpacked = unpack(self.words, size, config.w.storage)
            store(values, first_value + i, unpacked[offset % size])

    def add_warps(self) -> None:
        """Add the sums of the warps of a channel in order, and store them; run by all threads."""
        config, num_taps = self.config, self.shape.num_taps
        num_warps, num_threads, channels = (
            int(value) for value in (config.threads_per_channel // WARP_SIZE, config.num_threads, config.channels)
        )
        total, value = allocate("total", 1, ACCUMULATOR), allocate("sum", 1, "uint32")
        emit_call(T.cuda.cta_sync())  # all warps have read the stages
        with if_(logical_and(self.thread < int(config.compute_threads), self.position.lane == 0)):
            place = self.smem + to_uint32(self.position.warp * (num_taps * WORD_BYTES))
            for number in range(num_taps):
                store(value, 0, T.reinterpret("uint32", self.sums[number]))
                emit_ptx("st.shared.b32", place + to_uint32(number * WORD_BYTES), value[0])
        emit_call(T.cuda.cta_sync())
        with items_loop(channels * num_taps, self.thread, num_threads) as item:
            channel, tap = item // num_taps, item % num_taps
            store(total, 0, T.float32(0))
            for warp in range(num_warps):
                element = (channel * num_warps + warp) * num_taps + tap
                load_shared(value, self.smem + to_uint32(element * WORD_BYTES), WORD_BYTES)
                store(total, 0, total[0] + T.reinterpret(ACCUMULATOR, value[0]))
            channel = self.block * channels + channel
            if self.workspace is None:
                self.store_result(tap, channel, total[0])
            else:
                index = (self.part * config.w.C + channel) * num_taps + tap
                store(self.workspace, index, total[0])
