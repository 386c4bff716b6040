"""Gradients of the weights of depthwise convolutions as products of band matrices, by mma.sync.

For a channel and a row of the filter, the products of eight columns of dY with the columns of X that they reach form a
matrix D[column of X, column of dY], whose reduction runs over rows of the images. The gradient at a tap is the sum of a
diagonal of D: the columns of X at this tap's distance from those of dY. The other elements of D are not used. An
mma.sync takes as long for all of them as the FMA units take for a few.

A CTA copies a tile of dY and the window of X below it to shared memory. A lane loads octets of channels, so that two
neighbouring rows have the elements of a fragment, which it packs for each channel. Of the 16 rows of a tile it has four
neighbouring ones, and so all rows of X that its taps need. A swizzle keeps the loads free of bank conflicts.

A warp keeps D for an octet of channels and some rows of the filter over all tiles of the CTA's part of the pixels. It
then adds up the diagonals. A second kernel adds the parts in order, so that each run returns the same bits.

Source: PTX ISA, "mma.sync" and "cp.async".
"""

from __future__ import annotations

import math
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
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    is_below,
    items_loop,
    load_shared,
    logical_and,
    store,
    thread_axis,
    to_uint32,
    unrolled_loop,
)
from ...gradient_operators import WGRAD
from ...nhwc_direct.sum_of_parts import emit_sum_of_parts
from ...nhwc_direct.wgrad_config import list_positions
from ..gemm.atoms import MmaSyncAtom, ThreadPosition
from ..gemm.cp_async import cp_async
from ..gemm.cta import allocate_smem, allow_dependent_launch
from ..gemm.pipelines import CpAsyncPipeline
from ..implicit_gemm_shape import VECTOR_BYTES
from .wgrad_config import (
    MMA_COLUMNS,
    MMA_M,
    MMA_ROWS,
    OCTET,
    QUAD,
    DepthwiseWgradConfig,
    can_multiply_bands,
    may_beat_fma_units,
)

WORDS = VECTOR_BYTES // 4  # registers of an octet of channels


