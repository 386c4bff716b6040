"""Gradients of weights by mma.sync on windows of X, each pixel of which is copied once for all taps of the filter.

The product has the filters as rows and (tap, channel) as columns, and its reduction runs over all pixels of the batch,
as in `mma_sync`. A CTA copies a tile of dY and the window of X below it, with the halo that the taps reach. A tap is an
offset in shared memory: all taps read the same window. `mma_sync` copies X once for each tap, which takes most of its
time for 3 × 3 filters of 32-bit elements.

Lanes load TF32 elements of dY in pairs and those of X one by one, from pixels whose pitch keeps them free of bank
conflicts. `ldmatrix` transposes elements of 16 bits.

CTAs share the tiles (`parts`), and a second kernel adds their float32 sums in order, so that results are the same bits
in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import WeightGradient

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_ptx,
    if_,
    is_below,
    logical_and,
    store,
    to_uint32,
    unrolled_loop,
)
from ...gradient_conversion import build_channels_last_gradient, view_channels_last
from ...gradient_operators import WGRAD
from ..gemm.atoms import MmaSyncAtom, ThreadPosition, ldmatrix_x4
from ..gemm.cta import Cta, allocate_smem, allow_dependent_launch, open_cta
from ..gemm.mma_sync_mainloop import WarpTiling
from ..gemm.padded_pixels import PaddedPixels
from ..gemm.tile_scheduler import WorkTile
from ..gemm.workspace_reduction import store_sums
from ..pixel_tiles import PixelTiles
from ..wgrad_sums import declare_atomics, emit_wgrad
from .halo_wgrad_config import COLUMN_UNIT, HaloWgradConfig
from .schedule import DTYPES
from .tile_config import MMA_M

WORD_BYTES = 4
MIN_CHANNELS = 8  # channels of a group; first layers have fewer


def has_planes_and_channels(w: WeightGradient) -> bool:
    """Whether there are two or three axes of space, and the sums of a row of the filter fit a CTA."""
    return w.spatial_ndim >= 2 and w.C // w.groups >= MIN_CHANNELS and HaloWgradConfig.has_config(view_channels_last(w))


def is_promising(w: WeightGradient) -> bool:
    """Return whether the filter has several taps, and each group fills the rows and columns of an mma."""
    return (
        max(w.kernel) > 1
        and min(w.O // w.groups, w.C // w.groups) >= MMA_M
        and (w.groups == 1 or w.C // w.groups % COLUMN_UNIT == 0)
    )


@schedule(
    *WGRAD[1:],
    dtypes=DTYPES,
    usage=lambda w, columns: HaloWgradConfig.compute_usage(view_channels_last(w), columns),
    condition=has_planes_and_channels,
    search_if=is_promising,
    starting_configs=lambda w: HaloWgradConfig.list_starting_configs(view_channels_last(w)),
    supersedes=("implicit_gemm", "tiling"),
    device_kinds=("cuda",),
    min_arch=80,
)
def halo_mma_sync(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Multiply tiles of pixels in shared memory for all taps, and add the sums of all parts."""
    config = HaloWgradConfig.declare_knobs(view_channels_last(w), k)
    num_parts, is_atomic = int(config.num_parts), declare_atomics(w, k)

    def emit(arguments: dict[str, Buffer]) -> None:
        def emit_product(sums: Buffer) -> None:
            num_products, num_threads = int(config.num_products), int(config.num_threads)
            with open_cta(num_products, num_threads, num_parts, splits_in_cluster=False) as cta:
                allow_dependent_launch()
                smem = allocate_smem(int(config.smem_bytes))
                HaloWgradKernel(config, arguments, cta, smem, is_atomic=is_atomic).emit(sums)

        emit_wgrad(w, num_parts, arguments, emit_product, is_atomic=is_atomic)

    return build_channels_last_gradient(w, emit)


class ProductBlock(NamedTuple):
    """The sums that a CTA computes."""

    group: Expr  # group of the convolution
    first_filter: Expr  # first filter of the group
    tap_plane: Expr  # plane of the filter
    first_tap_row: Expr  # first row of the filter
    first_channel: Expr  # first channel of the group


