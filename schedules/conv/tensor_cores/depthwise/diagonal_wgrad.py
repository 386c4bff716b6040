"""Gradients of the weights of depthwise convolutions as diagonals of products of octets of channels, by mma.sync.

The product has channels of X at two taps as rows and channels of dY as columns, and its reduction runs over 16 pixels.
Only elements of equal channels are used: an eighth, for which mma.sync still takes less time than the FMA units. A row
of an 8 × 8 matrix of ldmatrix is the octet of a pixel, and both operands are transposed on the way to registers. A tap
is only another address, and no element is packed or converted.

A CTA copies a tile of dY and the window of X below it to shared memory. A warp keeps the fragments of dY of all rows of
a strip, and multiplies each fragment of X by those of all rows that reach it by a tap. It keeps the sums of an octet
over all tiles of the CTA's part of the pixels. The warps of a CTA then add their diagonals in shared memory, and a
second kernel adds the parts in order, so that each run returns the same bits.

Source: PTX ISA, "mma.sync", "ldmatrix" and "cp.async".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import epilogue
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    block_axes,
    build_schedule,
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
)
from ...gradient_operators import WGRAD
from ...nhwc_direct.sum_of_parts import emit_sum_of_parts
from ..gemm.atoms import MmaSyncAtom, ThreadPosition, ldmatrix_x4
from ..gemm.cp_async import cp_async
from ..gemm.cta import allocate_smem, allow_dependent_launch
from ..gemm.pipelines import CpAsyncPipeline
from ..implicit_gemm_shape import VECTOR_BYTES
from .diagonal_wgrad_config import OCTET, DiagonalWgradConfig, can_multiply_octets


@schedule(
    *WGRAD,
    dtypes=("float16", "bfloat16"),
    usage=DiagonalWgradConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, can_multiply_octets),
    search_if=can_multiply_octets,
    starting_configs=DiagonalWgradConfig.list_starting_configs,
    supersedes=("implicit_gemm",),
    device_kinds=("cuda",),
    min_arch=80,
)
def depthwise_diagonal(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Multiply octets of channels of X and dY over tiles of pixels, keep diagonals, and add parts in order."""
    config = DiagonalWgradConfig.declare_knobs(w, k)
    shape, num_sums = config.shape, math.prod(w.argument_shapes[-1])

    def emit(arguments: dict[str, Buffer]) -> None:
        workspace = allocate("partial_sums", int(config.num_parts) * num_sums, ACCUMULATOR, "global")
        DiagonalWgradKernel(config, arguments, workspace).emit()

        def store_result(number: Expr, value: Expr) -> None:
            index = shape.array_index(number % w.C, shape.tap_from_index(number // w.C), 0)
            result = epilogue.apply_to_expression(
                w.epilogue, value, lambda name: arguments[name][index].astype(ACCUMULATOR)
            )
            T.buffer_store(arguments[w.RESULT], result.astype(w.argument_dtypes[-1]), [*index])

        emit_sum_of_parts(int(config.num_parts), num_sums, workspace, store_result)

    return build_schedule(w, emit)


class DiagonalWgradKernel:
    """Emitter of the first kernel, which stores sums (parts, taps, channels)."""

    def __init__(self, config: DiagonalWgradConfig, arguments: dict[str, Buffer], workspace: Buffer) -> None:
        self.config, self.shape, self.workspace = config, config.shape, workspace
        self.dy, self.x = (arguments[name] for name in config.w.OPERANDS)
        self.atom = MmaSyncAtom(config.w.dtype, config.w.dtype)
        self.pixel_bytes = int(config.pixel_chunks) * VECTOR_BYTES

    def emit(self) -> None:
        """Emit the kernel."""
        config = self.config
        blocks = int(config.octet_blocks) * int(config.filter_blocks)
        with (
            block_axes(int(config.num_parts), blocks) as (part, block),
            thread_axis(config.num_threads, "threadIdx.x") as thread,
        ):
            allow_dependent_launch()
            self.smem = allocate_smem(int(config.smem_bytes))
            self.position, self.part = ThreadPosition(thread), part
            warp = self.position.warp
            self.octet, self.tap_warp = warp % config.octets, warp // config.octets % config.warps_taps
            self.pixel_warp = warp // (config.octets * config.warps_taps)
            filter_block, self.first_octet = block % config.filter_blocks, block // config.filter_blocks * config.octets
            self.filter_plane = filter_block // config.row_blocks
            self.filter_row = filter_block % config.row_blocks * config.filter_rows
            self.accumulators = allocate("accumulators", config.num_accumulators, ACCUMULATOR)
            fill_zeros(self.accumulators, config.num_accumulators)
            self.locate_lane()
            pipeline = CpAsyncPipeline(config.stages)
            pipeline.fill(config.iterations, self.copy)
            pipeline.run(config.iterations, self.copy, self.multiply, self.is_valid)
            pipeline.drain()
            self.store_sums()

    def is_valid(self, iteration: Expr) -> Expr:
        """Return whether the CTA has a tile of pixels."""
        config = self.config
        return is_below(self.part * config.iterations + iteration, config.num_tiles, config.iterations)

    def locate_lane(self) -> None:
        """Compute the places of the rows of the lane's matrices in a stage, and allocate fragments.

        Of the matrices of X, odd ones have the second tap of a pair, and the last two the last eight pixels. Of the
        matrices of dY, odd ones have the last eight pixels, and the last two the next rows of dY.
        """
        config, shape, lane = self.config, self.shape, self.position.lane
        _, stride_y, stride_x = shape.strides
        first, second, pixel = lane // 8 % 2, lane // 16, lane % 8
        is_row = config.mma_rows == 2  # the last eight pixels are a row of their own
        row = second * stride_y if is_row else 0
        row = row + self.tap_warp * (config.taps_y * shape.dilations[1])
        column = (pixel if is_row else pixel + second * 8) * stride_x
        input_pixel = row * config.window_columns + column
        place = to_uint32(input_pixel * self.pixel_bytes + self.octet * VECTOR_BYTES)
        self.single_input = Register("single_input", "uint32", place).value
        step = to_uint32(first * (shape.dilations[2] * self.pixel_bytes))
        self.paired_input = Register("paired_input", "uint32", self.single_input + step).value
        row, column = (first, pixel) if is_row else (0, pixel + first * 8)
        gradient_pixel = config.input_pixels + (row + second * config.mma_rows) * config.pixels_x + column
        place = to_uint32(gradient_pixel * self.pixel_bytes + self.octet * VECTOR_BYTES)
        self.gradient_place = Register("gradient_place", "uint32", place).value
        self.gradient = allocate("gradient", int(config.row_units) * self.atom.b_registers, "uint32")

    def copy(self, iteration: Expr, stage: Expr) -> None:
        """Start the copies of a tile of dY and of the window of X below it, with zeros outside of the images."""
        config, shape = self.config, self.shape
        tile = self.part * config.iterations + iteration
        with if_(self.is_valid(iteration)):
            first_strip = Register("first_strip", value=tile // config.tiles_x * config.strips).value
            column = Register("column", value=tile % config.tiles_x * config.pixels_x).value
            address = Register("copy_address", "uint32", self.smem + to_uint32(stage * config.stage_bytes)).value
            window_row = self.filter_row * shape.dilations[1] - shape.pad_low[1]
            window_plane = self.filter_plane * shape.dilations[0] - shape.pad_low[0]

            def locate_input(number: Expr) -> tuple[Expr, Expr, Expr]:
                strip, row = number // config.window_rows, number % config.window_rows
                image, plane, first_row = self.locate_strip(first_strip + strip)
                place = plane * shape.strides[0] + window_plane, first_row * shape.strides[1] + window_row + row
                return image, *place

            def locate_gradient(number: Expr) -> tuple[Expr, Expr, Expr]:
                strip, row = number // config.strip_rows, number % config.strip_rows
                image, plane, first_row = self.locate_strip(first_strip + strip)
                return image, plane, first_row + row

            num_rows, columns = int(config.strips * config.window_rows), int(config.window_columns)
            first_column = column * shape.strides[2] - shape.pad_low[2]
            self.copy_rows(self.x, shape.input_size, num_rows, columns, first_column, address, locate_input)
            address = address + to_uint32(int(config.input_pixels) * self.pixel_bytes)
            num_rows, columns = int(config.strips * config.strip_rows), int(config.pixels_x)
            self.copy_rows(self.dy, shape.output_size, num_rows, columns, column, address, locate_gradient)

    def locate_strip(self, strip: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the image, the plane and the first row of a strip of dY; the image of a strip too many is too high."""
        image_plane, planes = strip // self.config.tiles_y, self.shape.output_size[0]
        return image_plane // planes, image_plane % planes, strip % self.config.tiles_y * self.config.strip_rows

    def copy_rows(
        self,
        array: Buffer,
        size: Sequence[int],
        num_rows: int,
        num_columns: int,
        first_column: Expr,
        address: Expr,
        locate: Callable[[Expr], tuple[Expr, Expr, Expr]],
    ) -> None:
        """Start the copies of rows, each by the lanes of a warp.

        `locate` is a function from the number of a row to its image, plane and row.
        """
        config, w = self.config, self.config.w
        (planes, height, width), octets = size, int(config.octets)
        with items_loop(num_rows, self.position.warp, int(config.num_warps)) as number:
            image, plane, row = locate(number)
            is_inside = logical_and(image < w.N, row >= 0, row < height, plane >= 0, plane < planes)
            is_inside = Register("is_row_inside", "bool", is_inside).value
            first = Register("row_index", value=((image * planes + plane) * height + row) * width + first_column).value
            row_place = to_uint32(number * num_columns * self.pixel_bytes)
            row_address = Register("row_address", "uint32", address + row_place)
            with items_loop(num_columns * octets, self.position.lane, WARP_SIZE, is_unrolled=True) as chunk:
                column, octet = chunk // octets, chunk % octets
                x, channel_octet = first_column + column, self.first_octet + octet
                has_channels = is_below(channel_octet, config.num_octets, octets)
                is_copied = logical_and(is_inside, x >= 0, x < width, has_channels)
                index = T.Select(is_copied, (first + column) * w.C + channel_octet * OCTET, 0)
                destination = row_address.value + to_uint32(column * self.pixel_bytes + octet * VECTOR_BYTES)
                cp_async(destination, array, index, VECTOR_BYTES, is_copied)

    def multiply(self, stage: Expr) -> None:
        """Multiply the warp's columns of the strips of a tile."""
        config = self.config
        columns = int(config.pixels_x) // int(config.mma_columns)
        stage_address = self.smem + to_uint32(stage * config.stage_bytes)
        with items_loop(int(config.items_per_tile), self.pixel_warp, int(config.warps_pixels)) as item:
            strip, column = item // columns, item % columns * config.mma_columns
            row, first = strip * config.window_rows, column * self.shape.strides[2]
            place = (row * config.window_columns + first) * self.pixel_bytes
            inputs = Register("inputs", "uint32", stage_address + to_uint32(place)).value
            place = (strip * config.strip_rows * config.pixels_x + column) * self.pixel_bytes
            gradient = stage_address + to_uint32(place) + self.gradient_place
            self.load_gradient(Register("gradient_address", "uint32", gradient).value)
            self.multiply_strip(inputs)

    def load_gradient(self, address: Expr) -> None:
        """Load the fragments of dY of all rows of a strip, two at a time."""
        config, size = self.config, self.atom.b_registers
        row_bytes = int(config.mma_rows) * int(config.pixels_x) * self.pixel_bytes
        for unit in range(0, int(config.row_units), 2):
            registers = [self.gradient[unit * size + e] for e in range(2 * size)]
            ldmatrix_x4(registers, address + to_uint32(unit * row_bytes), transposed=True)

    def multiply_strip(self, address: Expr) -> None:
        """Multiply each fragment of X by the fragments of dY that reach it by a tap."""
        config, shape = self.config, self.shape
        row_taps: dict[int, list[tuple[int, int]]] = defaultdict(list)  # unit of rows and tap, by row of X
        for unit in range(int(config.row_units)):
            for tap in range(int(config.taps_y)):
                row = unit * int(config.mma_rows) * shape.strides[1] + tap * shape.dilations[1]
                row_taps[row].append((unit, tap))
        a_fragment = allocate("a_fragment", self.atom.a_registers, "uint32")
        a_registers = [a_fragment[e] for e in range(self.atom.a_registers)]
        size, count = self.atom.b_registers, self.atom.num_accumulators
        for row, products in sorted(row_taps.items()):
            for pair in range(config.column_pairs):
                has_both = 2 * pair + 1 < shape.kernel_size[2]
                pixel = row * int(config.window_columns) + 2 * pair * shape.dilations[2]
                place = self.paired_input if has_both else self.single_input
                ldmatrix_x4(a_registers, address + place + to_uint32(pixel * self.pixel_bytes), transposed=True)
                for unit, tap in products:
                    first = (tap * config.column_pairs + pair) * count
                    sums = [self.accumulators[first + e] for e in range(count)]
                    self.atom.emit(sums, a_registers, [self.gradient[unit * size + e] for e in range(size)])

    def store_sums(self) -> None:
        """Add the diagonals of the warps in shared memory in order, and store them to the workspace."""
        config, shape, lane = self.config, self.shape, self.position.lane
        channels, columns = int(config.octets) * OCTET, 2 * config.column_pairs
        filter_rows, num_columns = int(config.filter_rows), shape.kernel_size[2]
        value = allocate("diagonal", 1, "uint32")
        # Registers 0 and 1 have columns 2 (lane % 4) and the next one of row lane / 4, registers 2 and 3 of row + 8.
        channel = self.octet * OCTET + lane // 4
        first = (self.pixel_warp * filter_rows + self.tap_warp * config.taps_y) * (columns * channels) + channel
        address = Register("sum_address", "uint32", self.smem + to_uint32(first * 4)).value
        with if_(lane // 8 == lane % 4):
            for tap in range(int(config.taps_y)):
                for column in range(num_columns):
                    number = (tap * config.column_pairs + column // 2) * 4 + column % 2 * 2
                    pair = self.accumulators[number], self.accumulators[number + 1]
                    diagonal = T.Select(lane // 4 % 2 == 0, *pair)
                    store(value, 0, T.reinterpret("uint32", diagonal))
                    offset = (tap * columns + column) * (channels * 4)
                    emit_ptx("st.shared.b32", address + to_uint32(offset), value[0])
        emit_ptx("bar.sync", T.uint32(0))
        total = allocate("total", 1, ACCUMULATOR)
        with items_loop(filter_rows * num_columns * channels, self.position.thread, int(config.num_threads)) as item:
            channel, column = item % channels, item // channels % num_columns
            row = item // (channels * num_columns)
            exists = [is_below(self.filter_row + row, shape.kernel_size[1], filter_rows)]
            exists.append(is_below(self.first_octet * OCTET + channel, config.w.C, channels))
            with if_(logical_and(*exists)):
                store(total, 0, T.float32(0))
                with serial_loop(int(config.warps_pixels), "pixel_warp") as warp:
                    element = ((warp * filter_rows + row) * columns + column) * channels + channel
                    load_shared(value, self.smem + to_uint32(element * 4), 4)
                    store(total, 0, total[0] + T.reinterpret(ACCUMULATOR, value[0]))
                tap = shape.tap_index((self.filter_plane, self.filter_row + row, column))
                index = (self.part * shape.num_taps + tap) * config.w.C + self.first_octet * OCTET + channel
                store(self.workspace, index, total[0])
