"""Depthwise convolutions with large filters as products with band matrices, by mma.sync.

For a channel and a row of the filter, a row of Y is a row of X times a band matrix: element (column of X, column of Y)
is the tap at their distance, or zero. The rows of the product are 16 rows of Y, and its reduction runs over the columns
of X. Some products are with zeros, but mma.sync takes as long for 2,048 of them as the FMA units for 64. The gradient
of the input is the convolution of dY, as X, with the flipped filter.

A CTA computes a tile of rows and columns of some images, a warp for each channel. X and the filters are rearranged in
shared memory as planes of channels. Two copies of each filter row, one of them shifted by one tap, have all pairs of
neighbouring taps in aligned words, which are in turn those of the copies. Such words are the fragments of the band
matrix. Fragments of the same distance from the diagonal are the same, so that a lane loads few words for each row of
the filter.

With channels last, a thread loads eight channels of two neighbouring pixels and exchanges them. With channels first,
rows are copied in vectors that divide the width; the window of a tile starts at a multiple of them.

An infinite element of X makes those of its tile NaN that the filter does not reach, as it is multiplied by zeros.

Source: PTX ISA, "mma.sync" and "ldmatrix".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import H200, L2_CLOCKS
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.layout import CHANNELS_LAST

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    load_global,
    load_shared,
    logical_and,
    serial_loop,
    store,
    store_global,
    store_shared,
    to_uint32,
)
from ...estimated_config import EstimatedTileConfig
from ...tile_config import Rule
from ..gemm.atoms import MmaSyncAtom, ldmatrix_x4
from ..gemm.cta import allocate_smem, allow_dependent_launch, open_cta
from ..gemm.epilogue_ops import EpilogueOps, apply_to_pixels, apply_to_vector

OCTET = 8  # channels in 16 bytes
MMA_M, MMA_N, MMA_K = 16, 8, 16
COPIES = 2  # of the filters
STAGED_PAD = 8  # words between the results of two octets in shared memory, against bank conflicts
MIN_TAPS = 25  # with fewer, the FMA units are as fast
MAX_ACCUMULATORS = 128
OVERHEAD_REGISTERS = 48  # besides the accumulators
SM_REGISTERS = 65536
CYCLES_PER_MMA = 2.5  # of an SM
MAX_VECTOR = 8  # elements of a copy of a row
MAX_SHARED_BYTES = 227 << 10
CopyAction = Callable[[int, Expr], None]  # from an item's number in its batch, and its index
FILTER_BATCH, PIXEL_BATCH, ROW_BATCH = 16, 4, 8  # loads of a thread that are under way at a time
AnyConv = Conv | InputGradient


@dataclasses.dataclass(frozen=True)
class BandAxis:
    """Rows or columns of Y in tiles, for one config or as columns for many, and the window of X below a tile."""

    size: int  # elements of Y
    source: int  # elements of X
    taps: int
    pad: int  # zeros before X
    tile: Any  # elements of a tile of Y
    vector: int  # elements of X of which the window of a tile starts at a multiple

    @property
    def tiles(self) -> Any:
        """Tiles of the axis; the window of the only one is X without padding."""
        return ceil_div(self.size, self.tile)

    @property
    def window(self) -> Any:
        """Elements of X of a window."""
        return np.where(self.tiles == 1, self.source, self.tile + self.taps - 1 + self._lead - self.pad)

    @property
    def offset(self) -> Any:
        """Place in the window of the element of X that the first tap connects with the first element of Y."""
        return np.where(self.tiles == 1, -self.pad, self._lead - self.pad)

    @property
    def _lead(self) -> int:
        """Elements of the window of a tile before its first output's place."""
        return round_up(self.pad, self.vector)

    def first(self, index: Expr) -> Expr:
        """Return the element of X at the start of the window of a tile."""
        return 0 if self.tiles == 1 else index * int(self.tile) - self._lead


