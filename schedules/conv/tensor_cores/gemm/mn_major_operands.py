"""Operands of mma.sync whose rows in shared memory are K, as in a wgrad: pixels × channels, channels contiguous.

The mma instruction has fragments with K along their rows. Elements of 16 bits are transposed by `ldmatrix`. Elements of
32 bits are loaded by plain loads. A fragment of m16n8k8 has channels of four pixels: pairs of neighbours of operand A,
whose rows may have any order, and single elements of operand B.

Sources: PTX ISA, "mma.sync.m16n8k8 with .tf32", "ldmatrix"; CUTLASS,
`include/cutlass/gemm/warp/mma_tensor_op_tile_iterator.h`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Buffer, Expr, Register, allocate, emit_ptx, logical_and, store, to_uint32, unrolled_loop
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .atoms import MmaSyncAtom, ldmatrix_x4
from .cp_async import CopyThreads, copy_elements
from .mma_sync_mainloop import MmaSyncMainloop
from .smem_layout import CHUNK_BYTES, MAX_SWIZZLE_BYTES, SmemLayout

WORD_BYTES = 4
WORDS_PER_MMA = 8  # elements of 32 bits of an mma along the reduction


@dataclass(frozen=True)
class WordLayout(SmemLayout):
    """A tile of 32-bit elements of which a warp reads eight neighbours, or pairs of them, in each of four rows.

    Eight elements are two chunks of 16 bytes, so pairs of chunks are permuted, and four rows occupy all banks. Half a
    warp reads four pairs in each of them at a time.
    """

    def swizzle_mask(self, row: Expr) -> Expr:
        """Return the number with which the index of a 16-byte chunk in a row is XORed; it is even."""
        rows_per_128_bytes = max(1, MAX_SWIZZLE_BYTES // self.row_bytes)
        return row // rows_per_128_bytes % (min(self.row_bytes, MAX_SWIZZLE_BYTES) // CHUNK_BYTES // 2) * 2


def make_mn_major_layout(block_k: int, block_mn: int, itemsize: int) -> SmemLayout:
    """Return the layout of a tile of `block_k` rows of `block_mn` contiguous elements."""
    return (WordLayout if itemsize == WORD_BYTES else SmemLayout)(block_k, block_mn * itemsize)


class PixelGather:
    """Operand of pixels × channels whose rows along K are contiguous: dY of a wgrad, or X if filters have one tap.

    Zeros are copied beyond the pixels of the batch, and beyond the channels of a group.
    """

    def __init__(self, source: Buffer, num_pixels: int, groups: int, channels: int, copy: CopyThreads) -> None:
        self._source, self._num_pixels, self._copy = source, num_pixels, copy
        self._channels, self._pitch = channels, groups * channels
        self._pieces = _Pieces(str(source.dtype), channels, copy)
        self._column, self._first = allocate("column", 1, "int32"), allocate("channel", 1, "int32")

    def locate(self, first_column: Expr, group: Expr) -> None:
        """Compute the channels of a work tile that this thread copies."""
        store(self._column, 0, first_column + self._copy.chunk * self._pieces.elements_per_chunk)
        store(self._first, 0, self._column[0] + group * self._channels)

    def load(self, stage: Expr, offset: int, first_k: Expr) -> None:
        """Start the copies of a K tile to an offset in a stage."""

        def locate_piece(pixel: Expr, element: int) -> tuple[Expr, Expr]:
            index = pixel * self._pitch + self._first[0] + element
            return index, logical_and(pixel < self._num_pixels, self._column[0] + element < self._channels)

        self._pieces.load(self._source, self._copy.destination(stage, offset), first_k, locate_piece)


class WindowGather:
    """Operand of pixels × (tap, channel): X of a wgrad, at the pixels under the taps of the forward convolution.

    K tiles are copied one after another. From one row of a thread to the next, also across K tiles, coordinates advance
    by additions with carries, because divisions would take longer than the products.
    """

    def __init__(self, w: Conv, source: Buffer, copy: CopyThreads) -> None:
        self._w, self._source, self._copy = w, source, copy
        self._channels = w.C // w.groups
        self._pieces = _Pieces(str(source.dtype), self._channels, copy)
        shape = (w.N, *w.input_size, w.C)
        self._strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        count = len(self._pieces.first_elements)
        self._column = allocate("x_column", 1, "int32")
        self._offset = allocate("x_offset", count, "int32")  # of each piece, from the pixel under the first tap
        self._steps = [allocate(f"tap_step_{axis}", count, "int32") for axis in range(w.spatial_ndim)]
        self._image, self._carry, self._is_started = Register("x_image"), Register("carry"), False
        self._positions = [Register(f"position_{axis}") for axis in range(w.spatial_ndim)]

    def locate(self, first_column: Expr, group: Expr) -> None:
        """Compute the taps and channels of a work tile that this thread copies."""
        w = self._w
        store(self._column, 0, first_column + self._copy.chunk * self._pieces.elements_per_chunk)
        for piece, element in enumerate(self._pieces.first_elements):
            column = self._column[0] + element
            tap, offset = column // self._channels, column % self._channels + group * self._channels
            for axis, steps in enumerate(self._steps):
                tap_along_axis = tap // math.prod(w.kernel[axis + 1 :]) % w.kernel[axis]
                store(steps, piece, tap_along_axis * w.dilation[axis] - w.pad_low[axis])
                offset = offset + steps[piece] * self._strides[1 + axis]
            store(self._offset, piece, offset)

    def load(self, stage: Expr, offset: int, first_k: Expr) -> None:
        """Start the copies of the next K tile to an offset in a stage."""
        w, columns = self._w, math.prod(self._w.kernel) * self._channels
        if not self._is_started:
            self._seek(first_k + self._copy.row)
        self._is_started = True

        def locate_piece(_pixel: Expr, element: int) -> tuple[Expr, Expr]:
            piece = self._pieces.first_elements.index(element)
            index = self._image.value * self._strides[0] + self._offset[piece]
            checks = [self._image.value < w.N, self._column[0] + element < columns]
            for axis, position in enumerate(self._positions):
                coordinate = position.value * w.stride[axis]
                index = index + coordinate * self._strides[1 + axis]
                checks.append(T.Cast("uint32", coordinate + self._steps[axis][piece]) < T.uint32(w.input_size[axis]))
            return index, logical_and(*checks)

        destination = self._copy.destination(stage, offset)
        self._pieces.load(self._source, destination, first_k, locate_piece, self._advance)

    def _seek(self, pixel: Expr) -> None:
        """Compute the image and the position of a pixel."""
        sizes = self._w.output_size
        self._image.set(pixel // math.prod(sizes))
        for axis, position in enumerate(self._positions):
            position.set(pixel // math.prod(sizes[axis + 1 :]) % sizes[axis])

    def _advance(self) -> None:
        """Move to the next row of this thread; its rows are evenly spaced, also across K tiles."""
        step, carry = min(self._copy.rows_per_pass, self._copy.layout.rows), 0
        for size, position in zip(self._w.output_size[::-1], self._positions[::-1], strict=True):
            step, digit = divmod(step, size)
            position.set(position.value + (digit + carry))
            self._carry.set(T.Select(position.value >= size, 1, 0))
            position.set(position.value - self._carry.value * size)
            carry = self._carry.value
        self._image.set(self._image.value + (step + carry))


class PixelRows:
    """Operand of channels × pixels: a channels-first X under filters of one tap, whose pixels are contiguous.

    Zeros are copied beyond the pixels of the batch, and beyond the channels of a group.
    """

    def __init__(self, w: Conv, source: Buffer, copy: CopyThreads) -> None:
        self._w, self._source, self._copy = w, source, copy
        self._pixels, self._channels = math.prod(w.input_size), w.C // w.groups
        self._pieces = _Pieces(w.storage, self._pixels, copy)
        # Index of the first channel of a work tile in each piece of this thread's chunk; -1 beyond the last pixel.
        self._index = allocate("x_index", len(self._pieces.first_elements), "int32")

    def locate(self, first_column: Expr, group: Expr) -> None:
        """Compute the pixels of a work tile that this thread copies."""
        for piece, element in enumerate(self._pieces.first_elements):
            column = first_column + self._copy.chunk * self._pieces.elements_per_chunk + element
            channel = column // self._pixels * self._w.C + group * self._channels
            index = channel * self._pixels + column % self._pixels
            store(self._index, piece, T.Select(column < self._w.N * self._pixels, index, -1))

    def load(self, stage: Expr, offset: int, first_k: Expr) -> None:
        """Start the copies of a K tile to an offset in a stage."""

        def locate_piece(channel: Expr, element: int) -> tuple[Expr, Expr]:
            index = self._index[self._pieces.first_elements.index(element)]
            return index + channel * self._pixels, logical_and(index >= 0, channel < self._channels)

        self._pieces.load(self._source, self._copy.destination(stage, offset), first_k, locate_piece)


class _Pieces:
    """The pieces of a thread's chunk of 16 bytes whose elements are contiguous in memory, and their copies."""

    def __init__(self, dtype: str, channels: int, copy: CopyThreads) -> None:
        self._itemsize, self._copy = get_itemsize(dtype), copy
        self.elements_per_chunk = VECTOR_BYTES // self._itemsize
        self._contiguous = math.gcd(channels, self.elements_per_chunk)
        self.first_elements = list(range(0, self.elements_per_chunk, self._contiguous))
        self._half = allocate("gathered", 1, "uint32")

    def load(
        self,
        source: Buffer,
        destination: Expr,
        first_k: Expr,
        locate: Callable[[Expr, int], tuple[Expr, Expr]],
        advance: Callable[[], None] | None = None,
    ) -> None:
        """Start the copies of this thread's chunk of each of its rows.

        `locate` is a function from a row and the first element of a piece to the index in the tensor, and whether to
        copy it; otherwise it becomes zeros. `advance` is called after each row.
        """
        copy, nbytes = self._copy, self._contiguous * self._itemsize
        with copy.rows_loop() as i:
            row = first_k + copy.row + i * copy.rows_per_pass
            address = destination + to_uint32(i * copy.rows_per_pass * copy.layout.row_bytes)
            for element in self.first_elements:
                index, is_inside = locate(row, element)
                piece = address + to_uint32(element * self._itemsize)
                copy_elements(piece, source, index, nbytes, is_inside, self._half)
            if advance:
                advance()


