"""Halo rows that warps transpose in shared memory, from boxes of channels-first pixels that were copied there.

Where boxes are aligned, `ldmatrix` loads 8 channels × 8 pixels, transposed, and `stmatrix` stores a chunk of 8 channels
to the halo row of each pixel. A lane has the same pixels of all channels, so their rows are computed once per tile.
The rows of a plane that is a box of its own are not aligned for `ldmatrix`. A lane then loads the elements of a halo
row one by one, and likewise elements of 32 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import WARP_SIZE

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_ptx,
    if_,
    is_below,
    items_loop,
    logical_and,
    serial_loop,
    store,
    store_shared,
    to_uint32,
)
from .atoms import ldmatrix_x4, stmatrix_x4, sync_warp
from .cp_async import cp_async
from .halo_boxes import GROUP, MATRIX_ITEMSIZE, PixelBoxes
from .pipelines import AsyncPipeline, PipelineState, TmaPipeline
from .plane_gather import PendingArrivals
from .smem_layout import CHUNK_BYTES, SmemLayout
from .tile_scheduler import KRange, WorkTile
from .tma import tma_load

MATRICES = 4  # matrices that an instruction moves
MAX_SETS_IN_FLIGHT = 6  # sets of four matrices that a warp loads before it stores them
MAX_CHUNKS_IN_FLIGHT = 4  # chunks whose elements a lane loads before it stores them


@dataclass(frozen=True)
class HaloTranspose:
    """Loads and transposes the halo rows of work tiles."""

    boxes: PixelBoxes
    layout: SmemLayout  # layout of a stage of halo rows; its rows are those of all planes
    channels_per_group: int
    block_k: int  # channels per stage of halo rows
    num_warps: int  # warps that transpose

    @property
    def _copies_per_block(self) -> int:
        """Copies of boxes for a stage of halo rows."""
        return self.block_k // self.boxes.channels

    def produce_pixels(
        self, tile: WorkTile, k_range: KRange, tensor_map: Expr, pipeline: TmaPipeline, state: PipelineState
    ) -> None:
        """Copy the boxes of a work tile for all of its channels; run by one thread."""
        boxes = self.boxes
        first_box = Register("first_box", value=boxes.first_box(tile.m)).value
        first_channel = tile.group * self.channels_per_group + k_range.first * self.block_k
        with serial_loop(k_range.count * self._copies_per_block, "copy") as copy:
            pipeline.producer_acquire(state.index, state.phase)
            address, barrier = pipeline.stage_address(state.index), pipeline.full_barrier(state.index)
            for i in range(boxes.count):
                coordinates = boxes.locate(first_box + i, first_channel + copy * boxes.channels)
                tma_load(address + to_uint32(i * boxes.box_bytes), tensor_map, coordinates, barrier)
            state.advance()

    def gather_pixels(
        self,
        tile: WorkTile,
        k_range: KRange,
        source: Buffer,
        lane: Expr,
        pipeline: AsyncPipeline,
        state: PipelineState,
        arrivals: PendingArrivals,
    ) -> None:
        """Start the copies of the boxes of a work tile for all of its channels; run by the lanes of a warp."""
        boxes, w = self.boxes, self.boxes.image.w
        first_box = Register("first_box", value=boxes.first_box(tile.m)).value
        first_channel = tile.group * self.channels_per_group + k_range.first * self.block_k
        vectors_per_row, nbytes = boxes.box_pixels // boxes.vector, boxes.vector * boxes.itemsize
        with serial_loop(k_range.count * self._copies_per_block, "copy") as copy:
            pipeline.producer_acquire(state.index, state.phase)
            address = pipeline.stage_address(state.index) + to_uint32(lane * nbytes)
            channel = first_channel + copy * boxes.channels
            for i in range(boxes.count):
                image, box = (first_box + i) // boxes.per_plane, (first_box + i) % boxes.per_plane
                pixel = box * boxes.box_pixels + lane * boxes.vector
                is_inside = logical_and(pixel < boxes.pixels, image < w.N)
                index = (image * w.C + channel) * boxes.pixels + pixel
                with if_(lane < vectors_per_row):
                    for c in range(boxes.channels):
                        exists = is_inside
                        if self.channels_per_group % self.block_k:
                            exists = logical_and(is_inside, channel + c < w.C)
                        element = T.Select(exists, index + c * boxes.pixels, 0)
                        offset = to_uint32(i * boxes.box_bytes + c * boxes.pitch_bytes)
                        cp_async(address + offset, source, element, nbytes, exists)
            arrivals.commit()
            state.advance()

    def produce_rows(
        self,
        tile: WorkTile,
        k_range: KRange,
        thread: Expr,
        pipelines: tuple[TmaPipeline, AsyncPipeline],
        states: tuple[PipelineState, PipelineState],
        unused: Expr,
    ) -> None:
        """Transpose the boxes of a work tile to the stages of halo rows; run by all transposing threads.

        Args:
            tile: The work tile.
            k_range: Channel blocks of this CTA.
            thread: Index of this thread among those that transpose.
            pipelines: Stages of the boxes, and of the halo rows.
            states: Stages that are read, and filled, next.
            unused: Shared-memory address of `CHUNK_BYTES` for each transposing thread.
        """
        (boxes, rows), (boxes_state, rows_state) = pipelines, states
        transpose: MatrixTranspose | ElementTranspose
        if self.boxes.has_matrices:
            transpose = MatrixTranspose(self.boxes, self.layout, self.num_warps, tile.m, thread, unused)
        else:
            transpose = ElementTranspose(self.boxes, self.layout, self.num_warps, tile.m, thread)
        with serial_loop(k_range.count, "k_block") as k_block:
            rows.producer_acquire(rows_state.index, rows_state.phase)
            address = rows.stage_address(rows_state.index)
            if isinstance(transpose, MatrixTranspose):
                with if_(k_block < rows.stages):  # later blocks of the tile have zeros in the same rows
                    transpose.clear_rows(address)
            with serial_loop(self._copies_per_block, "copy") as copy:
                boxes.consumer_wait(boxes_state.index, boxes_state.phase)
                transpose.move(boxes.stage_address(boxes_state.index), address, copy)
                sync_warp()
                with if_(thread % WARP_SIZE == 0):
                    boxes.consumer_arrive(boxes_state.index)
                boxes_state.advance()
            rows.producer_commit(rows_state.index)
            rows_state.advance()


class MatrixTranspose:
    """Moves 8 channels × 8 pixels at a time from boxes to the halo rows of these pixels.

    Args:
        boxes: The boxes of a tile.
        layout: Layout of a stage of halo rows.
        num_warps: Warps that transpose.
        first_row: First halo row of the tile.
        thread: Index of this thread among those that transpose.
        unused: Shared-memory address of `CHUNK_BYTES` for each thread, for pixels that the tile does not need.
    """

    groups_per_set: ClassVar[int] = MATRICES  # groups of pixels that an instruction loads

    def __init__(
        self, boxes: PixelBoxes, layout: SmemLayout, num_warps: int, first_row: Expr, thread: Expr, unused: Expr = 0
    ) -> None:
        self._boxes, self._layout, self._num_warps = boxes, layout, num_warps
        self._first_row, self._thread = first_row, thread
        self._unused = unused + to_uint32(thread * CHUNK_BYTES)
        self._plane_rows = layout.rows // boxes.image.num_planes
        self._num_sets = ceil_div(
            boxes.num_groups, self.groups_per_set * num_warps
        )  # of groups of pixels, of this warp
        self._halo_rows = self._locate_rows()
        num_registers = min(MAX_SETS_IN_FLIGHT, self._num_sets)
        self._registers = [allocate(f"matrices_{i}", MATRICES, "uint32") for i in range(num_registers)]

    def _group(self, set_idx: int) -> Expr:
        """Return the group of pixels of the matrix whose row this lane addresses."""
        thread = self._thread
        return (set_idx * self._num_warps + thread // WARP_SIZE) * MATRICES + thread % WARP_SIZE // GROUP

    @property
    def _pixel_in_group(self) -> Expr:
        """Pixel of a group whose halo row this lane addresses."""
        return self._thread % GROUP

    def _locate_rows(self) -> list[Expr]:
        """Compute the row in shared memory of this lane's pixel in each set; the number of rows if there is none."""
        boxes, image, w = self._boxes, self._boxes.image, self._boxes.image.w
        first_box = Register("first_box", value=boxes.first_box(self._first_row)).value
        rows = []
        for set_idx in range(self._num_sets):
            pixel_in_tile = self._group(set_idx) * GROUP + self._pixel_in_group
            box = first_box + pixel_in_tile // boxes.box_pixels
            pixel = box % boxes.per_plane * boxes.box_pixels + pixel_in_tile % boxes.box_pixels
            conditions = [pixel_in_tile < boxes.count * boxes.box_pixels, pixel < boxes.pixels]
            conditions.append(box < w.N * boxes.per_plane)
            row, plane = box // boxes.per_plane, 0
            for axis, size in enumerate(w.input_size):
                padded = pixel // math.prod(w.input_size[axis + 1 :]) % size + w.pad_low[axis]
                row = row * image.extents[axis] + padded // w.stride[axis]
                if w.stride[axis] > image.planes[axis]:
                    conditions.append(padded % w.stride[axis] < image.planes[axis])
                plane = plane * image.planes[axis] + padded % w.stride[axis]
            row = Register("row", value=row - self._first_row).value
            conditions += [row >= 0, row < self._plane_rows]
            if image.num_planes > 1:
                row = row + plane * self._plane_rows
            row = T.Select(logical_and(*conditions), row, self._layout.rows)
            rows.append(Register(f"row_{set_idx}", value=row).value)
        return rows

    def clear_rows(self, address: Expr) -> None:
        """Set the rows of a stage to zero that belong to no pixel."""
        image, zeros = self._boxes.image, allocate("zeros", 4, "uint32")
        for e in range(4):
            store(zeros, e, T.uint32(0))
        with items_loop(self._layout.rows, self._thread, self._num_warps * WARP_SIZE) as item:
            row, plane = self._first_row + item % self._plane_rows, item // self._plane_rows
            _, conditions = image.locate_row(row, plane)
            with if_(T.Not(logical_and(*conditions))):
                for chunk in range(self._layout.row_bytes // CHUNK_BYTES):
                    store_shared(address + self._layout.swizzled_offset(item, chunk), zeros, CHUNK_BYTES)

    def move(self, source: Expr, address: Expr, copy: Expr) -> None:
        """Move the pixels of this warp from a stage of boxes to a stage of halo rows."""
        chunks_per_copy = self._boxes.channels // GROUP
        for chunk in range(chunks_per_copy):
            first_channel = source + to_uint32(chunk * GROUP * self._boxes.pitch_bytes)
            self._move_chunk(first_channel, address, copy * chunks_per_copy + chunk)

    def _move_chunk(self, source: Expr, address: Expr, chunk: Expr) -> None:
        """Move eight channels of all pixels of this warp."""
        boxes, groups_per_box = self._boxes, self._boxes.box_pixels // GROUP
        for first in range(0, self._num_sets, len(self._registers)):
            rows = self._halo_rows[first : first + len(self._registers)]
            for i, matrices in enumerate(self._registers[: len(rows)]):
                group = T.min(self._group(first + i), boxes.num_groups - 1)
                offset = group // groups_per_box * boxes.box_bytes + group % groups_per_box * CHUNK_BYTES
                row = source + to_uint32(offset + self._thread % GROUP * boxes.pitch_bytes)
                ldmatrix_x4([matrices[e] for e in range(MATRICES)], row, transposed=True)
            for row, matrices in zip(rows, self._registers, strict=False):
                destination = address + self._layout.swizzled_offset(row, chunk)
                destination = T.Select(row < self._layout.rows, destination, self._unused)
                stmatrix_x4(destination, [matrices[e] for e in range(MATRICES)])


class ElementTranspose:
    """Gathers each halo row from boxes element by element; rows that belong to no pixel become zeros.

    Several threads share the chunks of a row if rows are few.

    Args:
        boxes: The boxes of a tile.
        layout: Layout of a stage of halo rows.
        num_warps: Warps that transpose.
        first_row: First halo row of the tile.
        thread: Index of this thread among those that transpose.
    """

    def __init__(self, boxes: PixelBoxes, layout: SmemLayout, num_warps: int, first_row: Expr, thread: Expr) -> None:
        self._boxes, self._layout = boxes, layout
        num_threads, padded_rows = num_warps * WARP_SIZE, round_up(layout.rows, WARP_SIZE)
        self._threads_per_row = max(1, num_threads // padded_rows)
        self._rows_per_pass = padded_rows if self._threads_per_row > 1 else num_threads
        self._slice, self._num_sets = thread // self._rows_per_pass, ceil_div(layout.rows, self._rows_per_pass)
        self._is_active = is_below(self._slice, self._threads_per_row, ceil_div(num_threads, self._rows_per_pass))
        first_box = Register("first_box", value=boxes.first_box(first_row)).value
        self._rows = [set_idx * self._rows_per_pass + thread % self._rows_per_pass for set_idx in range(self._num_sets)]
        self._offsets = [self._locate_pixel(first_row, row, first_box) for row in self._rows]

    @property
    def _chunk(self) -> int:
        """Channels per chunk of a halo row."""
        return CHUNK_BYTES // self._boxes.itemsize

    def _locate_pixel(self, first_row: Expr, row: Expr, first_box: Expr) -> Expr:
        """Compute the offset of a row's pixel in a stage of boxes in bytes; -1 if it has none."""
        boxes, image = self._boxes, self._boxes.image
        plane_rows = self._layout.rows // image.num_planes
        halo_row = Register("halo_row", value=first_row + row % plane_rows).value
        positions, conditions = image.locate_row(halo_row, row // plane_rows)
        pixel: Expr = 0
        for size, position in zip(image.w.input_size, positions, strict=True):
            pixel = pixel * size + position
        box = halo_row // math.prod(image.extents) * boxes.per_plane + pixel // boxes.box_pixels - first_box
        offset = box * boxes.box_bytes + pixel % boxes.box_pixels * boxes.itemsize
        is_row = is_below(row, self._layout.rows, self._rows_per_pass * self._num_sets)
        return Register("offset", value=T.Select(logical_and(is_row, *conditions), offset, -1)).value

    def move(self, source: Expr, address: Expr, copy: Expr) -> None:
        """Move the rows of this thread from a stage of boxes to a stage of halo rows."""
        chunks = self._boxes.channels // self._chunk
        passes = ceil_div(chunks, self._threads_per_row)
        items = [(set_idx, i) for set_idx in range(self._num_sets) for i in range(passes)]
        registers = [allocate(f"chunk_{i}", 4, "uint32") for i in range(min(MAX_CHUNKS_IN_FLIGHT, len(items)))]
        for first in range(0, len(items), len(registers)):
            batch = items[first : first + len(registers)]
            chunk_indices = [i * self._threads_per_row + self._slice for _, i in batch]
            for (set_idx, _), chunk, words in zip(batch, chunk_indices, registers, strict=False):
                self._load(words, self._offsets[set_idx], source, T.min(chunk, chunks - 1))
            for (set_idx, _), chunk, words in zip(batch, chunk_indices, registers, strict=False):
                row = self._rows[set_idx]
                is_row = is_below(row, self._layout.rows, self._rows_per_pass * self._num_sets)
                is_chunk = is_below(chunk, chunks, passes * self._threads_per_row)
                with if_(logical_and(is_row, is_chunk, self._is_active)):
                    store_shared(address + self._layout.swizzled_offset(row, copy * chunks + chunk), words, CHUNK_BYTES)

    def _load(self, words: Buffer, offset: Expr, source: Expr, chunk: Expr) -> None:
        """Load a chunk of channels of a pixel, or zeros if the offset is negative."""
        boxes = self._boxes
        first = source + to_uint32(T.max(offset, 0) + chunk * (self._chunk * boxes.pitch_bytes))
        addresses = [first + to_uint32(c * boxes.pitch_bytes) for c in range(self._chunk)]
        if boxes.itemsize > MATRIX_ITEMSIZE:
            for c, address in enumerate(addresses):
                emit_ptx("ld.shared.b32", words[c], address)
        else:
            halves = allocate("halves", GROUP, "uint16")
            for c, address in enumerate(addresses):
                emit_ptx("ld.shared.b16", halves[c], address)
            for word in range(4):
                low, high = (T.Cast("uint32", halves[2 * word + e]) for e in range(2))
                store(words, word, low | T.shift_left(high, T.uint32(16)))
        for word in range(4):
            store(words, word, T.Select(offset >= 0, words[word], T.uint32(0)))