@schedule(
    *WGRAD,
    dtypes=("float16", "bfloat16"),
    usage=DepthwiseWgradConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, can_multiply_bands),
    search_if=may_beat_fma_units,
    starting_configs=DepthwiseWgradConfig.list_starting_configs,
    supersedes=("implicit_gemm",),
    device_kinds=("cuda",),
    min_arch=80,
)
def depthwise_mma_sync(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Multiply columns of X and dY for each channel, add up diagonals, and add parts in order."""
    config = DepthwiseWgradConfig.declare_knobs(w, k)
    shape, num_sums = config.shape, math.prod(w.argument_shapes[-1])

    def emit(arguments: dict[str, Buffer]) -> None:
        workspace = allocate("partial_sums", int(config.num_parts) * num_sums, ACCUMULATOR, "global")
        DepthwiseWgradKernel(config, arguments, workspace).emit()

        def store_result(number: Expr, value: Expr) -> None:
            index = shape.array_index(number % w.C, shape.tap_from_index(number // w.C), 0)
            result = epilogue.apply_to_expression(
                w.epilogue, value, lambda name: arguments[name][index].astype(ACCUMULATOR)
            )
            T.buffer_store(arguments[w.RESULT], result.astype(w.argument_dtypes[-1]), [*index])

        emit_sum_of_parts(int(config.num_parts), num_sums, workspace, store_result)

    return build_schedule(w, emit)


class DepthwiseWgradKernel:
    """Emitter of the first kernel, which stores sums (parts, taps, channels)."""

    def __init__(self, config: DepthwiseWgradConfig, arguments: dict[str, Buffer], workspace: Buffer) -> None:
        self.config, self.shape, self.workspace = config, config.shape, workspace
        self.dy, self.x = (arguments[name] for name in config.w.OPERANDS)
        self.atom = MmaSyncAtom(config.w.dtype, config.w.dtype)
        # Rows of X from the lane's first one on, and the two rows of X or dY whose elements a register has.
        strides, dilations = self.shape.strides, self.shape.dilations
        self.row_offsets = list_positions(QUAD, config.taps_y, strides[1], dilations[1])
        self.row_pairs = [
            [tuple(self.row_offsets.index((j + i) * strides[1] + tap * dilations[1]) for i in (0, 1)) for j in (0, 2)]
            for tap in range(config.taps_y)
        ]

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
            self.lane_column, self.lane_quad = self.position.lane // 4, self.position.lane % 4
            self.octet, self.tap_warp = self.position.warp % config.octets, self.position.warp // config.octets
            filter_block, self.first_octet = block % config.filter_blocks, block // config.filter_blocks * config.octets
            self.filter_plane = filter_block // config.row_blocks
            self.filter_row = filter_block % config.row_blocks * config.filter_rows
            self.accumulators = allocate("accumulators", config.num_accumulators, ACCUMULATOR)
            fill_zeros(self.accumulators, config.num_accumulators)
            self.locate_lane()
            pipeline = CpAsyncPipeline(config.stages)
            pipeline.fill(config.iterations, self.copy)
            pipeline.run(config.iterations, self.copy, self.multiply, self.is_valid)
            self.store_sums()

    def is_valid(self, iteration: Expr) -> Expr:
        """Return whether the CTA has a tile of pixels."""
        config = self.config
        return is_below(self.part * config.iterations + iteration, config.num_tiles, config.iterations)

    def locate_lane(self) -> None:
        """Compute the addresses of the lane's rows in a stage, and allocate its fragments."""
        config = self.config
        _, stride, _ = self.shape.strides
        strip, quad = self.lane_quad * QUAD // config.strip_rows, self.lane_quad * QUAD % config.strip_rows
        first = quad * stride + self.tap_warp * config.taps_y * self.shape.dilations[1]
        self.input_rows = allocate("input_row", len(self.row_offsets), "uint32")
        for i, offset in enumerate(self.row_offsets):
            row = first + offset
            chunk = self.swizzle(self.lane_column, self.octet, self.input_quad(strip, row))
            pitch = config.window_columns * config.octets
            store(self.input_rows, i, to_uint32(((strip * config.window_rows + row) * pitch + chunk) * VECTOR_BYTES))
        chunk = self.lane_quad * (QUAD * config.pixels_x * config.octets)
        chunk = config.input_chunks + chunk + self.swizzle(self.lane_column, self.octet, self.lane_quad)
        self.gradient_row = Register("gradient_row", "uint32", to_uint32(chunk * VECTOR_BYTES)).value
        self.inputs = allocate("inputs", 2 * len(self.row_offsets) * WORDS, "uint32")  # of columns of both parities
        self.gradient = allocate("gradient", QUAD * WORDS, "uint32")
        self.stage_address = Register("stage_address", "uint32")

    def input_quad(self, strip: Expr, row: Expr) -> Expr:
        """Return the number by which the chunks of a row of X are swizzled."""
        return strip * (self.config.strip_rows // QUAD) + row // (QUAD * self.shape.strides[1])

    def swizzle(self, column: Expr, octet: Expr, quad: Expr) -> Expr:
        """Return the chunk of an octet of a column within its row.

        Eight lanes load 16 bytes each at a time: two neighbouring columns of four quads of rows. Their chunks have
        different numbers modulo eight.
        """
        octets, chunk = self.config.octets, column * self.config.octets + octet
        if octets == 8:
            return chunk ^ (quad % 4 + column % 2 * 4)
        if octets == 4:
            return chunk ^ (quad % 4)
        if octets == 2:
            return chunk ^ (quad % 2 + quad // 2 % 2 * 4)
        return chunk ^ (quad % 4 * 2)

    def copy(self, iteration: Expr, stage: Expr) -> None:
        """Start the copies of a tile of dY and of the window of X below it, with zeros outside of the images."""
        config, shape = self.config, self.shape
        tile = self.part * config.iterations + iteration
        with if_(self.is_valid(iteration)):
            first_strip = Register("first_strip", value=tile // config.tiles_x * config.strips_per_tile).value
            column = Register("column", value=tile % config.tiles_x * config.pixels_x).value
            address = Register("copy_address", "uint32", self.smem + to_uint32(stage * config.stage_bytes)).value
            window_row = self.filter_row * shape.dilations[1] - shape.pad_low[1]
            window_plane = self.filter_plane * shape.dilations[0] - shape.pad_low[0]

            def locate_input(number: Expr) -> tuple[Expr, Expr, Expr, Expr]:
                strip, row = number // config.window_rows, number % config.window_rows
                image, plane, first_row = self.locate_strip(first_strip + strip)
                place = plane * shape.strides[0] + window_plane, first_row * shape.strides[1] + window_row + row
                return image, *place, self.input_quad(strip, row)

            def locate_gradient(number: Expr) -> tuple[Expr, Expr, Expr, Expr]:
                strip, row = number // config.strip_rows, number % config.strip_rows
                image, plane, first_row = self.locate_strip(first_strip + strip)
                return image, plane, first_row + row, number // QUAD

            num_rows, columns = int(config.strips_per_tile * config.window_rows), int(config.window_columns)
            first_column = column * shape.strides[2] - shape.pad_low[2]
            self.copy_rows(self.x, shape.input_size, num_rows, columns, first_column, address, locate_input)
            address = address + to_uint32(config.input_chunks * VECTOR_BYTES)
            columns = int(config.pixels_x)
            self.copy_rows(self.dy, shape.output_size, MMA_ROWS, columns, column, address, locate_gradient)

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
        locate: Callable[[Expr], tuple[Expr, Expr, Expr, Expr]],
    ) -> None:
        """Start the copies of rows, each by the lanes of a warp.

        `locate` is a function from the number of a row to its image, plane, row and number of the swizzle.
        """
        config, w = self.config, self.config.w
        (planes, height, width), octets = size, int(config.octets)
        with items_loop(num_rows, self.position.warp, int(config.num_warps)) as number:
            image, plane, row, quad = locate(number)
            is_inside = logical_and(image < w.N, row >= 0, row < height, plane >= 0, plane < planes)
            is_inside = Register("is_row_inside", "bool", is_inside).value
            first = Register("row_index", value=((image * planes + plane) * height + row) * width + first_column).value
            quad = Register("swizzle", value=quad).value
            row_address = Register("row_address", "uint32", address + to_uint32(number * (num_columns * octets * 16)))
            with items_loop(num_columns * octets, self.position.lane, WARP_SIZE, is_unrolled=True) as chunk:
                column, octet = chunk // octets, chunk % octets
                x, channel_octet = first_column + column, self.first_octet + octet
                has_channels = is_below(channel_octet, config.num_octets, octets)
                is_copied = logical_and(is_inside, x >= 0, x < width, has_channels)
                index = T.Select(is_copied, (first + column) * w.C + channel_octet * OCTET, 0)
                destination = row_address.value + to_uint32(self.swizzle(column, octet, quad) * VECTOR_BYTES)
                cp_async(destination, array, index, VECTOR_BYTES, is_copied)

    def multiply(self, stage: Expr) -> None:
        """Multiply the columns of a tile, eight of dY at a time."""
        config = self.config
        self.stage_address.set(self.smem + to_uint32(stage * config.stage_bytes))
        loaded: dict[int, int] = {}  # columns of X in registers, in units of eight, by parity
        for product in range(int(config.pixels_x) // MMA_COLUMNS):
            self.load_gradient(product)
            for mma_m in range(config.mmas_m):
                for half in (2 * mma_m, 2 * mma_m + 1):
                    columns = product * self.shape.strides[2] + half
                    if loaded.get(columns % 2) != columns:
                        self.load_inputs(columns)
                        loaded[columns % 2] = columns
                self.multiply_octet(mma_m, (product * self.shape.strides[2]) % 2)

    def load_gradient(self, product: int) -> None:
        """Load the lane's column of dY from its four rows."""
        octets, pixels_x = int(self.config.octets), int(self.config.pixels_x)
        for row in range(QUAD):
            offset = (row * pixels_x + product * MMA_COLUMNS) * octets * VECTOR_BYTES
            self._load(self.gradient, row * WORDS, self.gradient_row + to_uint32(offset))

    def load_inputs(self, columns: int) -> None:
        """Load the lane's column of X, of some eight, from all of its rows."""
        for i in range(len(self.row_offsets)):
            address = self.input_rows[i] + to_uint32(columns * OCTET * int(self.config.octets) * VECTOR_BYTES)
            self._load(self.inputs, (columns % 2 * len(self.row_offsets) + i) * WORDS, address)

    def _load(self, registers: Buffer, first: int, address: Expr) -> None:
        destinations = [registers[first + e] for e in range(WORDS)]
        emit_ptx("ld.shared.v4.b32", *destinations, self.stage_address.value + address)

    def multiply_octet(self, mma_m: int, first_parity: int) -> None:
        """Multiply 16 columns of X by eight of dY, for each channel of the octet and each row of the filter."""
        config, num_rows = self.config, len(self.row_offsets)
        b_fragment = allocate("b_fragment", self.atom.b_registers, "uint32")
        a_fragment = allocate("a_fragment", self.atom.a_registers, "uint32")
        for channel in range(OCTET):
            for e in range(self.atom.b_registers):
                store(b_fragment, e, self._pack(self.gradient, 2 * e, 2 * e + 1, channel))
            for tap in range(config.taps_y):
                # Registers 0 and 1 have the first and the last eight columns of the first rows, 2 and 3 those of the
                # others.
                for e in range(self.atom.a_registers):
                    first = (first_parity + e) % 2 * num_rows
                    lower, upper = self.row_pairs[tap][e // 2]
                    store(a_fragment, e, self._pack(self.inputs, first + lower, first + upper, channel))
                number = ((tap * OCTET + channel) * config.mmas_m + mma_m) * self.atom.num_accumulators
                sums = [self.accumulators[number + e] for e in range(self.atom.num_accumulators)]
                fragments = [
                    [fragment[e] for e in range(size)]
                    for fragment, size in ((a_fragment, self.atom.a_registers), (b_fragment, self.atom.b_registers))
                ]
                self.atom.emit(sums, *fragments)

    def _pack(self, registers: Buffer, lower: int, upper: int, channel: int) -> Expr:
        """Return a register with the elements of a channel from two octets."""
        word, is_odd = channel // 2, channel % 2
        low, high = registers[lower * WORDS + word], registers[upper * WORDS + word]
        if is_odd:
            return T.shift_right(low, T.uint32(16)) | (high & T.uint32(0xFFFF0000))
        return (low & T.uint32(0xFFFF)) | T.shift_left(high, T.uint32(16))

    def store_sums(self) -> None:
        """Add up the diagonals in shared memory, and store them to the workspace."""
        config, shape, lane = self.config, self.shape, self.position.lane
        band, words = allocate("band", 1, "uint32"), int(config.band_words)
        base = Register("band_address", "uint32", self.smem + to_uint32(self.position.warp * (OCTET * words * 4))).value
        num_columns = shape.kernel_size[2]
        total = allocate("total", 1, ACCUMULATOR)
        for tap_row in range(config.taps_y):
            self._store_band(tap_row, base)
            emit_call(T.cuda.warp_sync())
            row = self.filter_row + self.tap_warp * config.taps_y + tap_row
            octet = self.first_octet + self.octet
            exists = [row < shape.kernel_size[1]] * (shape.kernel_size[1] % config.filter_rows > 0)
            exists.append(is_below(octet, config.num_octets, config.octets))
            with items_loop(num_columns * OCTET, lane, WARP_SIZE) as item, if_(logical_and(*exists)):
                channel, tap = item % OCTET, item // OCTET
                store(total, 0, T.float32(0))
                for column in range(MMA_COLUMNS):
                    element = channel * words + column * (shape.strides[2] * MMA_COLUMNS + 1)
                    element = element + tap * (shape.dilations[2] * MMA_COLUMNS)
                    load_shared(band, base + to_uint32(element * 4), 4)
                    store(total, 0, total[0] + T.reinterpret(ACCUMULATOR, band[0]))
                tap_index = shape.tap_index((self.filter_plane, row, tap))
                index = (self.part * shape.num_taps + tap_index) * config.w.C + octet * OCTET + channel
                store(self.workspace, index, total[0])
            emit_call(T.cuda.warp_sync())

    def _store_band(self, tap_row: int, base: Expr) -> None:
        """Store the matrices (column of X, column of dY) of a row of the filter to shared memory, a pair at a time."""
        config, words = self.config, int(self.config.band_words)
        with unrolled_loop(OCTET, "channel") as channel, unrolled_loop(config.mmas_m, "i") as mma_m:
            for half in (0, 1):
                column = mma_m * MMA_M + half * OCTET + self.lane_column
                element = channel * words + column * MMA_COLUMNS + self.lane_quad * 2
                number = ((tap_row * OCTET + channel) * config.mmas_m + mma_m) * self.atom.num_accumulators
                values = [T.reinterpret("uint32", self.accumulators[number + 2 * half + e]) for e in (0, 1)]
                emit_ptx("st.shared.v2.b32", base + to_uint32(element * 4), *values)