class FilterRows:
    """Operand of (flipped tap, filter) × channels: the weight of a dgrad of stride 1, as it is in memory.

    The arguments are those of `FilterGather`; columns of the product are channels, and the last K tile may overhang.
    """

    def __init__(
        self,
        shape: ImplicitGemmShape,
        dtype: str,
        source: Buffer,
        _block_k: int,
        k_extent: int | None,
        copy: CopyThreads,
    ) -> None:
        self._shape, self._source, self._k_extent, self._copy = shape, source, k_extent, copy
        self._pieces = _Pieces(dtype, shape.n, copy)
        self._column, self._group = allocate("k_column", 1, "int32"), allocate("k_group", 1, "int32")

    def locate(self, first_column: Expr, group: Expr) -> None:
        """Compute the channels of a work tile that this thread copies."""
        store(self._column, 0, first_column + self._copy.chunk * self._pieces.elements_per_chunk)
        store(self._group, 0, group)

    def load(self, stage: Expr, offset: int, first_k: Expr) -> None:
        """Start the copies of a K tile to an offset in a stage."""
        shape, filters = self._shape, self._shape.channels_per_group
        taps = shape.k // filters

        def locate_piece(k: Expr, element: int) -> tuple[Expr, Expr]:
            filter_idx, column = self._group[0] * filters + k % filters, self._column[0] + element
            index = (filter_idx * taps + (taps - 1 - k // filters)) * shape.n + column
            is_filter = True if self._k_extent is None else k < self._k_extent
            return index, logical_and(is_filter, column < shape.n)

        self._pieces.load(self._source, self._copy.destination(stage, offset), first_k, locate_piece)


@dataclass(frozen=True)
class MnMajorFilterMainloop(MmaSyncMainloop):
    """The mainloop of an operand B whose rows in shared memory are K."""

    # Offsets in a stage at which this lane loads words of B; the distances of all others from them are constants.
    b_words: Buffer = field(default_factory=lambda: allocate("b_words", 4, "uint32"))

    def start(self) -> None:
        """Compute the offsets of words, wait for the first stage and load the first fragments."""
        if self.tiling.atom.itemsize == WORD_BYTES:
            self._locate_words(self.b_words, self.b_layout, self.tiling.first_column, 1, self.a_layout.nbytes)
        super().start()

    def _locate_words(self, words: Buffer, layout: SmemLayout, first_column: Expr, vector: int, offset: int) -> None:
        """Compute the offsets of the vectors that fill a swizzle; fragments repeat after `MAX_SWIZZLE_BYTES`."""
        tiling, group_bytes = self.tiling, 8 * vector * WORD_BYTES
        first_row = to_uint32(tiling.warp_k * (tiling.mmas_k * WORDS_PER_MMA * layout.row_bytes) + offset)
        for group in range(MAX_SWIZZLE_BYTES // group_bytes):
            first_byte = first_column * WORD_BYTES + group * group_bytes
            store(words, group, first_row + locate_words(layout, first_byte, vector, tiling.thread.lane))

    def _word_address(self, words: Buffer, layout: SmemLayout, stage: Expr, mma_k: int, group: Expr) -> Expr:
        """Return the address of the vector of this lane in a group of columns; `words` has the offsets of some."""
        (num_offsets,) = words.shape
        constant = mma_k * (WORDS_PER_MMA * layout.row_bytes) + group // int(num_offsets) * MAX_SWIZZLE_BYTES
        return self._stage(stage) + words[group % int(num_offsets)] + to_uint32(constant)

    def _load_b_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, lane, atom, layout = self.tiling, self.tiling.thread.lane, self.tiling.atom, self.b_layout
        if atom.itemsize == WORD_BYTES:
            with unrolled_loop(tiling.mmas_n, "j") as mma_n:
                address = self._word_address(self.b_words, layout, stage, mma_k, mma_n)
                for e, register in enumerate(self._b_fragment(fragment_set, mma_n)):
                    emit_ptx("ld.shared.b32", register, address + to_uint32(e * 4 * layout.row_bytes))
            return
        first_k = (tiling.warp_k * tiling.mmas_k + mma_k) * (atom.k_bytes // atom.itemsize)
        b_operand, row = self._stage(stage) + to_uint32(self.a_layout.nbytes), lane % 8 + lane // 8 % 2 * 8
        with unrolled_loop(tiling.mmas_n // 2, "j") as pair:
            registers, column = self._b_fragment(fragment_set, pair * 2, 2), tiling.first_column + pair * (2 * atom.n)
            chunk = column * atom.itemsize // CHUNK_BYTES + lane // 16
            _load_transposed(registers, layout, b_operand, first_k + row, chunk, lane)


@dataclass(frozen=True)
class MnMajorImageMainloop(MmaSyncMainloop):
    """The mainloop of an operand A whose rows in shared memory are K."""

    def _load_a_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, lane, atom, layout = self.tiling, self.tiling.thread.lane, self.tiling.atom, self.a_layout
        first_k = (tiling.warp_k * tiling.mmas_k + mma_k) * (atom.k_bytes // atom.itemsize)
        with unrolled_loop(tiling.mmas_m, "i") as mma_m:
            registers, column = self._a_fragment(fragment_set, mma_m), tiling.first_row + mma_m * atom.m
            if atom.itemsize != WORD_BYTES:
                load_a_fragment(registers, atom, layout, self._stage(stage), first_k, column, lane)
            else:  # words that are 4 rows and 8 columns apart, as the tiling has no row pairs
                for e, register in enumerate(registers):
                    word = locate_words(layout, (column + e % 2 * 8) * WORD_BYTES, 1, lane)
                    row = to_uint32((first_k + e // 2 * 4) * layout.row_bytes)
                    emit_ptx("ld.shared.b32", register, self._stage(stage) + row + word)


@dataclass(frozen=True)
class MnMajorMainloop(MnMajorFilterMainloop):
    """The mainloop of operands whose rows in shared memory are K; the tiling has row pairs if elements are words."""

    a_words: Buffer = field(default_factory=lambda: allocate("a_words", 2, "uint32"))  # of A, as `b_words`

    def start(self) -> None:
        """Compute the offsets of words, wait for the first stage and load the first fragments."""
        if self.tiling.atom.itemsize == WORD_BYTES:
            self._locate_words(self.a_words, self.a_layout, self.tiling.first_row, 2, 0)
        super().start()

    def _load_a_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, atom, layout = self.tiling, self.tiling.atom, self.a_layout
        first_k = (tiling.warp_k * tiling.mmas_k + mma_k) * (atom.k_bytes // atom.itemsize)
        with unrolled_loop(tiling.mmas_m, "i") as mma_m:
            registers = self._a_fragment(fragment_set, mma_m)
            if atom.itemsize == WORD_BYTES:
                _load_row_pairs(registers, layout, self._word_address(self.a_words, layout, stage, mma_k, mma_m))
            else:
                column = tiling.first_row + mma_m * atom.m
                load_a_fragment(registers, atom, layout, self._stage(stage), first_k, column, tiling.thread.lane)


def load_a_fragment(
    registers: Sequence[Expr],
    atom: MmaSyncAtom,
    layout: SmemLayout,
    operand: Expr,
    first_k: Expr,
    first_column: Expr,
    lane: Expr,
) -> None:
    """Load the fragment of operand A of one mma; the tiling has row pairs if elements have 32 bits.

    Args:
        registers: The four registers of the fragment.
        atom: The mma.
        layout: Layout of the operand in shared memory.
        operand: Its shared-memory address.
        first_k: First row of shared memory, a multiple of the mma's K.
        first_column: First column of shared memory, a multiple of 16.
        lane: Index of the thread in its warp.
    """
    if atom.itemsize == WORD_BYTES:
        offset = to_uint32(first_k * layout.row_bytes) + locate_words(layout, first_column * WORD_BYTES, 2, lane)
        _load_row_pairs(registers, layout, operand + offset)
        return
    chunk = first_column * atom.itemsize // CHUNK_BYTES + lane // 8 % 2
    _load_transposed(registers, layout, operand, first_k + (lane % 8 + lane // 16 * 8), chunk, lane)


def locate_words(layout: SmemLayout, first_byte: Expr, vector: int, lane: Expr) -> Expr:
    """Return the offset of the words that a lane loads: row (lane mod 4), vector (lane / 4) from a byte of the row on.

    Eight lanes have neighbouring vectors. Rows that are four apart have the same swizzle.
    """
    byte = (first_byte + lane // 4 * (vector * WORD_BYTES)) ^ (layout.swizzle_mask(lane % 4) * CHUNK_BYTES)
    return to_uint32(byte) + to_uint32(lane % 4 * layout.row_bytes)


def _load_row_pairs(registers: Sequence[Expr], layout: SmemLayout, address: Expr) -> None:
    """Load the fragment of operand A of one mma of 32 bits: two neighbouring columns in each of two rows."""
    for half in range(2):
        pair = registers[2 * half : 2 * half + 2]
        emit_ptx("ld.shared.v2.b32", *pair, address + to_uint32(half * 4 * layout.row_bytes))


def _load_transposed(
    registers: Sequence[Expr], layout: SmemLayout, operand: Expr, row: Expr, chunk: Expr, lane: Expr
) -> None:
    """Load four matrices of 8 rows × 16 bytes, transposed; matrices begin at multiples of 8 rows."""
    chunk = chunk ^ layout.swizzle_mask(lane % 8)
    address = operand + to_uint32(row * layout.row_bytes) + to_uint32(chunk * CHUNK_BYTES)
    ldmatrix_x4(registers, address, transposed=True)
