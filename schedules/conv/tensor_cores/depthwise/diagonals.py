"""Kernel of depthwise convolutions as products of octets of channels with diagonal matrices, by mma.sync.

The rows of a product are 16 pixels of a row, or eight of two, its columns eight channels, and its reduction runs over
the same eight channels at two taps. The second operand has the filters of a tap on its diagonal: seven eighths of the
products are with zeros, for which mma.sync still takes less time than the FMA units. A row of an 8 × 8 matrix of
ldmatrix is the octet of a pixel, so that a tap is only another address, and no element is packed or converted.

A warp of a persistent CTA copies windows of X by TMA, with zeros outside of the image, while the others multiply those
before. A swizzle as wide as the channels of a pixel, or an odd number of octets, keeps ldmatrix free of bank conflicts.
A warp has an octet, whose taps stay in its registers, and walks down the rows of a window: it loads each row once for
all output rows in reach. In a gradient with a stride, the residue classes of outputs share the fragments of dY, and
each has its own taps, so that no product has a zero that the stride inserts. The results of a tile go to shared memory,
from where TMA stores whole lines, and only what is inside of the image.

An element of X that is infinite or NaN makes the results of its octet NaN that the filter reaches, because zeros of the
diagonal matrices are multiplied by it.

Sources: PTX ISA, "mma.sync", "ldmatrix" and "cp.async.bulk.tensor".
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....primitives import disable_buffer_reuse
from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    build_schedule,
    declare_tensor_map,
    if_,
    is_below,
    items_loop,
    logical_and,
    serial_loop,
    store,
    store_shared,
    to_uint32,
)
from ...gradient_operators import assign_roles
from ..gemm.atoms import MmaSyncAtom, ldmatrix_x2, ldmatrix_x4, named_barrier_sync
from ..gemm.cta import Cta, allocate_smem, open_cta
from ..gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..gemm.pipelines import PipelineState, TmaPipeline
from ..gemm.prologue import emit_prologue
from ..gemm.tma import TmaCopy, tma_store, tma_store_fence, tma_store_wait
from .diagonal_config import ELEMENT_BYTES, REGISTERS_PER_MMA, DiagonalConfig
from .octets import OCTET, STAGE_ALIGNMENT_BYTES, get_swizzle_bytes, locate_octet

COMPUTE_BARRIER = 1  # named barrier of the warps that multiply


@dataclass(frozen=True)
class OutputTile:
    """A tile of output pixels, by its index in all tiles and its place."""

    index: Expr
    image: Expr
    row: Expr  # first output row
    column: Expr  # first output column


@dataclass(frozen=True)
class RowTap:
    """A row of the filter, the class of output rows that it connects with inputs, and the first of these."""

    filter_row: int
    row_class: int
    line: int  # row of the window that the first step of a tile reads


@dataclass(frozen=True)
class Product:
    """An instruction mma.sync of a row of the filter: a class of output columns, and one or two of its taps."""

    column_class: int
    filter_columns: tuple[int, ...]
    shifts: tuple[int, ...]  # of the taps, as positions among all shifts


def build_diagonal_schedule(w: ConvOperator, config: DiagonalConfig) -> Schedule:
    """Return the schedule of a convolution, or of the gradient whose view the config has."""

    def emit(arguments: dict[str, Buffer]) -> None:
        named = assign_roles(w, arguments) if isinstance(w, InputGradient) else arguments
        emit_diagonals(config, named, EpilogueOps.from_workload(w))

    built = build_schedule(w, emit)
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built


def emit_diagonals(config: DiagonalConfig, arguments: dict[str, Buffer], ops: EpilogueOps) -> None:
    """Emit the kernel of arguments X, K and Y, and those of the epilogue."""
    shape = config.shape
    window_box = int(config.window_columns), int(config.window_rows)
    input_map = declare_tensor_map("X_map", arguments["X"], make_pixels_map(config, shape.input_size, window_box))
    result_box = int(config.result_columns), int(config.result_rows)
    output_map = declare_tensor_map("Y_map", arguments["Y"], make_pixels_map(config, shape.output_size, result_box))
    compute_threads, stages = int(config.compute_warps) * WARP_SIZE, int(config.stages)
    with open_cta(int(config.num_blocks), int(config.num_threads), 1, splits_in_cluster=False) as cta:
        smem = allocate_smem(int(config.smem_bytes), STAGE_ALIGNMENT_BYTES)
        barriers = smem + to_uint32(int(config.barrier_offset_bytes))
        sizes = int(config.stage_pitch), barriers, stages, int(config.window_bytes)
        pipeline = TmaPipeline(smem, *sizes, num_consumers=int(config.compute_warps))
        emit_prologue(cta.thread, [pipeline], [input_map, output_map], first_loader=compute_threads)
        results = smem + to_uint32(int(config.result_offset_bytes))
        kernel = DiagonalKernel(config, arguments, ops, cta, pipeline, results)
        with if_(cta.thread.thread < compute_threads):
            kernel.compute(output_map)
        with cta.thread.elect_in_warp(compute_threads // WARP_SIZE):
            kernel.load_windows(input_map)


def make_pixels_map(config: DiagonalConfig, size: tuple[int, ...], box: tuple[int, int]) -> maps.TensorMap:
    """Return the tensor map of X or Y: channels, columns, rows and images; `box` has columns and rows."""
    w, (_, height, width) = config.w, size
    extents, strides = (w.C, width, height, w.N), (w.C, width * w.C, height * width * w.C)
    whole_box = int(config.channels), *box, 1
    swizzle = get_swizzle_bytes(int(config.octets))
    return maps.make_tiled_map(w.storage, ELEMENT_BYTES, extents, strides, whole_box, swizzle)


class DiagonalKernel:
    """What the warps of a CTA share, whatever their roles."""

    def __init__(
        self,
        config: DiagonalConfig,
        arguments: dict[str, Buffer],
        ops: EpilogueOps,
        cta: Cta,
        pipeline: TmaPipeline,
        results: Expr,
    ) -> None:
        self.config, self.shape, self.arguments, self.cta = config, config.shape, arguments, cta
        self.pipeline, self.results = pipeline, results
        self.ops = ops.bind_tensor_args(arguments, uses_registers=True)
        storage = config.w.storage
        self.atom = MmaSyncAtom(storage, storage)
        self.state = PipelineState("window", int(config.stages))
        self.octets = int(config.octets)
        self.first_channel = cta.index % int(config.channel_blocks) * int(config.channels)
        self.shifts = self.shape.list_input_offsets(2, self.shape.upsampling[2])

    def locate(self, tile_round: Expr) -> OutputTile:
        """Return the CTA's tile in a round."""
        config = self.config
        tiles_y, tiles_x = int(config.tiles_y), int(config.tiles_x)
        index = self.cta.index // int(config.channel_blocks) + tile_round * int(config.ctas_per_block)
        row, column = index // tiles_x % tiles_y * int(config.result_rows), index % tiles_x * int(config.result_columns)
        return OutputTile(index, index // (tiles_x * tiles_y), row, column)

    def list_row_taps(self) -> list[RowTap]:
        """Return the rows of the filter with the classes of output rows, each of which has some of them."""
        shape = self.shape
        taps = itertools.product(range(shape.upsampling[1]), range(shape.kernel_size[1]))
        lines = ((tap, row_class, shape.input_offset(1, row_class, tap)) for row_class, tap in taps)
        return [RowTap(tap, row_class, line) for tap, row_class, line in lines if line is not None]

    def list_products(self) -> list[Product]:
        """Return the products of a row of the filter: pairs of taps of a class of output columns, or the last one."""
        shape, products = self.shape, []
        for column_class in range(shape.upsampling[2]):
            offsets = [(tap, shape.input_offset(2, column_class, tap)) for tap in range(shape.kernel_size[2])]
            taps = [(tap, self.shifts.index(offset)) for tap, offset in offsets if offset is not None]
            for first in range(0, len(taps), 2):
                filter_columns, shifts = zip(*taps[first : first + 2], strict=True)
                products.append(Product(column_class, filter_columns, shifts))
        return products

    def load_windows(self, input_map: Expr) -> None:
        """Load the windows of all tiles; run by one thread."""
        shape, config, pipeline, state = self.shape, self.config, self.pipeline, self.state
        with serial_loop(int(config.tiles_per_cta), "round") as tile_round:
            tile = self.locate(tile_round)
            with if_(tile.index < int(config.pixel_tiles)):
                pipeline.producer_acquire(state.index, state.phase)
                row, column = shape.first_input(1, tile.row), shape.first_input(2, tile.column)
                copy = TmaCopy(input_map, pipeline.full_barrier(state.index))
                copy.issue(pipeline.stage_address(state.index), (self.first_channel, column, row, tile.image))
                state.advance()

    def compute(self, output_map: Expr) -> None:
        """Multiply all tiles and store their results; run by all threads but those of the last warp."""
        config, position = self.config, self.cta.thread
        compute_threads = int(config.compute_warps) * WARP_SIZE
        octet = Register("octet", value=position.warp % self.octets).value
        self.locate_lane(octet)
        self.taps = self.load_taps(self.first_channel + octet * OCTET)
        with serial_loop(int(config.tiles_per_cta), "round") as tile_round:
            tile = self.locate(tile_round)
            with if_(tile.index < int(config.pixel_tiles)):
                with if_(position.thread == 0):
                    tma_store_wait(0)
                named_barrier_sync(COMPUTE_BARRIER, compute_threads)  # the results of the tile before are stored
                self.pipeline.consumer_wait(self.state.index, self.state.phase)
                window = Register("window", "uint32", self.pipeline.stage_address(self.state.index)).value
                first_item = position.warp // self.octets
                with items_loop(int(config.items_per_tile), first_item, int(config.warps)) as item:
                    self.multiply(tile, item * int(config.mma_columns), window)
                self.pipeline.warp_release(self.state.index, position)
                self.state.advance()
                tma_store_fence()
                named_barrier_sync(COMPUTE_BARRIER, compute_threads)
                with if_(position.thread == 0):
                    tma_store(output_map, (self.first_channel, tile.column, tile.row, tile.image), self.results)
        with if_(position.thread == 0):
            tma_store_wait(0)

    def locate_lane(self, octet: Expr) -> None:
        """Compute the places of the rows of the lane's matrices in a window, and of its results.

        Of the four matrices of a load, odd ones have the last eight pixels, and the last two have the second shift.
        """
        config, lane = self.config, self.cta.thread.lane
        (row_step, column_step), (_, up_y, up_x) = config.input_steps, self.shape.upsampling
        has_two_rows = int(config.mma_rows) == 2
        half_inputs = row_step * int(config.window_columns) if has_two_rows else column_step * OCTET
        half_results = up_y * int(config.result_columns) if has_two_rows else up_x * OCTET
        pixel = lane % OCTET * column_step + lane // OCTET % 2 * half_inputs
        self.places = allocate("place", config.shift_pairs, "uint32")
        for pair in range(config.shift_pairs):
            first, *others = self.shifts[2 * pair : 2 * pair + 2]
            shift = T.Select(lane // (2 * OCTET) == 0, first, others[0]) if others else first
            store(self.places, pair, locate_octet(self.octets, octet, pixel + shift))
        word = to_uint32(lane % 4 * (2 * ELEMENT_BYTES))
        self.result_places = [
            [
                Register(
                    "result_place",
                    "uint32",
                    self.results
                    + locate_octet(self.octets, octet, lane // 4 * up_x + column_class + half * half_results)
                    + word,
                ).value
                for column_class in range(up_x)
            ]
            for half in range(2)
        ]
        self.lane_channel = Register("lane_channel", value=self.first_channel + octet * OCTET + lane % 4 * 2).value

    def load_taps(self, channel: Expr) -> Buffer:
        """Load the taps of the lane's channel as elements of diagonal matrices: a register for each tap.

        A lane has rows 2 (lane % 4) and the next one of column lane / 4, of which one may be on the diagonal.
        """
        shape, lane, filters = self.shape, self.cta.thread.lane, self.arguments["K"]
        taps = allocate("taps", shape.num_taps, "uint32")
        own = channel + lane // 4
        if int(self.config.channel_blocks * self.config.channels) > self.config.w.C:  # octets that do not exist
            own = T.min(own, self.config.w.C - 1)
        own = Register("tap_channel", value=own).value
        is_diagonal = Register("is_diagonal", value=T.Select(lane // 8 == lane % 4, 1, 0)).value
        shift = Register("tap_shift", "uint32", to_uint32(lane // 4 % 2 * 16)).value
        for tap in range(shape.num_taps):
            value = filters[shape.weight_index(own, shape.weight_tap(tap), 0)]
            bits = T.Cast("uint32", T.reinterpret("uint16", value))
            store(taps, tap, T.Select(is_diagonal == 1, T.shift_left(bits, shift), T.uint32(0)))
        return taps

    def multiply(self, tile: OutputTile, column: Expr, window: Expr) -> None:
        """Add each row of the window to the outputs in reach of a filter row, and store those that are complete."""
        config, row_taps, products = self.config, self.list_row_taps(), self.list_products()
        units, unit_lines = range(int(config.row_units)), int(config.mma_rows) * config.input_steps[0]
        users: dict[int, list[tuple[int, RowTap]]] = defaultdict(list)  # products along the rows, by row of the window
        for unit, tap in itertools.product(units, row_taps):
            users[unit * unit_lines + tap.line].append((unit, tap))
        row_classes = range(self.shape.upsampling[1])
        lines_of_class = [[tap.line for tap in row_taps if tap.row_class == each] for each in row_classes]
        lines = sorted(users)
        first_pixel = to_uint32(column * (config.input_steps[1] * int(config.pixel_bytes)))
        first = Register("first_pixel", "uint32", window + first_pixel).value
        fragments = [allocate("fragment", self.atom.a_registers * config.shift_pairs, "uint32") for _ in range(2)]
        self.sums = allocate("sums", int(config.num_accumulators), ACCUMULATOR)
        self.load_row(fragments[0], first, lines[0])
        for number, line in enumerate(lines):
            if number + 1 < len(lines):
                self.load_row(fragments[(number + 1) % 2], first, lines[number + 1])
            for unit, tap in users[line]:
                if tap.line == min(lines_of_class[tap.row_class]):
                    self.clear_sums(unit, tap.row_class)
            for product, (unit, tap) in itertools.product(products, users[line]):
                self.emit_product(fragments[number % 2], product, unit, tap)
            for unit, tap in users[line]:
                if tap.line == max(lines_of_class[tap.row_class]):
                    self.store_results(tile, column, unit, tap.row_class)
        for unit, row_class in itertools.product(units, row_classes):
            if not lines_of_class[row_class]:  # outputs that no tap reaches
                self.clear_sums(unit, row_class)
                self.store_results(tile, column, unit, row_class)

    def list_sums(self, unit: int, row_class: int, column_class: int) -> list[Expr]:
        """Return the registers of the sums of a product."""
        _, up_y, up_x = self.shape.upsampling
        first = ((unit * up_y + row_class) * up_x + column_class) * REGISTERS_PER_MMA
        return [self.sums[first + e] for e in range(REGISTERS_PER_MMA)]

    def clear_sums(self, unit: int, row_class: int) -> None:
        """Set the sums of a class of output rows to zero."""
        _, up_y, up_x = self.shape.upsampling
        first = (unit * up_y + row_class) * up_x * REGISTERS_PER_MMA
        for e in range(up_x * REGISTERS_PER_MMA):
            store(self.sums, first + e, T.float32(0))

    def emit_product(self, fragments: Buffer, product: Product, unit: int, tap: RowTap) -> None:
        """Multiply the fragments of a row of the window by one or two taps."""
        matrices = self.atom.a_registers // 2  # of a shift
        a_registers = [fragments[matrices * shift + e] for shift in product.shifts for e in range(matrices)]
        first_tap = tap.filter_row * self.shape.kernel_size[2]
        b_registers = [self.taps[first_tap + column] for column in product.filter_columns]
        self.atom.emit(self.list_sums(unit, tap.row_class, product.column_class), a_registers, b_registers)

    def load_row(self, fragments: Buffer, first: Expr, line: int) -> None:
        """Load the fragments of a row of the window at all shifts, two at a time."""
        config, size = self.config, self.atom.a_registers
        line_bytes = int(config.window_columns) * int(config.pixel_bytes)
        for pair in range(config.shift_pairs):
            address = first + self.places[pair] + to_uint32(line * line_bytes)
            if 2 * pair + 1 < len(self.shifts):
                ldmatrix_x4([fragments[pair * size + e] for e in range(size)], address)
            else:
                ldmatrix_x2([fragments[pair * size + e] for e in range(size // 2)], address)

    def store_results(self, tile: OutputTile, column: Expr, unit: int, row_class: int) -> None:
        """Apply the epilogue to the sums of a class of output rows, and store them to shared memory."""
        config, lane = self.config, self.cta.thread.lane
        channels, (_, height, width), (_, up_y, up_x) = config.w.C, self.shape.output_size, self.shape.upsampling
        mma_rows = int(config.mma_rows)
        values, packed = allocate("values", 2, ACCUMULATOR), allocate("packed", 8, "uint32")
        first_row = unit * mma_rows * up_y + row_class
        offset = (first_row * int(config.result_columns) + column * up_x) * int(config.pixel_bytes)
        for column_class, half in itertools.product(range(up_x), range(2)):
            sums = self.list_sums(unit, row_class, column_class)
            for e in range(2):
                store(values, e, sums[2 * half + e])
            row = tile.row + first_row + half * (mma_rows - 1) * up_y
            x = tile.column + (column + lane // 4 + half * (2 - mma_rows) * OCTET) * up_x + column_class
            # Arguments of the epilogue exist only for pixels and channels that do.
            inside = [is_below(row, height, int(config.result_rows)), is_below(x, width, int(config.result_columns))]
            inside.append(is_below(self.lane_channel, channels, int(config.channels)))
            with if_(logical_and(*inside) if self.ops.computed_ops else True):
                index = ((tile.image * height + row) * width + x) * channels + self.lane_channel
                apply_to_vector(self.ops, self.arguments, self.lane_channel, index, 2, values, packed)
                store_shared(self.result_places[half][column_class] + to_uint32(offset), packed, 2 * ELEMENT_BYTES)
