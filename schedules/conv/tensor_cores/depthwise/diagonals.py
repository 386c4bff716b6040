"""Kernel of depthwise convolutions as products of octets of channels with diagonal matrices, by mma.sync.

The rows of a product are 16 pixels of a row, or eight of two, its columns eight channels, and its reduction runs over
the same eight channels at two taps. The second operand has the filters of a tap on its diagonal: seven eighths of the
products are with zeros, for which mma.sync still takes less time than the FMA units. A row of an 8 × 8 matrix of
ldmatrix is the octet of a pixel, so that a tap is only another address, and no element is packed or converted.

A warp of a persistent CTA copies windows of X by TMA, with zeros outside of the image, while the others multiply those
before. A swizzle as wide as the channels of a pixel, or an odd number of octets, keeps ldmatrix free of bank conflicts.
A warp has an octet, whose taps stay in its registers, and walks down the rows of a window: it loads each row once for
all output rows in reach. The results of a tile go to shared memory, from where TMA stores whole lines, and only what is
inside of the image.

An element of X that is infinite or NaN makes the results of its octet NaN that the filter reaches, because zeros of the
diagonal matrices are multiplied by it.

Sources: PTX ISA, "mma.sync", "ldmatrix" and "cp.async.bulk.tensor".
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.dtypes import ACCUMULATOR, get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    declare_tensor_map,
    emit_call,
    if_,
    is_below,
    items_loop,
    logical_and,
    serial_loop,
    store,
    store_shared,
    to_uint32,
)
from ..gemm.atoms import MmaSyncAtom, ldmatrix_x2, ldmatrix_x4, named_barrier_sync
from ..gemm.cta import Cta, allocate_smem, allow_dependent_launch, open_cta
from ..gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..gemm.pipelines import PipelineState, TmaPipeline, fence_barrier_init
from ..gemm.tma import TmaCopy, prefetch_tensor_maps, tma_store, tma_store_fence, tma_store_wait
from .diagonal_config import REGISTERS_PER_MMA, DiagonalConfig
from .octets import OCTET, STAGE_ALIGNMENT_BYTES, get_swizzle_bytes, locate_octet

COMPUTE_BARRIER = 1  # named barrier of the warps that multiply


@dataclass(frozen=True)
class OutputTile:
    """A tile of output pixels, by its index in all tiles and its place."""

    index: Expr
    image: Expr
    row: Expr  # first output row
    column: Expr  # first output column


def emit_diagonals(config: DiagonalConfig, arguments: dict[str, Buffer], *, is_flipped: bool = False) -> None:
    """Emit the kernel; `is_flipped`: the taps of K are in the opposite order, as in a gradient."""
    w = config.w
    window_box = int(config.window_columns), int(config.window_rows)
    input_map = declare_tensor_map("X_map", arguments["X"], make_pixels_map(config, w.input_size, window_box))
    result_box = int(config.columns), int(config.rows)
    output_map = declare_tensor_map("Y_map", arguments["Y"], make_pixels_map(config, w.output_size, result_box))
    compute_threads, stages = int(config.compute_warps) * WARP_SIZE, int(config.stages)
    with open_cta(int(config.num_blocks), int(config.num_threads), 1, splits_in_cluster=False) as cta:
        smem = allocate_smem(int(config.smem_bytes), STAGE_ALIGNMENT_BYTES)
        barriers = smem + to_uint32(int(config.barrier_offset_bytes))
        sizes = int(config.stage_pitch), barriers, stages, int(config.window_bytes)
        pipeline = TmaPipeline(smem, *sizes, num_consumers=int(config.compute_warps))
        with if_(cta.thread.thread == compute_threads):
            prefetch_tensor_maps([input_map, output_map])
        with if_(cta.thread.thread == 0):
            pipeline.init_barriers()
            fence_barrier_init()
        emit_call(T.cuda.cta_sync())
        allow_dependent_launch()
        results = smem + to_uint32(int(config.result_offset_bytes))
        kernel = DiagonalKernel(config, arguments, cta, pipeline, results, is_flipped)
        with if_(cta.thread.thread < compute_threads):
            kernel.compute(output_map)
        with if_(cta.thread.is_first_of_warp(compute_threads // WARP_SIZE)):
            kernel.load_windows(input_map)


def make_pixels_map(config: DiagonalConfig, size: tuple[int, ...], box: tuple[int, int]) -> maps.TensorMap:
    """Return the tensor map of X or Y: channels, columns, rows and images; `box` has columns and rows."""
    w, (height, width) = config.w, size
    extents, strides = (w.C, width, height, w.N), (w.C, width * w.C, height * width * w.C)
    whole_box = int(config.channels), *box, 1
    swizzle = get_swizzle_bytes(int(config.octets))
    return maps.make_tiled_map(w.storage, get_itemsize(w.storage), extents, strides, whole_box, swizzle)


class DiagonalKernel:
    """What the warps of a CTA share, whatever their roles."""

    def __init__(
        self,
        config: DiagonalConfig,
        arguments: dict[str, Buffer],
        cta: Cta,
        pipeline: TmaPipeline,
        results: Expr,
        is_flipped: bool,
    ) -> None:
        self.config, self.w, self.arguments, self.cta, self.pipeline = config, config.w, arguments, cta, pipeline
        self.results, self.is_flipped = results, is_flipped
        self.ops = EpilogueOps.from_workload(config.w).bind_tensor_args(arguments, uses_registers=True)
        self.atom = MmaSyncAtom(config.w.dtype, config.w.dtype)
        self.state = PipelineState("window", int(config.stages))
        self.octets = int(config.octets)
        self.first_channel = cta.index % int(config.channel_blocks) * int(config.channels)

    def locate(self, tile_round: Expr) -> OutputTile:
        """Return the CTA's tile in a round."""
        config = self.config
        tiles_y, tiles_x = int(config.tiles_y), int(config.tiles_x)
        index = self.cta.index // int(config.channel_blocks) + tile_round * int(config.ctas_per_block)
        row, column = index // tiles_x % tiles_y * int(config.rows), index % tiles_x * int(config.columns)
        return OutputTile(index, index // (tiles_x * tiles_y), row, column)

    def load_windows(self, input_map: Expr) -> None:
        """Load the windows of all tiles; run by one thread."""
        w, config, pipeline, state = self.w, self.config, self.pipeline, self.state
        with serial_loop(int(config.tiles_per_cta), "round") as tile_round:
            tile = self.locate(tile_round)
            with if_(tile.index < int(config.pixel_tiles)):
                pipeline.producer_acquire(state.index, state.phase)
                row = tile.row * w.stride[0] - w.pad_low[0]
                column = tile.column * w.stride[1] - w.pad_low[1]
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
                emit_call(T.cuda.warp_sync())
                with if_(position.lane == 0):
                    self.pipeline.consumer_arrive(self.state.index)
                self.state.advance()
                tma_store_fence()
                named_barrier_sync(COMPUTE_BARRIER, compute_threads)
                with if_(position.thread == 0):
                    tma_store(output_map, (self.first_channel, tile.column, tile.row, tile.image), self.results)
        with if_(position.thread == 0):
            tma_store_wait(0)

    def locate_lane(self, octet: Expr) -> None:
        """Compute the places of the rows of the lane's matrices in a window, and of its results.

        Of the four matrices of a load, odd ones have the last eight pixels, and the last two the second tap of a pair.
        """
        w, lane = self.w, self.cta.thread.lane
        window_columns = int(self.config.window_columns)
        pixel = lane % OCTET * w.stride[1] + lane // OCTET % 2 * self.get_half_pixels(window_columns, w.stride)
        self.places = allocate("place", self.config.column_pairs, "uint32")
        for pair in range(self.config.column_pairs):
            has_both = 2 * pair + 1 < w.kernel[1]
            tap = 2 * pair + (lane // (2 * OCTET) if has_both else 0)
            store(self.places, pair, locate_octet(self.octets, octet, pixel + tap * w.dilation[1]))
        pair_bytes = 2 * get_itemsize(w.storage)
        self.result_places = [
            Register(
                "result_place",
                "uint32",
                self.results
                + locate_octet(self.octets, octet, lane // 4 + half * self.get_half_pixels(int(self.config.columns)))
                + to_uint32(lane % 4 * pair_bytes),
            ).value
            for half in range(2)
        ]
        self.lane_channel = Register("lane_channel", value=self.first_channel + octet * OCTET + lane % 4 * 2).value

    def get_half_pixels(self, columns: int, stride: tuple[int, ...] = (1, 1)) -> int:
        """Return the pixels from the first eight of a product to the others, in rows of some columns."""
        return stride[0] * columns if self.config.mma_rows == 2 else stride[1] * OCTET

    def load_taps(self, channel: Expr) -> Buffer:
        """Load the taps of the lane's channel as elements of diagonal matrices: a register for each tap.

        A lane has rows 2 (lane % 4) and the next one of column lane / 4, of which one may be on the diagonal.
        """
        w, lane, filters = self.w, self.cta.thread.lane, self.arguments["K"]
        height, width = w.kernel
        taps = allocate("taps", height * width, "uint32")
        own = channel + lane // 4
        if int(self.config.channel_blocks * self.config.channels) > w.C:  # octets that do not exist read others
            own = T.min(own, w.C - 1)
        own = Register("tap_channel", value=own).value
        is_diagonal = Register("is_diagonal", value=T.Select(lane // 8 == lane % 4, 1, 0)).value
        shift = Register("tap_shift", "uint32", to_uint32(lane // 4 % 2 * 16)).value
        for r, s in itertools.product(range(height), range(width)):
            y, x = (height - 1 - r, width - 1 - s) if self.is_flipped else (r, s)
            bits = T.Cast("uint32", T.reinterpret("uint16", filters[own, y, x, 0]))
            element = T.Select(is_diagonal == 1, T.shift_left(bits, shift), T.uint32(0))
            store(taps, r * width + s, element)
        return taps

    def multiply(self, tile: OutputTile, column: Expr, window: Expr) -> None:
        """Add each row of the window to the output rows in reach of a filter row, and store those that are complete."""
        config, w = self.config, self.w
        (height, width), step, dilation = w.kernel, w.stride[0], w.dilation[0]
        users: dict[int, list[tuple[int, int]]] = defaultdict(list)  # product and filter row, by row of the window
        for unit, r in itertools.product(range(int(config.row_units)), range(height)):
            users[unit * int(config.mma_rows) * step + r * dilation].append((unit, r))
        lines = sorted(users)
        first_pixel = to_uint32(column * (w.stride[1] * int(config.pixel_bytes)))
        first = Register("first_pixel", "uint32", window + first_pixel).value
        size, pairs = self.atom.a_registers, config.column_pairs
        fragments = [allocate("fragment", size * pairs, "uint32") for _ in range(2)]
        sums = allocate("sums", int(config.num_accumulators), ACCUMULATOR)
        self.load_row(fragments[0], first, lines[0])
        for number, line in enumerate(lines):
            if number + 1 < len(lines):
                self.load_row(fragments[(number + 1) % 2], first, lines[number + 1])
            for unit, r in users[line]:
                if r == 0:
                    for e in range(REGISTERS_PER_MMA):
                        store(sums, unit * REGISTERS_PER_MMA + e, T.float32(0))
            for pair, (unit, r) in itertools.product(range(pairs), users[line]):
                accumulators = [sums[unit * REGISTERS_PER_MMA + e] for e in range(REGISTERS_PER_MMA)]
                num_taps = min(2, width - 2 * pair)
                a_registers = [fragments[number % 2][pair * size + e] for e in range(2 * num_taps)]
                b_registers = [self.taps[r * width + 2 * pair + tap] for tap in range(num_taps)]
                self.atom.emit(accumulators, a_registers, b_registers)
            for unit, r in users[line]:
                if r == height - 1:
                    self.store_results(tile, column, unit, sums)

    def load_row(self, fragments: Buffer, first: Expr, line: int) -> None:
        """Load the fragments of a row of the window, one for each pair of taps."""
        config, size = self.config, self.atom.a_registers
        line_bytes = int(config.window_columns) * int(config.pixel_bytes)
        for pair in range(config.column_pairs):
            address = first + self.places[pair] + to_uint32(line * line_bytes)
            if 2 * pair + 1 < self.w.kernel[1]:
                ldmatrix_x4([fragments[pair * size + e] for e in range(4)], address)
            else:
                ldmatrix_x2([fragments[pair * size + e] for e in range(2)], address)

    def store_results(self, tile: OutputTile, column: Expr, unit: int, sums: Buffer) -> None:
        """Apply the epilogue to the sums of a product, and store them to shared memory."""
        config, w, lane = self.config, self.w, self.cta.thread.lane
        height, width = w.output_size
        mma_rows = int(config.mma_rows)
        values, packed = allocate("values", 2, ACCUMULATOR), allocate("packed", 8, "uint32")
        first_pixel = column + unit * mma_rows * int(config.columns)
        for half in range(2):
            for e in range(2):
                store(values, e, sums[unit * REGISTERS_PER_MMA + 2 * half + e])
            row = tile.row + unit * mma_rows + half * (mma_rows - 1)
            x = tile.column + column + lane // 4 + half * (2 - mma_rows) * OCTET
            # Arguments of the epilogue exist only for pixels and channels that do.
            inside = [is_below(row, height, int(config.rows)), is_below(x, width, int(config.columns))]
            inside.append(is_below(self.lane_channel, w.C, int(config.channels)))
            with if_(logical_and(*inside) if self.ops.computed_ops else True):
                index = ((tile.image * height + row) * width + x) * w.O + self.lane_channel
                apply_to_vector(self.ops, self.arguments, self.lane_channel, index, 2, values, packed)
                place = self.result_places[half] + to_uint32(first_pixel * int(config.pixel_bytes))
                store_shared(place, packed, 2 * get_itemsize(w.storage))