@dataclasses.dataclass(frozen=True)
class BandConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("octets", "images", "mmas_y", "mmas_x")

    octets: Any  # octets of channels of a CTA, a warp for each channel
    images: Any  # images of a CTA
    mmas_y: Any  # instructions along the rows of Y of an image
    mmas_x: Any  # instructions along the columns of Y

    @classmethod
    def list_options(cls, w: AnyConv) -> dict[str, Any]:
        """Return the options of all knobs."""
        return {"octets": (1, 2, 4), "images": (1, 2, 4, 8), "mmas_y": (1, 2, 4), "mmas_x": (1, 2, 4, 7)}

    @classmethod
    def list_required(cls, w: AnyConv) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            ("the channels are whole octets of CTAs", lambda t: w.C % (OCTET * t.octets) == 0),
            (
                f"at most {MAX_ACCUMULATORS} accumulators, and registers for all threads",
                lambda t: (
                    (t.num_accumulators <= MAX_ACCUMULATORS)
                    & (t.num_threads * (t.num_accumulators + OVERHEAD_REGISTERS) <= SM_REGISTERS)
                ),
            ),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: AnyConv) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [("a CTA has at most all images", lambda t: t.images <= w.N)]

    @property
    def convolution(self) -> Conv:
        """The convolution, which for a gradient is that of dY."""
        conv = self.w.direct_convolution if isinstance(self.w, InputGradient) else self.w
        assert conv
        return conv

    @property
    def is_channels_last(self) -> bool:
        """Whether channels are the innermost axis of X and Y."""
        return bool(self.convolution.layout == CHANNELS_LAST)

    @property
    def input_vector(self) -> int:
        """Elements of a copy of X along a row."""
        return 1 if self.is_channels_last else math.gcd(self.convolution.input_size[-1], MAX_VECTOR)

    @property
    def axes(self) -> tuple[BandAxis, BandAxis]:
        """Rows and columns."""
        conv, tiles = self.convolution, (self.mmas_y * MMA_M, self.mmas_x * MMA_N)
        vectors = 1, self.input_vector
        values = zip(conv.output_size, conv.input_size, conv.kernel, conv.pad_low, tiles, vectors, strict=True)
        rows, columns = (BandAxis(*value) for value in values)
        return rows, columns

    @property
    def channels(self) -> Any:
        """Channels per CTA."""
        return OCTET * self.octets

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.channels + 0 * self.images

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        rows, columns = self.axes
        return ceil_div(self.w.N, self.images) * (self.w.C // self.channels) * rows.tiles * columns.tiles

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return 4 * self.images * self.mmas_y * self.mmas_x

    @property
    def mmas_k(self) -> Any:
        """Instructions along the columns of dY."""
        return ceil_div(self.axes[1].window, MMA_K)

    @property
    def row_taps(self) -> Any:
        """Taps of a filter row in shared memory, with the zeros around them."""
        return MMA_K * self.mmas_k + MMA_N * self.mmas_x

    @property
    def pitch_bytes(self) -> Any:
        """Bytes of a row of X, an odd multiple of 16 against bank conflicts."""
        return 2 * MMA_K * self.mmas_k + 16

    @property
    def filter_bytes(self) -> Any:
        """Bytes of the filters of a channel."""
        return self.axes[0].taps * COPIES * 2 * self.row_taps

    @property
    def staged_pitch(self) -> Any:
        """Words of a row of Y in shared memory, 8 or 24 modulo 32 against bank conflicts."""
        return self.mmas_x * MMA_N + np.where(self.mmas_x % 2 == 0, 8, 16)

    @property
    def staged_octet(self) -> Any:
        """Words of the results of eight channels in shared memory."""
        return OCTET * self.images * self.mmas_y * MMA_M * self.staged_pitch + STAGED_PAD

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory: filters, a row of zeros and X, later Y."""
        plane_bytes = self.images * self.axes[0].window * self.pitch_bytes
        operand_bytes = self.channels * (self.filter_bytes + plane_bytes) + self.pitch_bytes
        return np.maximum(operand_bytes, self.octets * self.staged_octet * 4)

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: products at a part of the peak rate, and copies."""
        rows, columns = self.axes
        resident = np.maximum(1, np.minimum(MAX_SHARED_BYTES // (self.smem_bytes + 1024), 1024 // self.num_threads))
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        mmas_of_octet = np.minimum(self.mmas_k, (columns.taps + MMA_N + MMA_K - 2) / MMA_K)  # with taps in the band
        mmas = rows.taps * self.images * self.mmas_y * self.mmas_x * mmas_of_octet * self.channels
        copies = self.smem_bytes / 32 + 8 * L2_CLOCKS
        return blocks_per_sm * mmas * CYCLES_PER_MMA + ceil_div(blocks_per_sm, resident) * copies


def has_bands(w: AnyConv) -> bool:
    """Whether each channel has one filter, of stride and dilation 1, and a config fits shared memory."""
    conv = w.direct_convolution if isinstance(w, InputGradient) else w
    if conv is None or conv.has_large_tensors or {*conv.stride, *w.dilation} != {1}:
        return False
    return w.C == w.O == w.groups > 1 and w.C % OCTET == 0 and BandConfig.has_config(w)


def has_large_filter(w: AnyConv) -> bool:
    """Return whether tensor cores may be faster than the FMA units."""
    return w.kernel[0] * w.kernel[1] >= MIN_TAPS


def emit_bands(config: BandConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel of a config; the arguments are those of its convolution."""
    kernel = BandKernel if config.is_channels_last else ChannelsFirstBandKernel
    kernel(config, arguments).emit()


class BandKernel:
    """Emitter of the kernel."""

    def __init__(self, config: BandConfig, arguments: dict[str, Buffer]) -> None:
        self.config, self.arguments, self.conv = config, arguments, config.convolution
        self.rows, self.columns = config.axes
        self.images, self.mmas_y, self.mmas_x = int(config.images), int(config.mmas_y), int(config.mmas_x)
        self.mmas_k, self.row_taps, self.pitch = int(config.mmas_k), int(config.row_taps), int(config.pitch_bytes)
        self.window, self.filter_bytes = int(self.rows.window), int(config.filter_bytes)
        self.channels, self.octets = int(config.channels), int(config.octets)
        self.zeros = self.channels * self.filter_bytes  # offset of the row of zeros in shared memory
        self.plane_bytes = self.images * self.window * self.pitch

    def emit(self) -> None:
        """Emit the kernel."""
        config, num_parts = self.config, self.conv.C // self.channels
        with open_cta(int(config.num_blocks), int(config.num_threads), 1, splits_in_cluster=False) as cta:
            allow_dependent_launch()
            self.smem, self.position = allocate_smem(int(config.smem_bytes)), cta.thread
            self.channel = Register("channel", value=cta.index % num_parts * self.channels).value
            tile, tiles_x, tiles_y = cta.index // num_parts, int(self.columns.tiles), int(self.rows.tiles)
            self.tile_x, self.tile_y = tile % tiles_x, tile // tiles_x % tiles_y
            self.image = tile // (tiles_x * tiles_y) * self.images
            copies = self.plan_filter_copies()
            copies.load_first()
            self.clear_filters()
            self.copy_pixels()
            emit_call(T.cuda.cta_sync())
            copies.finish()
            emit_call(T.cuda.cta_sync())
            self.sums = allocate("sums", int(config.num_accumulators), "float32")
            fill_zeros(self.sums, int(config.num_accumulators))
            self.multiply()
            emit_call(T.cuda.cta_sync())
            self.stage_sums()
            emit_call(T.cuda.cta_sync())
            self.store_tile()

    def copy_items(self, count: int, batch: int, load: CopyAction, put: CopyAction) -> None:
        """Let the threads load items, `batch` at a time, before they store them to shared memory."""
        BatchedCopies(self.position.thread, int(self.config.num_threads), count, batch, load, put).emit()

    def clear_filters(self) -> None:
        """Store zeros to the place of the filters, and to the row of zeros behind them."""
        zeros = [T.uint32(0)] * 4

        def put(_: int, item: Expr) -> None:
            emit_ptx("st.shared.v4.b32", self.smem + to_uint32(item * 16), *zeros)

        self.copy_items((self.zeros + self.pitch) // 16, 1, lambda i, item: None, put)

    def plan_filter_copies(self) -> BatchedCopies:
        """Return the copies of the taps of each filter row, flipped for a gradient, in the second copy one place
        earlier.
        """
        (height, width), is_flipped = self.conv.kernel, isinstance(self.config.w, InputGradient)
        loaded = allocate("taps", FILTER_BATCH, "uint16")
        before = MMA_N * self.mmas_x - 1 + int(self.columns.offset)  # zeros before the first tap

        def load(i: int, item: Expr) -> None:
            pointer = self.arguments["K"].access_ptr("r", offset=self.channel * (height * width) + item)
            emit_ptx("ld.global.nc.b16", loaded[i], pointer)

        def put(i: int, item: Expr) -> None:
            channel, row, column = item // (height * width), item // width % height, item % width
            if is_flipped:
                row, column = height - 1 - row, width - 1 - column
            place = Register("place", value=before + column).value  # TVM would divide by negative numbers
            first = channel * self.filter_bytes + row * (COPIES * 2 * self.row_taps)
            for copy in range(COPIES):
                offset = first + (place - copy) // 2 * 8 + copy * 4 + (place - copy) % 2 * 2
                with if_(logical_and(place >= copy, place < self.row_taps)):
                    emit_ptx("st.shared.b16", self.smem + to_uint32(offset), loaded[i])

        count, num_threads = self.channels * height * width, int(self.config.num_threads)
        batch = min(FILTER_BATCH, ceil_div(count, num_threads))
        return BatchedCopies(self.position.thread, num_threads, count, batch, load, put)

    def copy_pixels(self) -> None:
        """Store the window of X as planes of channels, two neighbouring pixels at a time, with zeros around it."""
        conv, pairs = self.conv, MMA_K // 2 * self.mmas_k
        (height, width), words = conv.input_size, allocate("pixels", PIXEL_BATCH * 2 * 4, "uint32")
        first_row, first_column = self.rows.first(self.tile_y), self.columns.first(self.tile_x)
        window_columns = int(self.columns.window)

        def load(i: int, item: Expr) -> None:
            place, octet, line = item % pairs * 2, item // pairs % self.octets, item // (pairs * self.octets)
            row, image = first_row + line % self.window, self.image + line // self.window
            for e in range(2):
                column = first_column + place + e
                for word in range(4):
                    store(words, (i * 2 + e) * 4 + word, T.uint32(0))
                tests = (image < conv.N, row >= 0, row < height, column >= 0, column < width)
                with if_(logical_and(*tests, place + e < window_columns)):
                    offset = ((image * height + row) * width + column) * conv.C + self.channel + octet * OCTET
                    registers = [words[(i * 2 + e) * 4 + word] for word in range(4)]
                    emit_ptx("ld.global.nc.v4.b32", *registers, self.arguments["X"].access_ptr("r", offset=offset))

        def put(i: int, item: Expr) -> None:
            octet, line = item // pairs % self.octets, item // (pairs * self.octets)
            first = self.zeros + self.pitch + octet * (OCTET * self.plane_bytes) + line * self.pitch + item % pairs * 4
            for channel in range(OCTET):
                left, right = (words[(i * 2 + e) * 4 + channel // 2] for e in range(2))
                if channel % 2:
                    pair = T.shift_right(left, T.uint32(16)) | right & T.uint32(0xFFFF0000)
                else:
                    pair = left & T.uint32(0xFFFF) | T.shift_left(right, T.uint32(16))
                emit_ptx("st.shared.b32", self.smem + to_uint32(first + channel * self.plane_bytes), pair)

        self.copy_items(self.images * self.window * pairs * self.octets, PIXEL_BATCH, load, put)

    def has_taps(self, diagonal: int) -> bool:
        """Return whether a part of the band, of 8 × 8 elements at a distance from the diagonal, has taps."""
        nearest = MMA_N * diagonal - int(self.columns.offset)
        return nearest - MMA_N < self.columns.taps and nearest + MMA_N > 0

    def multiply(self) -> None:
        """Multiply the rows of X of each row of the filter by its band matrix; a warp computes a channel."""
        lane, warp, atom = self.position.lane, self.position.warp, MmaSyncAtom(self.config.w.dtype, self.config.w.dtype)
        copy = (lane // 4 + 1) % COPIES
        tap = lane % 4 * 2 - lane // 4 + MMA_N * self.mmas_x - 1 - copy
        address = self.smem + to_uint32(warp * self.filter_bytes + tap * 4 + copy * 4)
        band = Register("band_address", "uint32", address).value
        address = self.smem + to_uint32(self.zeros + self.pitch + warp * self.plane_bytes + lane // 16 * 16)
        plane = Register("plane_address", "uint32", address).value
        zeros = self.smem + to_uint32(self.zeros)
        diagonals = [d for d in range(1 - self.mmas_x, 2 * self.mmas_k) if self.has_taps(d)]
        places = {
            d: i
            for i, d in enumerate(
                sorted(
                    {
                        n
                        for d in range(1 - self.mmas_x, 2 * self.mmas_k - 1)
                        if d in diagonals or d + 1 in diagonals
                        for n in (d, d + 1)
                    }
                )
            )
        }
        taps, pixels = (
            allocate("band", len(places), "uint32"),
            allocate("rows", self.images * self.mmas_k * 4, "uint32"),
        )
        with serial_loop(self.rows.taps, "tap_row") as tap_row:
            for diagonal, place in places.items():
                offset = tap_row * (COPIES * 2 * self.row_taps) + diagonal * (MMA_N * COPIES * 2)
                emit_ptx("ld.shared.b32", taps[place], band + to_uint32(offset))
            for mma_y in range(self.mmas_y):
                first = mma_y * MMA_M + tap_row + int(self.rows.offset)
                with if_(logical_and(first + MMA_M > 0, first < self.window)):
                    row = first + lane % 16
                    is_inside = logical_and(row >= 0, row < self.window)
                    for image in range(self.images):
                        line = plane + to_uint32((image * self.window + row) * self.pitch)
                        line = Register("row_address", "uint32", T.Select(is_inside, line, zeros)).value
                        for j in range(self.mmas_k):
                            registers = [pixels[(image * self.mmas_k + j) * 4 + e] for e in range(4)]
                            ldmatrix_x4(registers, line + to_uint32(j * MMA_K * 2))
                    for j in range(self.mmas_k):
                        for image in range(self.images):
                            registers = [pixels[(image * self.mmas_k + j) * 4 + e] for e in range(4)]
                            for i in range(self.mmas_x):
                                diagonal = 2 * j - i
                                if diagonal in diagonals or diagonal + 1 in diagonals:
                                    fragment = [taps[places[diagonal + half]] for half in range(2)]
                                    atom.emit(self.accumulators(image, mma_y, i), registers, fragment)

    def accumulators(self, image: int, mma_y: int, mma_x: int) -> list[Expr]:
        """Return the accumulators of an instruction."""
        first = ((image * self.mmas_y + mma_y) * self.mmas_x + mma_x) * 4
        return [self.sums[first + e] for e in range(4)]

    @property
    def tile_rows(self) -> int:
        """Rows of Y of a tile."""
        return self.mmas_y * MMA_M

    @property
    def tile_columns(self) -> int:
        """Columns of Y of a tile."""
        return self.mmas_x * MMA_N

    def staged_address(self, channel: Expr, octet: Expr, line: Expr, column: Expr) -> Expr:
        """Return the address in shared memory of a result of the CTA's tile, whose lines are those of all images."""
        pitch = int(self.config.staged_pitch)
        plane = self.images * self.tile_rows * pitch
        return self.smem + to_uint32((channel * plane + octet * STAGED_PAD + line * pitch + column) * 4)

    def stage_sums(self) -> None:
        """Store the sums to shared memory, as planes of channels."""
        lane, warp = self.position.lane, self.position.warp
        for image in range(self.images):
            for mma_y in range(self.mmas_y):
                for mma_x in range(self.mmas_x):
                    sums = [T.reinterpret("uint32", value) for value in self.accumulators(image, mma_y, mma_x)]
                    for half in range(2):
                        line = image * self.tile_rows + mma_y * MMA_M + half * 8 + lane // 4
                        address = self.staged_address(warp, warp // OCTET, line, mma_x * MMA_N + lane % 4 * 2)
                        emit_ptx("st.shared.v2.b32", address, *sums[2 * half : 2 * half + 2])

    def store_tile(self) -> None:
        """Apply the epilogue to the staged sums, and store eight channels of each pixel at once."""
        height, width = self.conv.output_size
        words, values, packed = (
            allocate(n, OCTET, d) for n, d in (("words", "uint32"), ("values", "float32"), ("packed", "uint32"))
        )
        ops = EpilogueOps.from_workload(self.conv).bind_tensor_args(self.arguments, uses_registers=True)

        def put(_: int, item: Expr) -> None:
            pixel, octet = item // (MMA_N * self.octets) * MMA_N + item % MMA_N, item // MMA_N % self.octets
            line, column = pixel // self.tile_columns, pixel % self.tile_columns
            image = self.image + line // self.tile_rows
            y, x = self.tile_y * self.tile_rows + line % self.tile_rows, self.tile_x * self.tile_columns + column
            with if_(logical_and(image < self.conv.N, y < height, x < width)):
                for e in range(OCTET):
                    emit_ptx("ld.shared.b32", words[e], self.staged_address(octet * OCTET + e, octet, line, column))
                    store(values, e, T.reinterpret("float32", words[e]))
                channel = self.channel + octet * OCTET
                index = ((image * height + y) * width + x) * self.conv.O + channel
                apply_to_vector(ops, self.arguments, channel, index, OCTET, values, packed)
                store_global(self.arguments["Y"], index, packed, OCTET)

        count = self.images * self.tile_rows * self.tile_columns * self.octets
        self.copy_items(count, 1, lambda i, item: None, put)


class ChannelsFirstBandKernel(BandKernel):
    """Emitter of the kernel for arrays with channels first."""

    def copy_pixels(self) -> None:
        """Store the window of X in vectors along the rows, with zeros around it."""
        conv, width, row_vectors = self.conv, self.config.input_vector, MMA_K * self.mmas_k // self.config.input_vector
        words_per_vector = ceil_div(width, 2)
        words = allocate("pixels", ROW_BATCH * words_per_vector, "uint32")
        one = allocate("vector", words_per_vector, "uint32")
        height, columns = conv.input_size
        first_row, first_column = self.rows.first(self.tile_y), self.columns.first(self.tile_x)
        lines = self.images * self.window

        def load(i: int, item: Expr) -> None:
            place, line = item % row_vectors * width, item // row_vectors % lines
            channel = item // (row_vectors * lines)
            row, image, column = first_row + line % self.window, self.image + line // self.window, first_column + place
            for word in range(words_per_vector):
                store(words, i * words_per_vector + word, T.uint32(0))
            with if_(logical_and(image < conv.N, row >= 0, row < height, column >= 0, column < columns)):
                offset = ((image * conv.C + self.channel + channel) * height + row) * columns + column
                load_global(one, self.arguments["X"], offset, width)
                for word in range(words_per_vector):
                    store(words, i * words_per_vector + word, one[word])

        def put(i: int, item: Expr) -> None:
            line, channel = item // row_vectors % lines, item // (row_vectors * lines)
            offset = channel * self.plane_bytes + line * self.pitch + item % row_vectors * (2 * width)
            for word in range(words_per_vector):
                store(one, word, words[i * words_per_vector + word])
            store_shared(self.smem + to_uint32(self.zeros + self.pitch + offset), one, 2 * width)

        self.copy_items(self.channels * lines * row_vectors, ROW_BATCH, load, put)

    def store_tile(self) -> None:
        """Apply the epilogue to the staged sums, and store vectors of the rows."""
        height, columns = self.conv.output_size
        width = math.gcd(columns, MAX_VECTOR)
        words, values, packed = (
            allocate(n, MAX_VECTOR, d) for n, d in (("words", "uint32"), ("values", "float32"), ("packed", "uint32"))
        )
        ops = EpilogueOps.from_workload(self.conv).bind_tensor_args(self.arguments, uses_registers=True)
        row_vectors, lines = self.tile_columns // width, self.images * self.tile_rows

        def put(_: int, item: Expr) -> None:
            column, line = item % row_vectors * width, item // row_vectors % lines
            number = item // (row_vectors * lines)
            image, channel = self.image + line // self.tile_rows, self.channel + number
            y, x = self.tile_y * self.tile_rows + line % self.tile_rows, self.tile_x * self.tile_columns + column
            with if_(logical_and(image < self.conv.N, y < height, x < columns)):
                load_shared(words, self.staged_address(number, number // OCTET, line, column), width * 4)
                for e in range(width):
                    store(values, e, T.reinterpret("float32", words[e]))
                index = ((image * self.conv.O + channel) * height + y) * columns + x
                apply_to_pixels(ops, self.arguments, channel, index, width, values, packed)
                store_global(self.arguments["Y"], index, packed, width)

        self.copy_items(self.channels * lines * row_vectors, 1, lambda i, item: None, put)


@dataclasses.dataclass(frozen=True)
class BatchedCopies:
    """Items that the threads of a CTA load, a batch at a time, before they store them to shared memory."""

    thread: Expr
    num_threads: int
    count: int
    batch: int  # items of a thread in a batch
    load: CopyAction
    put: CopyAction

    def emit(self) -> None:
        """Emit all copies."""
        with serial_loop(self._num_batches, "batch") as number:
            self._emit_batch(self.load, number)
            self._emit_batch(self.put, number)

    def load_first(self) -> None:
        """Emit the loads of the first batch."""
        self._emit_batch(self.load, 0)

    def finish(self) -> None:
        """Emit what `load_first` leaves."""
        self._emit_batch(self.put, 0)
        if self._num_batches > 1:
            with serial_loop(self._num_batches - 1, "batch") as number:
                self._emit_batch(self.load, number + 1)
                self._emit_batch(self.put, number + 1)

    @property
    def _num_batches(self) -> int:
        return ceil_div(self.count, self.batch * self.num_threads)

    def _emit_batch(self, action: CopyAction, number: Expr) -> None:
        for i in range(self.batch):
            item = (number * self.batch + i) * self.num_threads + self.thread
            with if_(True if self.count % (self.batch * self.num_threads) == 0 else item < self.count):
                action(i, item)
