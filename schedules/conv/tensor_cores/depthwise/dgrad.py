"""Gradients of inputs of depthwise convolutions with large filters as products with band matrices, by mma.sync.

For a channel and a row of the filter, a row of dX is a row of dY times a band matrix: element (column of dY, column of
dX) is the tap at their distance, or zero. The rows of the product are 16 rows of dX, and its reduction runs over the
columns of dY. Some products are with zeros, but mma.sync takes as long for 2,048 of them as the FMA units for 64.

A CTA computes a tile of rows and columns of some images, a warp for each of eight channels. dY and the filters are
rearranged in shared memory as planes of channels. Two copies of each filter row, one of them shifted by one tap, have
all pairs of neighbouring taps in aligned words, which are in turn those of the copies. Such words are the fragments of
the band matrix. Fragments of the same distance from the diagonal are the same, so that a lane loads few words for each
row of the filter.

An infinite element of dY makes those of its tile NaN that the filter does not reach, as it is multiplied by zeros.

Source: PTX ISA, "mma.sync" and "ldmatrix".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.target import H200, L2_CLOCKS
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    build_schedule,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    logical_and,
    serial_loop,
    store,
    store_global,
    to_uint32,
)
from ...estimated_config import EstimatedTileConfig
from ...tile_config import Rule
from ..gemm.atoms import MmaSyncAtom, ldmatrix_x4
from ..gemm.cta import allocate_smem, allow_dependent_launch, open_cta
from ..gemm.epilogue_ops import EpilogueOps, apply_to_vector

OCTET = 8  # channels of a CTA, each of a warp
MMA_M, MMA_N, MMA_K = 16, 8, 16
COPIES = 2  # of the filters
STAGED_PAD = 8  # words after a row of dX in shared memory, against bank conflicts
MIN_TAPS = 25  # with fewer, the FMA units are as fast
MAX_ACCUMULATORS = 128
MAX_SHARED_BYTES = 227 << 10
CopyAction = Callable[[int, Expr], None]  # from an item's number in its batch, and its index
FILTER_BATCH, PIXEL_BATCH = 16, 4  # loads of a thread that are under way at a time


@dataclasses.dataclass(frozen=True)
class BandAxis:
    """Rows or columns of dX in tiles, for one config or as columns for many, and the window of dY below a tile."""

    size: int  # elements of dX
    source: int  # elements of dY
    taps: int
    pad: int  # zeros before dY
    tile: Any  # elements of a tile of dX

    @property
    def tiles(self) -> Any:
        """Tiles of the axis; the window of the only one is dY without padding."""
        return ceil_div(self.size, self.tile)

    @property
    def window(self) -> Any:
        """Elements of dY of a window."""
        return np.where(self.tiles == 1, self.source, self.tile + self.taps - 1)

    @property
    def offset(self) -> Any:
        """Place in the window of the element of dY that the first tap connects with the first element of dX."""
        return np.where(self.tiles == 1, -self.pad, 0)

    def first(self, index: Expr) -> Expr:
        """Return the element of dY at the start of the window of a tile."""
        return 0 if self.tiles == 1 else index * int(self.tile) - self.pad


@dataclasses.dataclass(frozen=True)
class BandConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("images", "mmas_y", "mmas_x")

    images: Any  # images of a CTA
    mmas_y: Any  # instructions along the rows of dX of an image
    mmas_x: Any  # instructions along the columns of dX

    @classmethod
    def list_options(cls, w: InputGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        return {"images": (1, 2, 4, 8), "mmas_y": (1, 2, 4), "mmas_x": (1, 2, 4, 7)}

    @classmethod
    def list_required(cls, w: InputGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (f"at most {MAX_ACCUMULATORS} accumulators", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: InputGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [("a CTA has at most all images", lambda t: t.images <= w.N)]

    @property
    def convolution(self) -> Conv:
        """The convolution of dY."""
        conv = self.w.direct_convolution
        assert conv
        return conv

    @property
    def axes(self) -> tuple[BandAxis, BandAxis]:
        """Rows and columns."""
        conv, tiles = self.convolution, (self.mmas_y * MMA_M, self.mmas_x * MMA_N)
        values = zip(conv.output_size, conv.input_size, conv.kernel, conv.pad_low, tiles, strict=True)
        rows, columns = (BandAxis(*value) for value in values)
        return rows, columns

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return OCTET + 0 * self.images

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        rows, columns = self.axes
        return ceil_div(self.w.N, self.images) * (self.w.C // OCTET) * rows.tiles * columns.tiles

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
        """Bytes of a row of dY, an odd multiple of 16 against bank conflicts."""
        return 2 * MMA_K * self.mmas_k + 16

    @property
    def filter_bytes(self) -> Any:
        """Bytes of the filters of a channel."""
        return self.axes[0].taps * COPIES * 2 * self.row_taps

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory: filters, a row of zeros and dY, later dX."""
        plane_bytes = self.images * self.axes[0].window * self.pitch_bytes
        staged_bytes = OCTET * self.images * self.mmas_y * MMA_M * (self.mmas_x * MMA_N + STAGED_PAD) * 4
        return np.maximum(OCTET * (self.filter_bytes + plane_bytes) + self.pitch_bytes, staged_bytes)

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: products at a third of the peak rate, and copies."""
        rows = self.axes[0]
        resident = np.maximum(1, np.minimum(MAX_SHARED_BYTES // (self.smem_bytes + 1024), 2))
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        products = rows.taps * self.images * self.mmas_y * self.mmas_k * (self.mmas_x + 1) * OCTET
        copies = self.smem_bytes / 32 + 8 * L2_CLOCKS
        return blocks_per_sm * products * 3 + ceil_div(blocks_per_sm, resident) * copies


def has_bands(w: InputGradient) -> bool:
    """Whether each channel has one filter, of stride and dilation 1, and a config fits shared memory."""
    conv = w.direct_convolution
    if conv is None or conv.has_large_tensors or set(w.dilation) != {1}:
        return False
    return w.C == w.O == w.groups > 1 and w.C % OCTET == 0 and BandConfig.has_config(w)


def has_large_filter(w: InputGradient) -> bool:
    """Return whether tensor cores may be faster than the FMA units."""
    return w.kernel[0] * w.kernel[1] >= MIN_TAPS


@schedule(
    "conv2d_dgrad",
    dtypes=("float16", "bfloat16"),
    usage=BandConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_bands),
    search_if=has_large_filter,
    starting_configs=BandConfig.list_starting_configs,
    supersedes=("implicit_gemm",),
    device_kinds=("cuda",),
    min_arch=80,
)
def depthwise_mma_sync(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Multiply rows of dY with band matrices of the taps of a filter row, for each channel."""
    config = BandConfig.declare_knobs(w, k)
    dy, filters = w.OPERANDS
    roles = {dy: "X", filters: "K", w.RESULT: "Y"}

    def emit(arguments: dict[str, Buffer]) -> None:
        BandKernel(config, {roles.get(name, name): each for name, each in arguments.items()}).emit()

    return build_schedule(w, emit)