class HaloWgradKernel:
    """Emitter of the kernel that multiplies."""

    def __init__(
        self, config: HaloWgradConfig, arguments: dict[str, Buffer], cta: Cta, smem: Expr, *, is_atomic: bool
    ) -> None:
        self._config, self._is_atomic = config, is_atomic
        self._block = self._locate_block(cta.index)
        self._tiling = make_tiling(config, cta.thread)
        dy, image = (arguments[name] for name in config.w.OPERANDS)
        forward, shape = config.forward, config.shape
        gradient_pixels = int(config.pixel_steps) * config.mma_pixels
        rows, columns = map(int, config.window)
        self._gradient = PaddedPixels(dy, forward.output_size[-2:], gradient_pixels, config.block_m, shape.m)
        self._window = PaddedPixels(image, forward.input_size[-2:], rows * columns, config.block_c, config.channels)
        self._window_columns = columns
        self._tiles = PixelTiles.allocate(config, cta.split, smem, self._tiling)
        atom, tiling = self._tiling.atom, self._tiling
        self._a_fragments = allocate("a_fragments", tiling.mmas_m * atom.a_registers, "uint32")
        self._b_fragments = allocate("b_fragments", config.unit_mmas * atom.b_registers, "uint32")
        self._tap_offsets = allocate("tap_offset", tiling.mmas_n // config.unit_mmas, "uint32")

    def emit(self, workspace: Buffer) -> None:
        """Emit the kernel, which stores or adds its sums to an array (parts, filters of a group, groups, columns)."""
        self._locate_taps()
        self._tiles.multiply(self._copy, self._multiply)
        with if_(self._tiling.holds_sums):
            self._store_sums(workspace)

    def _locate_block(self, index: Expr) -> ProductBlock:
        config = self._config
        blocks_c, blocks_taps, blocks_m = int(config.blocks_c), int(config.blocks_taps), int(config.blocks_m)
        tap_block, row_blocks = index // blocks_c % blocks_taps, int(config.row_blocks)
        return ProductBlock(
            index // (blocks_c * blocks_taps * blocks_m),
            index // (blocks_c * blocks_taps) % blocks_m * config.block_m,
            tap_block // row_blocks,
            tap_block % row_blocks * config.taps_y,
            index % blocks_c * config.block_c,
        )

    def _copy(self, iteration: Expr, stage: Expr) -> None:
        """Start the copies of a tile of dY and of the window of X below it."""
        config, block, forward = self._config, self._block, self._config.forward
        thread, num_threads = self._tiling.thread.thread, int(config.num_threads)
        with if_(self._tiles.is_valid(iteration)):
            names = "image", "row", "column"
            image, row, column = (
                Register(name, value=value).value
                for name, value in zip(names, self._tiles.locate(iteration), strict=True)
            )
            address = Register("stage", "uint32", self._tiles.stage(stage)).value

            def locate_gradient(pixel: Expr) -> tuple[Expr, Expr, Expr, Expr]:
                y, x = row + pixel // config.block_q, column + pixel % config.block_q
                rows, columns = forward.output_size[-2:]
                is_whole = self._gradient.num_pixels == config.num_pixels
                return image, y, x, logical_and(is_whole or pixel < int(config.num_pixels), y < rows, x < columns)

            input_image, is_plane_inside = self._locate_plane(image)
            first_y = row * forward.stride[-2] + block.first_tap_row * forward.dilation[-2] - forward.pad_low[-2]
            first_x = column * forward.stride[-1] - forward.pad_low[-1]
            window_y, window_x = Register("window_y", value=first_y).value, Register("window_x", value=first_x).value

            def locate_input(pixel: Expr) -> tuple[Expr, Expr, Expr, Expr]:
                y, x = window_y + pixel // self._window_columns, window_x + pixel % self._window_columns
                rows, columns = forward.input_size[-2:]
                return input_image, y, x, logical_and(*is_plane_inside, y >= 0, y < rows, x >= 0, x < columns)

            filters, channels = block.group * config.shape.m, block.group * config.channels
            threads = thread, num_threads
            self._gradient.copy(address, block.first_filter, filters, *threads, locate_gradient)
            window = address + to_uint32(int(config.gradient_bytes))
            self._window.copy(window, block.first_channel, channels, *threads, locate_input)

    def _locate_plane(self, gradient_plane: Expr) -> tuple[Expr, list[Expr]]:
        """Return the plane of X below a plane of dY, both counted over all images, and whether it is inside."""
        forward = self._config.forward
        if forward.spatial_ndim == 2:
            return gradient_plane, []
        planes, input_planes = forward.output_size[0], forward.input_size[0]
        offset = self._block.tap_plane * forward.dilation[0] - forward.pad_low[0]
        plane = Register("input_plane", value=gradient_plane % planes * forward.stride[0] + offset).value
        return gradient_plane // planes * input_planes + plane, [plane >= 0, plane < input_planes]

    def _locate_taps(self) -> None:
        """Compute the offsets in the window of each unit of instructions along the columns, for this lane."""
        config, tiling, lane = self._config, self._tiling, self._tiling.thread.lane
        (dilation_y, dilation_x), taps_x = config.forward.dilation[-2:], config.w.kernel[-1]
        itemsize, unit = config.itemsize, config.unit_mmas * tiling.atom.n
        lane_bytes = lane // 4 * itemsize if itemsize == WORD_BYTES else lane // 16 * (8 * itemsize)
        with unrolled_loop(tiling.mmas_n // config.unit_mmas, "j") as j:  # columns that do not exist are not stored
            column = T.min(tiling.first_column + j * unit, int(config.num_columns) - unit)
            tap, channel = column // config.block_c, column % config.block_c
            pixel = tap // taps_x * (dilation_y * self._window_columns) + tap % taps_x * dilation_x
            offset = pixel * self._window.pitch_bytes + channel * itemsize + lane_bytes
            store(self._tap_offsets, j, to_uint32(offset))

    def _multiply(self, stage: Expr) -> None:
        """Multiply the pixels of a tile, those of an mma at a time."""
        address = Register("read_address", "uint32", self._tiles.stage(stage)).value
        with self._tiles.steps_loop() as step:
            self._multiply_step(address, step * self._config.mma_pixels)

    def _multiply_step(self, stage: Expr, first_pixel: Expr) -> None:
        tiling, atom, gradient_bytes = self._tiling, self._tiling.atom, int(self._config.gradient_bytes)
        is_wide = atom.itemsize == WORD_BYTES
        (self._load_wide_gradient if is_wide else self._load_gradient)(stage, first_pixel)
        addresses = self._locate_window_pixels(stage + to_uint32(gradient_bytes), first_pixel)
        unit_mmas, size = self._config.unit_mmas, atom.b_registers
        for unit in range(tiling.mmas_n // unit_mmas):
            registers = [self._b_fragments[e] for e in range(unit_mmas * size)]
            if is_wide:
                for register, address in zip(registers, addresses, strict=True):
                    emit_ptx("ld.shared.b32", register, address + self._tap_offsets[unit])
            else:
                ldmatrix_x4(registers, addresses[0] + self._tap_offsets[unit], transposed=True)
            for mma_m in range(tiling.mmas_m):
                for e in range(unit_mmas):
                    b_fragment, a_fragment = registers[e * size : (e + 1) * size], self._a_registers(mma_m)
                    tiling.multiply(self._tiles.accumulators, mma_m, unit_mmas * unit + e, a_fragment, b_fragment)

    def _load_wide_gradient(self, stage: Expr, first_pixel: Expr) -> None:
        """Load the fragments of dY of 32 bits."""
        tiling, lane, pitch = self._tiling, self._tiling.thread.lane, self._gradient.pitch_bytes
        offset = (first_pixel + lane % 4) * pitch + (tiling.first_row + lane // 4 * 2) * WORD_BYTES
        address = Register("gradient_address", "uint32", stage + to_uint32(offset)).value
        for mma_m in range(tiling.mmas_m):
            registers, position = self._a_registers(mma_m), mma_m * tiling.atom.m * WORD_BYTES
            for half in range(2):
                pair = registers[2 * half : 2 * half + 2]
                emit_ptx("ld.shared.v2.b32", *pair, address + to_uint32(half * 4 * pitch + position))

    def _load_gradient(self, stage: Expr, first_pixel: Expr) -> None:
        """Load the fragments of dY of 16 bits, which `ldmatrix` transposes."""
        tiling, lane, itemsize = self._tiling, self._tiling.thread.lane, self._tiling.atom.itemsize
        pixel, column = first_pixel + lane % 8 + lane // 16 * 8, tiling.first_row + lane // 8 % 2 * 8
        offset = pixel * self._gradient.pitch_bytes + column * itemsize
        address = Register("gradient_address", "uint32", stage + to_uint32(offset)).value
        for mma_m in range(tiling.mmas_m):
            position = to_uint32(mma_m * tiling.atom.m * itemsize)
            ldmatrix_x4(self._a_registers(mma_m), address + position, transposed=True)

    def _locate_window_pixels(self, window: Expr, first_pixel: Expr) -> list[Expr]:
        """Return the addresses under the first tap of the pixels that this lane loads elements of X for."""
        config, lane = self._config, self._tiling.thread.lane
        (stride_y, stride_x), num_pixels = config.forward.stride[-2:], int(config.num_pixels)

        def locate(pixel: Expr, name: str) -> Expr:
            if self._gradient.num_pixels > num_pixels:  # dY is zero there, so that any element of X will do
                pixel = T.min(pixel, num_pixels - 1)
            row, column = pixel // config.block_q * stride_y, pixel % config.block_q * stride_x
            offset = (row * self._window_columns + column) * self._window.pitch_bytes
            return Register(name, "uint32", window + to_uint32(offset)).value

        if config.itemsize < WORD_BYTES:
            return [locate(first_pixel + lane % 8 + lane // 8 % 2 * 8, "pixel_address")]
        first = locate(first_pixel + lane % 4, "pixel_address")
        if config.block_q % config.mma_pixels == 0:  # the pixels of a step lie in one row
            return [first, first + to_uint32(4 * stride_x * self._window.pitch_bytes)]
        return [first, locate(first_pixel + (lane % 4 + 4), "second_pixel_address")]

    def _store_sums(self, workspace: Buffer) -> None:
        """Store this lane's sums, in pairs of neighbouring channels."""
        config, shape, block, tiling = self._config, self._config.shape, self._block, self._tiling
        columns_per_row, (taps_y, taps_x) = shape.groups * shape.n, config.w.kernel[-2:]
        overhangs = tiling.block_n > config.num_columns
        for row, column, sums in self._list_pairs():
            width = len(sums) if config.channels % len(sums) == 0 else 1
            tap, channel = column // config.block_c, block.first_channel + column % config.block_c
            tap_row = block.first_tap_row + tap // taps_x
            is_inside = logical_and(
                is_below(block.first_filter + row, shape.m, config.block_m),
                column < int(config.num_columns) if overhangs else True,
                is_below(tap_row, taps_y, config.taps_y),
            )
            part = 0 if self._is_atomic else self._tiles.part
            first = (part * shape.m + block.first_filter + row) * columns_per_row + block.group * shape.n
            filter_row = block.tap_plane * taps_y + tap_row
            first = first + (filter_row * taps_x + tap % taps_x) * config.channels + channel
            for e in range(0, len(sums), width):
                exists = is_below(channel + e, config.channels, config.block_c)
                with if_(logical_and(is_inside, exists)):
                    store_sums(workspace, first + e, sums[e : e + width], is_atomic=self._is_atomic)

    def _list_pairs(self) -> Iterator[tuple[Expr, Expr, list[Expr]]]:
        """Return the row and the first column in the CTA's block of each pair of this lane's sums, and the sums."""
        tiling, block = self._tiling, WorkTile(0, 0, 0)
        for mma_m in range(tiling.mmas_m):
            for mma_n in range(tiling.mmas_n):
                for half in range(2):
                    first = tiling.accumulator(mma_m, mma_n, half)
                    row, column = tiling.row(block, mma_m, half), tiling.column(block, mma_n)
                    yield row, column, [self._tiles.accumulators[first + e] for e in range(2)]

    def _a_registers(self, mma_m: int) -> list[Expr]:
        size = self._tiling.atom.a_registers
        return [self._a_fragments[mma_m * size + e] for e in range(size)]


def make_tiling(config: HaloWgradConfig, thread: ThreadPosition) -> WarpTiling:
    """Return the division of a CTA's sums among warps."""
    atom = MmaSyncAtom(config.w.dtype, config.w.dtype)
    warps = config.warps_m, config.warps_n, config.warps_k
    mmas = int(config.mmas_m), int(config.mmas_n), 1
    return WarpTiling(atom, *warps, *mmas, thread=thread, has_row_pairs=atom.itemsize == WORD_BYTES)
