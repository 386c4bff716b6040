"""Operand A of an mma.sync kernel whose filter taps share a tile of halo rows of a channels-first X.

All threads of a CTA copy boxes of pixels by cp.async, with the filters of a block of channels' first tap. When these
have arrived, the threads transpose the boxes once, to rows of channels, which all taps of the block read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_call,
    emit_ptx,
    if_,
    is_below,
    logical_and,
    serial_loop,
    store,
    to_uint32,
    unrolled_loop,
)
from ..implicit_gemm_shape import VECTOR_BYTES
from .atoms import ldmatrix_x4
from .cp_async import CopyThreads, FilterGather, cp_async
from .halo_boxes import GROUP, PixelBoxes
from .halo_image import HaloImage
from .halo_transpose import MATRICES, ElementTranspose, MatrixTranspose
from .mma_sync_mainloop import MmaSyncMainloop
from .smem_layout import CHUNK_BYTES

SETS_IN_FLIGHT = 4  # sets of four matrices that a warp loads before it stores them
WORD_BYTES = 4


@dataclass(frozen=True)
class BoxCopies:
    """Copies of the boxes of a block of channels.

    A row of a copy has the pixels of a channel, or the bytes of eight channels if boxes are planes. Neighbouring
    threads copy neighbouring vectors of a row. Each thread has the same vectors of several rows.
    """

    boxes: PixelBoxes  # boxes of all channels of a block
    num_threads: int  # threads that copy

    @property
    def channels_per_row(self) -> int:
        """Channels whose pixels are contiguous in a row."""
        return GROUP if self.boxes.are_planes else 1

    @property
    def vector(self) -> int:
        """Elements of a vector."""
        return VECTOR_BYTES // self.boxes.itemsize if self.boxes.are_planes else self.boxes.vector

    @property
    def rows(self) -> int:
        """Rows of a block of channels."""
        return self.boxes.channels // self.channels_per_row

    @property
    def vectors_per_box(self) -> int:
        """Vectors of a row in a box."""
        return self.boxes.box_pixels * self.channels_per_row // self.vector

    @property
    def threads_per_row(self) -> int:
        """Threads that copy a row of all boxes, a power of two."""
        columns = 1 << (self.boxes.count * self.vectors_per_box - 1).bit_length()
        return max(min(columns, WARP_SIZE), self.num_threads // self.rows)

    @property
    def passes(self) -> int:
        """Vectors that a thread copies of each of its rows."""
        return ceil_div(self.boxes.count * self.vectors_per_box, self.threads_per_row)


class HaloRows:
    """Copies and transposes the halo rows of a work tile, block by block.

    Args:
        boxes: Boxes of pixels, with all channels of a block.
        source: The array X.
        channels_per_group: Channels of a group.
        padded_channels: Channels of a tap in the reduction.
        num_blocks: Blocks of channels of this CTA.
        first_block: The first of them.
        stages: Stages of boxes.
        copy: Division among threads; its layout is that of the halo rows.
        smem: Shared-memory addresses of the halo rows, and of the first stage of boxes.
    """

    def __init__(
        self,
        boxes: PixelBoxes,
        source: Buffer,
        channels_per_group: int,
        padded_channels: int,
        num_blocks: int,
        first_block: Expr,
        stages: int,
        copy: CopyThreads,
        smem: tuple[Expr, Expr],
    ) -> None:
        self._boxes, self._source, self._channels = boxes, source, channels_per_group
        self._padded_channels = padded_channels
        self._num_blocks, self._first_block, self._stages = num_blocks, first_block, stages
        self._copy, (self._rows, self._first_stage) = copy, smem
        self._copies = BoxCopies(boxes, copy.num_threads)
        self._index = allocate("box_element", self._copies.passes, "int32")  # of a row of channel 0; -1 outside of X
        self._offset = allocate("box_offset", self._copies.passes, "uint32")
        self._taps = math.prod(boxes.image.w.kernel)
        self._tap, self._block = Register("tap"), Register("block")
        self._row_of_tap = Register("row_of_tap")

    @property
    def image(self) -> HaloImage:
        """The halo rows of X."""
        return self._boxes.image

    @property
    def row_of_tap(self) -> Expr:
        """Row in shared memory that the tap of the current K tile reads for the first pixel of the tile."""
        return self._row_of_tap.value

    def split_k_tile(self, k_tile: Expr) -> tuple[Expr, Expr]:
        """Return the block of channels of a K tile, and its tap."""
        return k_tile // self._taps, k_tile % self._taps

    def first_k(self, k_tile: Expr) -> Expr:
        """Return the first element of a K tile in the reduction, whose taps have padded channels."""
        block, tap = self.split_k_tile(k_tile)
        return tap * self._padded_channels + self.first_channel(block)

    def locate(self, first_row: Expr, group: Expr) -> None:
        """Compute the vectors that this thread copies of a work tile, and the rows that it transposes."""
        boxes, copies, w = self._boxes, self._copies, self.image.w
        first_box = Register("first_box", value=boxes.first_box(first_row)).value
        first_channel, row = group * self._channels, self._copy.thread // copies.threads_per_row
        num_columns = boxes.count * copies.vectors_per_box
        for i in range(copies.passes):
            column = self._copy.thread % copies.threads_per_row + i * copies.threads_per_row
            element = column % copies.vectors_per_box * copies.vector
            box = first_box + column // copies.vectors_per_box
            pixel = element if boxes.are_planes else box % boxes.per_plane * boxes.box_pixels + element
            exists = logical_and(
                is_below(column, num_columns, copies.threads_per_row),
                box < w.N * boxes.per_plane,
                True if boxes.are_planes else pixel < boxes.pixels,
            )
            channel = box // boxes.per_plane * w.C + first_channel + row * copies.channels_per_row
            store(self._index, i, T.Select(exists, channel * boxes.pixels + pixel, -1))
            offset = column // copies.vectors_per_box * boxes.box_bytes + element * boxes.itemsize
            store(self._offset, i, to_uint32(offset + row * (copies.channels_per_row * boxes.pitch_bytes)))
        arguments = boxes, self._copy.layout, self._copy.num_threads // WARP_SIZE, first_row, self._copy.thread
        self._transpose = WordTranspose(*arguments) if boxes.has_matrices else ElementTranspose(*arguments)
        self._tap.set(self._taps - 1)
        self._block.set(-1)

    def boxes_address(self, block: Expr) -> Expr:
        """Return the address of the stage that receives the boxes of a block of this CTA."""
        return self._first_stage + to_uint32(block % self._stages * self._boxes.nbytes)

    def first_channel(self, block: Expr) -> Expr:
        """Return the first channel of a block of this CTA."""
        return (self._first_block + block) * self._boxes.channels

    def load(self, stage: Expr, offset: int, first_k: Expr) -> None:
        """Start the copies of the boxes of a block, which begins with channel `first_k`, to an offset in a stage."""
        boxes, copies = self._boxes, self._copies
        rows_per_pass = self._copy.num_threads // copies.threads_per_row
        address = Register("boxes", "uint32", stage + to_uint32(offset)).value
        first_channel = Register("channel", value=first_k).value
        row, nbytes = self._copy.thread // copies.threads_per_row, copies.vector * boxes.itemsize
        with serial_loop(ceil_div(copies.rows, rows_per_pass), "i") as i:
            channel = (row + i * rows_per_pass) * copies.channels_per_row
            element = (first_channel + i * (rows_per_pass * copies.channels_per_row)) * boxes.pixels
            destination = address + to_uint32(i * (rows_per_pass * copies.channels_per_row * boxes.pitch_bytes))
            for j in range(copies.passes):
                is_copied = logical_and(
                    is_below(row + i * rows_per_pass, copies.rows, rows_per_pass),
                    is_below(
                        self._copy.thread % copies.threads_per_row + j * copies.threads_per_row,
                        boxes.count * copies.vectors_per_box,
                        copies.threads_per_row,
                    ),
                )
                exists = logical_and(self._index[j] >= 0, first_channel + channel < self._channels)
                index = T.Select(exists, self._index[j] + element, 0)
                with if_(is_copied):
                    cp_async(destination + self._offset[j], self._source, index, nbytes, exists)

    def enter_k_tile(self) -> None:
        """Move to the next K tile; transpose the boxes of a block that begins with it, which have arrived."""
        taps, image = self._taps, self.image
        self._tap.set(self._tap.value + 1)
        with if_(self._tap.value == taps):
            self._tap.set(0)
            self._block.set(self._block.value + 1)
            with if_(self._block.value < self._num_blocks):
                self._transpose_block()
                emit_call(T.cuda.cta_sync())
        tap, kernel = self._tap.value, image.w.kernel
        position = [tap // math.prod(kernel[axis + 1 :]) % size for axis, size in enumerate(kernel)]
        self._row_of_tap.set(image.tap_row(position, self._copy.layout.rows // image.num_planes) if taps > 1 else 0)

    def _transpose_block(self) -> None:
        """Transpose the boxes of the current block; the other blocks have zeros in the same rows."""
        stage = Register("boxes", "uint32", self.boxes_address(self._block.value)).value
        if isinstance(self._transpose, WordTranspose):
            with if_(self._block.value == 0):
                self._transpose.clear_rows(self._rows)
        self._transpose.move(stage, self._rows, 0)


class WordTranspose(MatrixTranspose):
    """Moves 8 channels × 8 pixels at a time without `stmatrix`, which sm_80 lacks.

    `ldmatrix` loads 32 channels of eight pixels. A lane stores words of two channels of one pixel.
    """

    groups_per_set = 1

    def _group(self, set_idx: int) -> Expr:
        return set_idx * self._num_warps + self._thread // WARP_SIZE

    @property
    def _pixel_in_group(self) -> Expr:
        return self._thread % WARP_SIZE // MATRICES

    def move(self, source: Expr, address: Expr, copy: Expr) -> None:
        """Move the pixels of this warp from a stage of boxes, which has all channels of a block, to halo rows."""
        boxes, layout, groups_per_box = self._boxes, self._layout, self._boxes.box_pixels // GROUP
        lane_row = self._thread % WARP_SIZE * boxes.pitch_bytes
        channels = MATRICES * GROUP
        items = [(i, first) for i in range(self._num_sets) for first in range(0, boxes.channels, channels)]
        registers = [allocate(f"matrices_{i}", MATRICES, "uint32") for i in range(min(SETS_IN_FLIGHT, len(items)))]
        for first in range(0, len(items), len(registers)):
            batch = items[first : first + len(registers)]
            for (set_idx, channel), matrices in zip(batch, registers, strict=False):
                group = T.min(self._group(set_idx), boxes.num_groups - 1)
                offset = group // groups_per_box * boxes.box_bytes + group % groups_per_box * CHUNK_BYTES
                row = source + to_uint32(offset + lane_row + channel * boxes.pitch_bytes)
                ldmatrix_x4([matrices[e] for e in range(MATRICES)], row, transposed=True)
            for (set_idx, channel), matrices in zip(batch, registers, strict=False):
                row = self._halo_rows[set_idx]
                with if_(row < layout.rows):
                    for e in range(MATRICES):
                        destination = address + layout.swizzled_offset(row, channel // GROUP + e)
                        word = to_uint32(self._thread % MATRICES * WORD_BYTES)
                        emit_ptx("st.shared.b32", destination + word, matrices[e])


class BlockedFilterGather(FilterGather):
    """Filters whose reduction runs over taps × channels, in which the channels of a tap are padded to whole blocks."""

    padded_channels: int = 0  # channels of a tap in the reduction

    def _is_valid_k(self, k: Expr) -> Expr:
        return True if self.padded_channels == self._channels else k % self.padded_channels < self._channels

    def _k_offset(self, k: Expr) -> Expr:
        if self.padded_channels == self._channels:
            return k
        return k // self.padded_channels * self._channels + k % self.padded_channels


@dataclass(frozen=True)
class HaloRowsMainloop(MmaSyncMainloop):
    """The mainloop of halo rows: K tiles are the taps of one block of channels after another.

    Shared memory has the halo rows of one block, the stages of filters, and the stages of boxes.
    """

    a: HaloRows

    def _stage(self, stage: Expr) -> Expr:
        return self.smem + to_uint32(stage * self.b_layout.nbytes)

    def _first_k(self, k_tile: Expr) -> Expr:
        return self.a.first_k(k_tile)

    def load_a(self, k_tile: Expr, stage: Expr) -> None:
        """Start the copies of a block of channels with those of its first tap."""
        block, tap = self.a.split_k_tile(k_tile)
        if not isinstance(tap, int) or tap == 0:
            with if_(True if isinstance(tap, int) else tap == 0):
                self.a.load(self.a.boxes_address(block), 0, self.a.first_channel(block))

    def load_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        """Load fragments as the base does; those of the first mma follow the transpose of a block."""
        if mma_k == 0:
            self.a.enter_k_tile()
        super().load_fragments(stage, mma_k, fragment_set)

    def _load_a_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, lane, layout = self.tiling, self.tiling.thread.lane, self.a_layout
        chunk = (tiling.warp_k * tiling.mmas_k + mma_k) * 2 + lane // 16
        row = self.a.row_of_tap + tiling.first_row + lane % 16  # rows that are 16 apart have the same swizzle
        address = self.smem + layout.swizzled_offset(row, chunk)
        with unrolled_loop(tiling.mmas_m, "i") as mma_m:
            offset = to_uint32(mma_m * (tiling.atom.m * layout.row_bytes))
            ldmatrix_x4(self._a_fragment(fragment_set, mma_m), address + offset)