class BandKernel:
    """Emitter of the kernel."""

    def __init__(self, config: BandConfig, arguments: dict[str, Buffer]) -> None:
        self.config, self.arguments, self.conv = config, arguments, config.convolution
        self.rows, self.columns = config.axes
        self.images, self.mmas_y, self.mmas_x = int(config.images), int(config.mmas_y), int(config.mmas_x)
        self.mmas_k, self.row_taps, self.pitch = int(config.mmas_k), int(config.row_taps), int(config.pitch_bytes)
        self.window, self.filter_bytes = int(self.rows.window), int(config.filter_bytes)
        self.zeros = OCTET * self.filter_bytes  # offset of the row of zeros in shared memory
        self.plane_bytes = self.images * self.window * self.pitch

    def emit(self) -> None:
        """Emit the kernel."""
        config, num_octets = self.config, self.conv.C // OCTET
        with open_cta(int(config.num_blocks), int(config.num_threads), 1, splits_in_cluster=False) as cta:
            allow_dependent_launch()
            self.smem, self.position = allocate_smem(int(config.smem_bytes)), cta.thread
            self.channel = Register("channel", value=cta.index % num_octets * OCTET).value
            tile, tiles_x, tiles_y = cta.index // num_octets, int(self.columns.tiles), int(self.rows.tiles)
            self.tile_x, self.tile_y = tile % tiles_x, tile // tiles_x % tiles_y
            self.image = tile // (tiles_x * tiles_y) * self.images
            self.clear_filters()
            self.copy_pixels()
            emit_call(T.cuda.cta_sync())
            self.copy_filters()
            emit_call(T.cuda.cta_sync())
            self.sums = allocate("sums", int(config.num_accumulators), "float32")
            fill_zeros(self.sums, int(config.num_accumulators))
            self.multiply()
            emit_call(T.cuda.cta_sync())
            self.store_sums()

    def copy_items(self, count: int, batch: int, load: CopyAction, put: CopyAction) -> None:
        """Let the threads load items, `batch` at a time, before they store them to shared memory."""
        num_threads = int(self.config.num_threads)
        with serial_loop(ceil_div(count, batch * num_threads), "batch") as number:
            for action in (load, put):
                for i in range(batch):
                    item = (number * batch + i) * num_threads + self.position.thread
                    with if_(True if count % (batch * num_threads) == 0 else item < count):
                        action(i, item)

    def clear_filters(self) -> None:
        """Store zeros to the place of the filters, and to the row of zeros behind them."""
        zeros = [T.uint32(0)] * 4

        def put(_: int, item: Expr) -> None:
            emit_ptx("st.shared.v4.b32", self.smem + to_uint32(item * 16), *zeros)

        self.copy_items((self.zeros + self.pitch) // 16, 1, lambda i, item: None, put)

    def copy_filters(self) -> None:
        """Store the flipped taps of each filter row, in the second copy one place earlier."""
        height, width = self.conv.kernel
        loaded = allocate("taps", FILTER_BATCH, "uint16")
        before = MMA_N * self.mmas_x - 1 + int(self.columns.offset)  # zeros before the first tap

        def load(i: int, item: Expr) -> None:
            pointer = self.arguments["K"].access_ptr("r", offset=self.channel * (height * width) + item)
            emit_ptx("ld.global.nc.b16", loaded[i], pointer)

        def put(i: int, item: Expr) -> None:
            channel, row = item // (height * width), height - 1 - item // width % height
            place = before + width - 1 - item % width
            first = channel * self.filter_bytes + row * (COPIES * 2 * self.row_taps)
            for copy in range(COPIES):
                offset = first + (place - copy) // 2 * 8 + copy * 4 + (place - copy) % 2 * 2
                with if_(logical_and(place >= copy, place < self.row_taps)):
                    emit_ptx("st.shared.b16", self.smem + to_uint32(offset), loaded[i])

        self.copy_items(OCTET * height * width, FILTER_BATCH, load, put)

    def copy_pixels(self) -> None:
        """Store the window of dY as planes of channels, two neighbouring pixels at a time, with zeros around it."""
        conv, pairs = self.conv, MMA_K // 2 * self.mmas_k
        (height, width), words = conv.input_size, allocate("pixels", PIXEL_BATCH * 2 * 4, "uint32")
        first_row, first_column = self.rows.first(self.tile_y), self.columns.first(self.tile_x)
        window_columns = int(self.columns.window)

        def load(i: int, item: Expr) -> None:
            place, line = item % pairs * 2, item // pairs
            row, image = first_row + line % self.window, self.image + line // self.window
            for e in range(2):
                column = first_column + place + e
                for word in range(4):
                    store(words, (i * 2 + e) * 4 + word, T.uint32(0))
                tests = (image < conv.N, row >= 0, row < height, column >= 0, column < width)
                with if_(logical_and(*tests, place + e < window_columns)):
                    offset = ((image * height + row) * width + column) * conv.C + self.channel
                    registers = [words[(i * 2 + e) * 4 + word] for word in range(4)]
                    emit_ptx("ld.global.nc.v4.b32", *registers, self.arguments["X"].access_ptr("r", offset=offset))

        def put(i: int, item: Expr) -> None:
            first = self.zeros + self.pitch + item // pairs * self.pitch + item % pairs * 4
            for channel in range(OCTET):
                left, right = (words[(i * 2 + e) * 4 + channel // 2] for e in range(2))
                if channel % 2:
                    pair = T.shift_right(left, T.uint32(16)) | right & T.uint32(0xFFFF0000)
                else:
                    pair = left & T.uint32(0xFFFF) | T.shift_left(right, T.uint32(16))
                emit_ptx("st.shared.b32", self.smem + to_uint32(first + channel * self.plane_bytes), pair)

        self.copy_items(self.images * self.window * pairs, PIXEL_BATCH, load, put)

    def has_taps(self, diagonal: int) -> bool:
        """Return whether a part of the band, of 8 × 8 elements at a distance from the diagonal, has taps."""
        nearest = MMA_N * diagonal - int(self.columns.offset)
        return nearest - MMA_N < self.columns.taps and nearest + MMA_N > 0

    def multiply(self) -> None:
        """Multiply the rows of dY of each row of the filter by its band matrix; a warp computes a channel."""
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

    def store_sums(self) -> None:
        """Exchange the sums in shared memory, apply the epilogue and store the channels of each pixel at once."""
        lane, warp, (height, width) = self.position.lane, self.position.warp, self.conv.output_size
        tile_rows, tile_columns = self.mmas_y * MMA_M, self.mmas_x * MMA_N
        pitch, num_rows = tile_columns + STAGED_PAD, self.images * tile_rows
        for image in range(self.images):
            for mma_y in range(self.mmas_y):
                for mma_x in range(self.mmas_x):
                    sums = [T.reinterpret("uint32", value) for value in self.accumulators(image, mma_y, mma_x)]
                    for half in range(2):
                        row = warp * num_rows + image * tile_rows + mma_y * MMA_M + half * 8 + lane // 4
                        address = self.smem + to_uint32((row * pitch + mma_x * MMA_N + lane % 4 * 2) * 4)
                        emit_ptx("st.shared.v2.b32", address, *sums[2 * half : 2 * half + 2])
        emit_call(T.cuda.cta_sync())
        words, values, packed = (
            allocate(n, OCTET, d) for n, d in (("words", "uint32"), ("values", "float32"), ("packed", "uint32"))
        )
        ops = EpilogueOps.from_workload(self.conv).bind_tensor_args(self.arguments, uses_registers=True)

        def put(_: int, item: Expr) -> None:
            row, column = item // tile_columns % tile_rows, item % tile_columns
            image = self.image + item // (tile_columns * tile_rows)
            y, x = self.tile_y * tile_rows + row, self.tile_x * tile_columns + column
            with if_(logical_and(image < self.conv.N, y < height, x < width)):
                first = self.smem + to_uint32((item // tile_columns * pitch + column) * 4)
                for e in range(OCTET):
                    emit_ptx("ld.shared.b32", words[e], first + to_uint32(e * num_rows * pitch * 4))
                    store(values, e, T.reinterpret("float32", words[e]))
                index = ((image * height + y) * width + x) * self.conv.O + self.channel
                apply_to_vector(ops, self.arguments, self.channel, index, OCTET, values, packed)
                store_global(self.arguments["Y"], index, packed, OCTET)

        self.copy_items(self.images * tile_rows * tile_columns, 1, lambda i, item: None, put)
