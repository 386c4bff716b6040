"""Channels-first arrays for channels-last kernels: operands and output are transposed by launches of their own.

A channels-last kernel reads neighbouring channels of a pixel in one vector, which tensor cores need. In a
channels-first array the pixels of a channel are neighbours. The conversion is a matrix transpose for each image: (C,
pixels) becomes (pixels, C), and the output is transposed back. The weight is transposed once if it does not change
between calls.

A block transposes a tile through shared memory. Each thread loads vectors along the rows of the source and stores
vectors along the rows of the destination, of 16 bytes where sizes permit. Shared memory holds 32-bit words: one
element, or those of two neighbouring source rows if elements have 16 bits. Its pitch of 33 words and the arrangement
of lanes make both accesses free of bank conflicts. Schedules that also run on OpenCL use `emit_portable_transpose`,
which accesses one element at a time.

Along an axis with one tap and a stride, a filter reads some of the pixels. The others are left out: the destination is
the X of a convolution without that stride, which `skip_unread_pixels` returns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST, to_storage_order

from ..primitives import disable_buffer_reuse, mark_constant_args
from ..tir_builder import (
    Buffer,
    Expr,
    allocate,
    build_schedule,
    emit_call,
    emit_ptx,
    if_,
    is_below,
    load_global,
    logical_and,
    store,
    store_element,
    store_global,
    thread_axis,
)

EmitKernels = Callable[[dict[str, Buffer]], None]
EmitTranspose = Callable[..., None]  # with the arguments of `emit_transpose`

NUM_WARPS = 8  # per block
TILE_COLUMNS = 64  # columns of the source per block
TILE_WORDS = 32  # 32-bit words per column of the tile
PITCH = TILE_WORDS + 1  # words from one column to the next in shared memory
VECTOR_BYTES = 16
SECTOR_BYTES = 32  # unit of accesses to global memory
# Costs of a transpose, fitted to timings of eight layers in float16 with and without conversions on an H100.
TRANSPOSE_LAUNCH_US, TRANSPOSE_BYTES_PER_US = 1.1, 2.75e6
PORTABLE_TILE = 32  # rows and columns of the source per block of `emit_portable_transpose`


def skip_unread_pixels(w: Conv) -> Conv:
    """Return the convolution of only those pixels that its filters read: axes with one tap have no stride.

    Axes with padding and inputs with cached frames or upsampling are left as they are.

    Examples:
        >>> from tvmconv import parse
        >>> skip_unread_pixels(parse("conv2d:1x64x56x56,64x64x1x1,s2,p0,f16")).text
        'conv2d:1x64x28x28,64x64x1x1,s1,p0,f16'
    """
    if not w.reads_x_only:
        return w
    sizes, stride = list(w.input_size), list(w.stride)
    for axis, taps in enumerate(w.kernel):
        if taps == 1 and w.pad_low[axis] == w.pad_high[axis] == 0:
            sizes[axis], stride[axis] = w.output_size[axis], 1
    return w.with_fields(**dict(zip(w.SPACE, sizes, strict=True)), stride=tuple(stride))


def estimate_transpose_us(nbytes: float, source_bytes: float | None = None) -> float:
    """Return the estimated microseconds of the transpose of an array of `nbytes` by a launch of its own.

    Args:
        nbytes: Bytes of the destination.
        source_bytes: Bytes that are read; by default, those of the destination.
    """
    return TRANSPOSE_LAUNCH_US + (nbytes + (nbytes if source_bytes is None else source_bytes)) / TRANSPOSE_BYTES_PER_US


def estimate_input_conversion_us(w: Conv) -> float:
    """Return the estimated microseconds of the conversion of a channels-first X; 0 if X is channels last."""
    if w.input_layout == CHANNELS_LAST or min(w.C, math.prod(w.input_size)) == 1:
        return 0.0
    return estimate_pixel_conversion_us(w)


def estimate_pixel_conversion_us(w: Conv) -> float:
    """Return the estimated microseconds of the transpose of the pixels that a convolution reads.

    Lines that a stride skips are not read, apart from the sectors at their ends. The layout of `w` does not matter.
    """
    itemsize, compact = get_itemsize(w.storage), skip_unread_pixels(w)
    line_bytes = w.input_size[-1] * itemsize
    lines = math.prod((w.N, w.C, *compact.input_size[:-1]))
    source_bytes = min(lines * (line_bytes + SECTOR_BYTES), math.prod((w.N, w.C, *w.input_size)) * itemsize)
    return estimate_transpose_us(math.prod((w.N, w.C, *compact.input_size)) * itemsize, source_bytes)


def build_channels_last_schedule(
    w: Conv,
    emit_kernels: EmitKernels,
    *,
    converts_input: bool = True,
    converts_output: bool = True,
    is_portable: bool = False,
    skips_unread_pixels: bool = False,
) -> Schedule:
    """Return the schedule of kernels that compute `w.to_channels_last()`, with conversions of channels-first arrays.

    The weight is converted if it is channels first, as X is.

    Args:
        w: The workload.
        emit_kernels: Function that emits the kernels; it receives buffers by name. Those that are converted are
            channels last.
        converts_input: Whether X is converted if it is channels first.
        converts_output: Whether residuals and the output are converted if they are channels first.
        is_portable: Whether the conversions run on all kinds of devices.
        skips_unread_pixels: Whether a converted X is that of `skip_unread_pixels`, for kernels of that convolution.
            Portable conversions have all pixels.
    """
    if CHANNELS_FIRST not in (w.input_layout, w.output_layout):
        return build_schedule(w, emit_kernels)
    converts_input, converts_output = (
        converts and layout == CHANNELS_FIRST
        for converts, layout in ((converts_input, w.input_layout), (converts_output, w.output_layout))
    )
    pixels = PixelSteps.from_workload(w) if skips_unread_pixels and not is_portable else None
    conversions = _Conversions(
        w, converts_input, converts_output, emit_portable_transpose if is_portable else emit_transpose, pixels
    )
    schedule = build_schedule(w, lambda arguments: conversions.emit(arguments, emit_kernels))
    mark_constant_args(schedule, "K")
    disable_buffer_reuse(schedule)  # TVM does not see the accesses of TMA
    return schedule


@dataclasses.dataclass(frozen=True)
class PixelSteps:
    """Pixels of an image at the steps of strides along its axes."""

    source_size: tuple[int, ...]  # pixels of the image along each spatial axis
    size: tuple[int, ...]  # pixels that are read along each axis
    stride: tuple[int, ...]  # distance of neighbouring pixels that are read, along each axis

    @classmethod
    def from_workload(cls, w: Conv) -> PixelSteps | None:
        """Return the pixels that a convolution reads along its axes with one tap; None if it reads all pixels."""
        compact = skip_unread_pixels(w)
        steps = tuple(s if after == 1 else 1 for s, after in zip(w.stride, compact.stride, strict=True))
        return cls(w.input_size, compact.input_size, steps) if compact.input_size != w.input_size else None

    def count_vector_pixels(self, max_elements: int) -> int:
        """Return how many of the pixels that are read an aligned vector of at most `max_elements` of a line has."""
        vector = math.gcd(self.source_size[-1], max_elements)
        return vector // self.stride[-1] if vector % self.stride[-1] == 0 else 1

    def locate(self, pixel: Expr) -> Expr:
        """Return the position in the image of one of the pixels that are read."""
        position: Expr = 0
        for axis, stride in enumerate(self.stride):
            step = pixel // math.prod(self.size[axis + 1 :])
            step = step % self.size[axis] if axis else step
            position = position + step * (stride * math.prod(self.source_size[axis + 1 :]))
        return position


@dataclasses.dataclass(frozen=True)
class _Conversions:
    """Conversions of a workload's arrays."""

    w: Conv
    converts_input: bool  # whether X is converted
    converts_output: bool  # whether residuals and the output are converted
    emit_transpose: EmitTranspose  # function that emits a conversion
    pixels: PixelSteps | None = None  # pixels of X that are converted; None for all

    def emit(self, arguments: dict[str, Buffer], emit_kernels: EmitKernels) -> None:
        """Emit the conversions of the arguments, the kernels, and the conversion of the output."""
        w, shapes = self.w, {}
        if w.input_layout == CHANNELS_FIRST:
            shapes["K"] = w.weight_shape
        if self.converts_input:
            shapes["X"] = (w.N, w.C, *self.pixels.size) if self.pixels else w.input_shape
        if self.converts_output:
            residuals = [op.name for op in epilogue.get_ops(w.epilogue) if op.argument_kind == "output"]
            shapes |= dict.fromkeys([*residuals, "Y"], w.output_shape)
        converted = dict(arguments)
        for name, shape in shapes.items():
            batch, channels, *space = shape
            if self._is_same_in_both_layouts(shape) and not (name == "X" and self.pixels):
                continue
            converted[name] = allocate(f"{name}_last", to_storage_order(CHANNELS_LAST, shape), w.storage, "global")
            if name != "Y":
                sizes = batch, channels, math.prod(space)
                options: dict[str, Any] = {"pixels": self.pixels} if name == "X" and self.pixels else {}
                self.emit_transpose(arguments[name], converted[name], *sizes, waits=name != "K", **options)
        emit_kernels(converted)
        if self.converts_output and not self._is_same_in_both_layouts(w.output_shape):
            self.emit_transpose(converted["Y"], arguments["Y"], w.N, math.prod(w.output_size), w.O)

    def _is_same_in_both_layouts(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor (N, C, space) has one channel or one pixel, and its axes are of no importance.

        Kernels of portable schedules index arrays by their axes.
        """
        return min(shape[1], math.prod(shape[2:])) == 1 and self.emit_transpose is not emit_portable_transpose


def emit_transpose(
    source: Buffer,
    destination: Buffer,
    batch: int,
    rows: int,
    columns: int,
    *,
    waits: bool = True,
    pixels: PixelSteps | None = None,
) -> None:
    """Emit the kernel of `destination[b, column, row] = source[b, row, column]`.

    Args:
        source: Array of batch × rows × columns elements of 16 or 32 bits; more columns if it has unread pixels.
        destination: Array of batch × columns × rows elements.
        batch: Number of matrices.
        rows: Rows of the source.
        columns: Columns of the source that are read.
        waits: Whether the kernel may start before the previous launch ends, and then waits for it.
        pixels: Columns that are read, as pixels of an image; None for all columns.
    """
    itemsize = get_itemsize(str(source.dtype))
    tile_rows = TILE_WORDS * 4 // itemsize
    tiles_rows, tiles_columns = ceil_div(rows, tile_rows), ceil_div(columns, TILE_COLUMNS)
    with (
        thread_axis(batch * tiles_rows * tiles_columns, "blockIdx.x") as block,
        thread_axis(NUM_WARPS * WARP_SIZE, "threadIdx.x") as thread,
    ):
        tile = allocate("tile", TILE_COLUMNS * PITCH, "uint32", "shared")
        if waits:
            emit_ptx("griddepcontrol.wait")
            emit_ptx("griddepcontrol.launch_dependents")
        transpose = _TileTranspose(
            tile,
            (rows, columns),
            itemsize,
            first_row=block // tiles_columns % tiles_rows * tile_rows,
            first_column=block % tiles_columns * TILE_COLUMNS,
            warp=thread // WARP_SIZE,
            lane=thread % WARP_SIZE,
            pixels=pixels,
        )
        image = block // (tiles_rows * tiles_columns)
        transpose.load(source, image)
        emit_call(T.cuda.cta_sync())
        transpose.store(destination, image)


def emit_portable_transpose(
    source: Buffer, destination: Buffer, batch: int, rows: int, columns: int, *, waits: bool = True
) -> None:
    """Emit the kernel of `emit_transpose` without PTX instructions.

    A warp reads neighbouring columns of a source row, and stores neighbouring rows of a column. The arguments are those
    of `emit_transpose`; both arrays may have further axes, and no launch starts early.
    """
    tiles_rows, tiles_columns = ceil_div(rows, PORTABLE_TILE), ceil_div(columns, PORTABLE_TILE)
    with (
        thread_axis(batch * tiles_rows * tiles_columns, "blockIdx.x") as block,
        thread_axis(NUM_WARPS, "threadIdx.y") as warp,
        thread_axis(WARP_SIZE, "threadIdx.x") as lane,
    ):
        tile = allocate("tile", (PORTABLE_TILE, PORTABLE_TILE + 1), str(source.dtype), "shared")
        image = block // (tiles_rows * tiles_columns)
        first_row = block // tiles_columns % tiles_rows * PORTABLE_TILE
        first_column = block % tiles_columns * PORTABLE_TILE
        for step in range(PORTABLE_TILE // NUM_WARPS):
            row, column = first_row + step * NUM_WARPS + warp, first_column + lane
            with if_(logical_and(is_below(row, rows, PORTABLE_TILE), is_below(column, columns, PORTABLE_TILE))):
                value = source[_unravel(source, image, row * columns + column)]
                store_element(tile, (step * NUM_WARPS + warp, lane), value)
        for step in range(PORTABLE_TILE // NUM_WARPS):
            row, column = first_row + lane, first_column + step * NUM_WARPS + warp
            with if_(logical_and(is_below(row, rows, PORTABLE_TILE), is_below(column, columns, PORTABLE_TILE))):
                index = _unravel(destination, image, column * rows + row)
                store_element(destination, index, tile[lane, step * NUM_WARPS + warp])


def _unravel(array: Buffer, image: Expr, element: Expr) -> tuple[Expr, ...]:
    """Return the index in an array of an element of a matrix of the batch, whose axes are all but the first."""
    indices: list[Expr] = []
    for size in [int(size) for size in array.shape[:1:-1]]:
        indices.insert(0, element % size)
        element = element // size
    return image, element, *indices


@dataclasses.dataclass(frozen=True)
class _TileTranspose:
    """The work of a thread on a tile: a column of the tile is contiguous in shared memory."""

    tile: Buffer  # shared memory, `TILE_COLUMNS` × `PITCH` words
    shape: tuple[int, int]  # rows and columns of the source matrix
    itemsize: int  # bytes per element
    first_row: Expr  # first row of the tile
    first_column: Expr  # first column of the tile
    warp: Expr  # index of the thread's warp in the block
    lane: Expr  # index of the thread in its warp
    pixels: PixelSteps | None = None  # columns that are read; None for all

    @property
    def rows_per_word(self) -> int:
        """Source rows whose elements share a word."""
        return 4 // self.itemsize

    def load(self, source: Buffer, image: Expr) -> None:
        """Load the tile; a warp reads 32 columns of as many words' rows as a vector has columns.

        All loads of a thread are in flight before it stores the first one. A vector of pixels has those between them.
        """
        rows, columns = self.shape
        source_columns = math.prod(self.pixels.source_size) if self.pixels else columns
        max_elements = VECTOR_BYTES // self.itemsize
        vector = self.pixels.count_vector_pixels(max_elements) if self.pixels else math.gcd(columns, max_elements)
        distance = self.pixels.stride[-1] if self.pixels and vector > 1 else 1  # of neighbouring columns in a vector
        lanes_along_columns, num_words = WARP_SIZE // vector, max(1, vector * distance * self.itemsize // 4)
        steps = self._steps(TILE_WORDS // vector * (TILE_COLUMNS // WARP_SIZE))
        vectors = [
            [allocate(f"row_{row}_{idx}", num_words, "uint32") for row in range(self.rows_per_word)]
            for idx in range(len(steps))
        ]
        positions = [
            (
                step // 2 * vector + self.lane // lanes_along_columns,
                step % 2 * WARP_SIZE + self.lane % lanes_along_columns * vector,
            )
            for step in steps
        ]
        for (word, tile_column), word_vectors in zip(positions, vectors, strict=True):
            column = self.first_column + tile_column
            source_column = self.pixels.locate(column) if self.pixels else column
            for row_in_word, registers in enumerate(word_vectors):
                row = self.first_row + word * self.rows_per_word + row_in_word
                for e in range(num_words):
                    store(registers, e, T.uint32(0))
                with if_(self._is_inside(row, column)):
                    element = (image * rows + row) * source_columns + source_column
                    load_global(registers, source, element, vector * distance, is_constant=False)
        for (word, tile_column), word_vectors in zip(positions, vectors, strict=True):
            for e in range(vector):
                store(self.tile, (tile_column + e) * PITCH + word, self._combine(word_vectors, e * distance))

    def store(self, destination: Buffer, image: Expr) -> None:
        """Store the tile; neighbouring lanes store neighbouring vectors of a column."""
        rows, columns = self.shape
        vector = math.gcd(rows, VECTOR_BYTES // self.itemsize)
        vectors_per_column = TILE_WORDS * self.rows_per_word // vector
        lanes_along_rows = min(WARP_SIZE, vectors_per_column)
        columns_per_warp, warps_per_column = WARP_SIZE // lanes_along_rows, vectors_per_column // lanes_along_rows
        registers = allocate("column", max(1, vector * self.itemsize // 4), "uint32")
        for step in self._steps(TILE_COLUMNS // columns_per_warp * warps_per_column):
            tile_column = step // warps_per_column * columns_per_warp + self.lane // lanes_along_rows
            tile_row = (step % warps_per_column * lanes_along_rows + self.lane % lanes_along_rows) * vector
            row, column = self.first_row + tile_row, self.first_column + tile_column
            first_word = tile_column * PITCH + tile_row // self.rows_per_word
            if vector * self.itemsize < 4:
                store(registers, 0, self._select_half(self.tile[first_word], tile_row % 2))
            else:
                for e in range(vector * self.itemsize // 4):
                    store(registers, e, self.tile[first_word + e])
            with if_(self._is_inside(row, column)):
                store_global(destination, (image * columns + column) * rows + row, registers, vector)

    def _steps(self, num_steps: int) -> list[Expr]:
        """Return the steps of this warp; the steps of a phase are divided among the warps of the block."""
        return [round_idx * NUM_WARPS + self.warp for round_idx in range(num_steps // NUM_WARPS)]

    def _is_inside(self, row: Expr, column: Expr) -> Expr:
        """Whether an element is in the matrix; matrices without partial tiles need no test."""
        tile_rows = TILE_WORDS * self.rows_per_word
        rows, columns = self.shape
        return logical_and(is_below(row, rows, tile_rows), is_below(column, columns, TILE_COLUMNS))

    def _combine(self, vectors: list[Buffer], element: int) -> Expr:
        """Return the word with element `element` of each source row."""
        if self.itemsize == 4:
            return vectors[0][element]
        low, high = (self._select_half(vector[element // 2], element % 2) for vector in vectors)
        return low | T.shift_left(high, T.uint32(16))

    @staticmethod
    def _select_half(word: Expr, half: Expr) -> Expr:
        return T.shift_right(word, T.uint32(half * 16)) & T.uint32(0xFFFF)
