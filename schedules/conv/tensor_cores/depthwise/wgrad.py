"""Gradients of the weights of depthwise convolutions as diagonals of products of octets of channels, by mma.sync.

The product has channels of X at two taps as rows and channels of dY as columns, and its reduction runs over 16 pixels.
Only elements of equal channels are used: an eighth, for which mma.sync still takes less time than the FMA units. A row
of an 8 × 8 matrix of ldmatrix is the octet of a pixel, and both operands are transposed on the way to registers. A tap
is only another address, and no element is packed or converted.

A warp of a CTA copies tiles of dY and the windows of X below them by TMA, with zeros outside of the images, while the
others multiply those before. A swizzle as wide as the channels of a pixel, or an odd number of octets, keeps ldmatrix
free of bank conflicts, and is the same in all rows, because these are multiples of eight pixels. A warp keeps the
fragments of dY of all rows of a strip, and multiplies each fragment of X by those of all rows that reach it by a tap.
It keeps the sums of an octet over all tiles of the CTA's part of the pixels. The warps of a CTA then add their
diagonals in shared memory, and a second kernel adds the parts in order, so that each run returns the same bits.

Source: PTX ISA, "mma.sync", "ldmatrix" and "cp.async.bulk.tensor".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR, get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    block_axes,
    declare_tensor_map,
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
from ...nhwc_direct.depthwise_sums import build_depthwise_sums, part_tiles
from ..gemm.atoms import MmaSyncAtom, ThreadPosition, ldmatrix_x4, named_barrier_sync
from ..gemm.cta import allocate_smem
from ..gemm.pipelines import PipelineState, TmaPipeline
from ..gemm.prologue import emit_prologue
from ..gemm.tma import TmaCopy
from .octets import OCTET, STAGE_ALIGNMENT_BYTES, get_swizzle_bytes, locate_octet
from .wgrad_config import DepthwiseWgradConfig, can_multiply_octets, may_beat_fma_units

COMPUTE_BARRIER = 1  # named barrier of the warps that multiply


@schedule(
    *WGRAD,
    dtypes=("float16", "bfloat16"),
    usage=DepthwiseWgradConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, can_multiply_octets),
    search_if=may_beat_fma_units,
    starting_configs=DepthwiseWgradConfig.list_starting_configs,
    supersedes=("implicit_gemm",),
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_diagonal(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Multiply octets of channels of X and dY over tiles of pixels, keep diagonals, and add parts in order."""
    config = DepthwiseWgradConfig.declare_knobs(w, k)
    return build_depthwise_sums(
        w,
        int(config.num_parts),
        lambda arguments, workspace, _: emit_products(config, arguments, workspace),
        lambda number: (number // w.C, number % w.C),
    )


def emit_products(config: DepthwiseWgradConfig, arguments: dict[str, Buffer], workspace: Buffer) -> None:
    """Emit the first kernel, which stores sums (parts, taps, channels)."""
    dy, x = config.w.OPERANDS
    boxes = ((config.pixels_x, config.strip_rows), (config.window_columns, config.window_rows))
    sizes = config.shape.output_size, config.shape.input_size
    gradient_map, input_map = (
        declare_tensor_map(f"{name}_map", arguments[name], make_pixels_map(config, size, box))
        for name, size, box in zip((dy, x), sizes, boxes, strict=True)
    )
    compute_threads, stages = int(config.compute_warps) * WARP_SIZE, int(config.stages)
    blocks = int(config.octet_blocks) * int(config.filter_blocks)
    with (
        block_axes(int(config.num_parts), blocks) as (part, block),
        thread_axis(int(config.num_threads), "threadIdx.x") as thread,
    ):
        smem = allocate_smem(int(config.smem_bytes), STAGE_ALIGNMENT_BYTES)
        barriers = smem + to_uint32(int(config.barrier_offset_bytes))
        sizes_bytes = int(config.stage_pitch), barriers, stages, int(config.stage_bytes)
        pipeline = TmaPipeline(smem, *sizes_bytes, num_consumers=int(config.compute_warps))
        position = ThreadPosition(thread)
        emit_prologue(position, [pipeline], [gradient_map, input_map], first_loader=compute_threads)
        kernel = DepthwiseWgradKernel(config, workspace, pipeline, smem, part, block, position)
        with if_(thread < compute_threads):
            kernel.compute()
        with kernel.position.elect_in_warp(compute_threads // WARP_SIZE):
            kernel.copy_tiles(gradient_map, input_map)


def make_pixels_map(config: DepthwiseWgradConfig, size: Sequence[int], box: tuple[int, int]) -> maps.TensorMap:
    """Return the tensor map of dY or X: channels, columns, rows, planes and images; `box` has columns and rows."""
    w, (planes, height, width) = config.w, size
    extents = w.C, width, height, planes, w.N
    strides = [w.C * math.prod(extents[1:axis]) for axis in range(1, len(extents))]
    whole_box = int(config.octets) * OCTET, int(box[0]), int(box[1]), 1, 1
    swizzle = get_swizzle_bytes(int(config.octets))
    return maps.make_tiled_map(w.storage, get_itemsize(w.storage), extents, tuple(strides), whole_box, swizzle)


class DepthwiseWgradKernel:
    """What the warps of a CTA share, whatever their roles."""

    def __init__(
        self,
        config: DepthwiseWgradConfig,
        workspace: Buffer,
        pipeline: TmaPipeline,
        smem: Expr,
        part: Expr,
        block: Expr,
        position: ThreadPosition,
    ) -> None:
        self.config, self.shape, self.workspace = config, config.shape, workspace
        self.pipeline, self.smem, self.part = pipeline, smem, part
        self.atom = MmaSyncAtom(config.w.dtype, config.w.dtype)
        self.pixel_bytes = int(config.pixel_bytes)
        self.state = PipelineState("tile", int(config.stages))
        self.position, warp = position, position.warp
        self.octet, self.tap_warp = warp % config.octets, warp // config.octets % config.warps_taps
        self.pixel_warp = warp // (config.octets * config.warps_taps)
        filter_block, self.first_octet = block % config.filter_blocks, block // config.filter_blocks * config.octets
        self.filter_plane = filter_block // config.row_blocks
        self.filter_row = filter_block % config.row_blocks * config.filter_rows

    def open_tiles(self) -> AbstractContextManager[Expr]:
        """Open the loop over the tiles of the CTA."""
        return part_tiles(self.part, int(self.config.iterations), int(self.config.num_tiles))

    def copy_tiles(self, gradient_map: Expr, input_map: Expr) -> None:
        """Copy the tiles of dY and the windows of X below them, with zeros outside of the images; run by one thread."""
        config, shape, pipeline, state = self.config, self.shape, self.pipeline, self.state
        (step, step_y, step_x), (dilation, dilation_y, _) = shape.strides, shape.dilations
        window_bytes, strip_bytes = (
            int(pixels) // int(config.strips) * self.pixel_bytes
            for pixels in (config.input_pixels, config.gradient_pixels)
        )
        window_plane = self.filter_plane * dilation - shape.pad_low[0]
        window_row = self.filter_row * dilation_y - shape.pad_low[1]
        channel = self.first_octet * OCTET
        with self.open_tiles() as tile:
            pipeline.producer_acquire(state.index, state.phase)
            stage, barrier = pipeline.stage_address(state.index), pipeline.full_barrier(state.index)
            column = tile % config.tiles_x * config.pixels_x
            for number in range(int(config.strips)):
                image, plane, row = self.locate_strip(tile // config.tiles_x * config.strips + number)
                window = column * step_x - shape.pad_low[2], row * step_y + window_row, plane * step + window_plane
                destination = stage + to_uint32(number * window_bytes)
                TmaCopy(input_map, barrier).issue(destination, (channel, *window, image))
                destination = stage + to_uint32(int(config.strips) * window_bytes + number * strip_bytes)
                TmaCopy(gradient_map, barrier).issue(destination, (channel, column, row, plane, image))
            state.advance()

    def locate_strip(self, strip: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the image, the plane and the first row of a strip of dY; the image of a strip too many is too high."""
        image_plane, planes = strip // self.config.tiles_y, self.shape.output_size[0]
        return image_plane // planes, image_plane % planes, strip % self.config.tiles_y * self.config.strip_rows

    def compute(self) -> None:
        """Multiply all tiles and store the sums; run by all threads but those of the last warp."""
        config, pipeline, state = self.config, self.pipeline, self.state
        self.accumulators = allocate("accumulators", int(config.num_accumulators), ACCUMULATOR)
        fill_zeros(self.accumulators, int(config.num_accumulators))
        self.locate_lane()
        with self.open_tiles():
            pipeline.consumer_wait(state.index, state.phase)
            self.multiply(pipeline.stage_address(state.index))
            pipeline.warp_release(state.index, self.position)
            state.advance()
        self.store_sums()

    def locate_lane(self) -> None:
        """Compute the places of the rows of the lane's matrices in a stage, and allocate fragments.

        Of the matrices of X, odd ones have the second tap of a pair, and the last two the last eight pixels. The second
        tap is in the next column, or for a single last column in the next row. Of the matrices of dY, odd ones have the
        last eight pixels, and the last two the next rows of dY.
        """
        config, shape, lane = self.config, self.shape, self.position.lane
        _, stride_y, stride_x = shape.strides
        first, second, pixel = lane // 8 % 2, lane // 16, lane % 8
        is_row = config.mma_rows == 2  # the last eight pixels are a row of their own
        row = second * stride_y if is_row else 0
        row = row + self.tap_warp * (config.taps_y * shape.dilations[1])
        column = (pixel if is_row else pixel + second * 8) * stride_x
        input_pixel = Register("input_pixel", value=row * config.window_columns + column).value
        self.input_places = allocate("input_place", config.column_pairs + 1, "uint32")
        next_column, next_row = shape.dilations[2], shape.dilations[1] * config.window_columns
        for pair in range(config.column_pairs):
            has_both = 2 * pair + 1 < shape.kernel_size[2]
            tap = 2 * pair * shape.dilations[2] + first * (next_column if has_both else next_row)
            store(self.input_places, pair, self.locate_pixel(input_pixel + tap))
        if shape.kernel_size[2] % 2:  # a last tap without a pair
            tap = (shape.kernel_size[2] - 1) * shape.dilations[2]
            store(self.input_places, config.column_pairs, self.locate_pixel(input_pixel + tap))
        row, column = (first, pixel) if is_row else (0, pixel + first * 8)
        gradient_pixel = (row + second * config.mma_rows) * config.pixels_x + column
        place = to_uint32(config.input_pixels * self.pixel_bytes) + self.locate_pixel(gradient_pixel)
        self.gradient_place = Register("gradient_place", "uint32", place).value
        self.gradient = allocate("gradient", int(config.row_units) * self.atom.b_registers, "uint32")

    def locate_pixel(self, pixel: Expr) -> Expr:
        """Return the place of the warp's octet of a pixel, whose chunks a swizzle may exchange."""
        return locate_octet(int(self.config.octets), self.octet, pixel)

    def multiply(self, stage_address: Expr) -> None:
        """Multiply the warp's columns of the strips of a tile."""
        config = self.config
        columns = int(config.pixels_x) // int(config.mma_columns)
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
                is_last = 2 * pair + 1 == shape.kernel_size[2]
                used = [(unit, tap) for unit, tap in products if not (is_last and tap % 2)]
                if not used:
                    continue
                is_pair = not is_last or any(tap + 1 < config.taps_y for _, tap in used)
                place = self.input_places[pair if is_pair else config.column_pairs]
                offset = to_uint32(row * int(config.window_columns) * self.pixel_bytes)
                ldmatrix_x4(a_registers, address + place + offset, transposed=True)
                for unit, tap in used:
                    first = self.find_sum(tap, 2 * pair)
                    sums = [self.accumulators[first + e] for e in range(count)]
                    self.atom.emit(sums, a_registers, [self.gradient[unit * size + e] for e in range(size)])

    def find_sum(self, tap: int, column: int) -> int:
        """Return the first of the two accumulator registers of a tap of a warp.

        Even taps of a pair have registers 0 and 1 of a product, odd ones 2 and 3.
        """
        config, pairs = self.config, self.shape.kernel_size[2] // 2
        if column < 2 * pairs:
            return (tap * pairs + column // 2) * self.atom.num_accumulators + column % 2 * 2
        return (int(config.taps_y) * pairs + tap // 2) * self.atom.num_accumulators + tap % 2 * 2

    def store_sums(self) -> None:
        """Add the diagonals of the warps in shared memory in order, and store them to the workspace."""
        config, shape, lane = self.config, self.shape, self.position.lane
        channels, columns = int(config.octets) * OCTET, 2 * config.column_pairs
        filter_rows, num_columns = int(config.filter_rows), shape.kernel_size[2]
        compute_threads = int(config.compute_warps) * WARP_SIZE
        value = allocate("diagonal", 1, "uint32")
        # Registers 0 and 1 have columns 2 (lane % 4) and the next one of row lane / 4, registers 2 and 3 of row + 8.
        named_barrier_sync(COMPUTE_BARRIER, compute_threads)  # all warps have read the stages
        channel = self.octet * OCTET + lane // 4
        first = (self.pixel_warp * filter_rows + self.tap_warp * config.taps_y) * (columns * channels) + channel
        address = Register("sum_address", "uint32", self.smem + to_uint32(first * 4)).value
        with if_(lane // 8 == lane % 4):
            for tap in range(int(config.taps_y)):
                for column in range(num_columns):
                    number = self.find_sum(tap, column)
                    pair = self.accumulators[number], self.accumulators[number + 1]
                    diagonal = T.Select(lane // 4 % 2 == 0, *pair)
                    store(value, 0, T.reinterpret("uint32", diagonal))
                    offset = (tap * columns + column) * (channels * 4)
                    emit_ptx("st.shared.b32", address + to_uint32(offset), value[0])
        named_barrier_sync(COMPUTE_BARRIER, compute_threads)
        total = allocate("total", 1, ACCUMULATOR)
        with items_loop(filter_rows * num_columns * channels, self.position.thread, compute_threads) as item:
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
