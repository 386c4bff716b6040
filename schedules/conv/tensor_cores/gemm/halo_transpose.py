"""Halo rows that warps transpose in shared memory, from channels-first pixels that were copied there as they lie.

The pixels of a plane are contiguous in memory, whatever its lines. They are divided into boxes of a fixed number of
pixels. The boxes that a tile needs are copied to the stages of a pipeline, 16 channels at a time: by TMA if planes are
multiples of 16 bytes, and else by the lanes of a warp, each a vector of pixels. `ldmatrix` loads 8 channels × 8 pixels,
transposed, and `stmatrix` stores a chunk of 8 channels to the halo row of each pixel. A lane has the same pixels of all
channels, so their rows are computed once per tile.

A box has an odd number of 16-byte chunks per channel, so that the channels of a matrix are in distinct banks. A small
plane that is no multiple of 16 bytes is a box of its own, which TMA copies as contiguous bytes: those of eight channels
are whole chunks. Its rows are not aligned for `ldmatrix`, so a lane loads the elements of its pixel one by one, and
likewise elements of 32 bits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_ptx,
    if_,
    items_loop,
    logical_and,
    serial_loop,
    store,
    store_shared,
    to_uint32,
)
from .atoms import ldmatrix_x4, stmatrix_x4
from .cp_async import cp_async
from .halo_image import HaloImage
from .pipelines import AsyncPipeline, PipelineState, TmaPipeline
from .plane_gather import PendingArrivals, count_vector_pixels
from .smem_layout import CHUNK_BYTES, SmemLayout
from .tile_scheduler import KRange, WorkTile
from .tma import tma_load

GROUP = 8  # pixels, or channels, of a matrix of 16 bits
BOX_CHANNELS = 16  # channels per copy
MATRIX_ITEMSIZE = 2  # bytes per element of a matrix
MATRICES = 4  # matrices that an instruction moves
MAX_PLANE_PIXELS = 256  # pixels of the largest plane that is a box of its own
NUM_TRANSPOSE_WARPS = 2
NUM_TRANSPOSE_THREADS = NUM_TRANSPOSE_WARPS * WARP_SIZE
MAX_SETS_IN_FLIGHT = 6  # sets of four matrices that a warp loads before it stores them
TMA_ALIGNMENT_BYTES = 128  # alignment of a box in shared memory
ROW_COST_BYTES = 32  # cost of a row of a TMA copy besides that of its bytes, an assumption
UNUSED_BYTES = (
    NUM_TRANSPOSE_THREADS * CHUNK_BYTES
)  # shared memory to which lanes store pixels that the tile does not need


def can_transpose(w: Conv) -> bool:
    """Return whether boxes of a channels-first X can be copied: vectors of 4 bytes, or planes that are boxes."""
    return count_vector_pixels(math.prod(w.input_size), HaloImage(w).itemsize) > 0 or copies_planes(w)


def copies_planes(w: Conv) -> bool:
    """Return whether boxes are planes, which are small and no multiples of 16 bytes."""
    pixels, itemsize = math.prod(w.input_size), HaloImage(w).itemsize
    is_misaligned = itemsize == MATRIX_ITEMSIZE and pixels * itemsize % CHUNK_BYTES > 0
    return is_misaligned and pixels <= MAX_PLANE_PIXELS and w.C // w.groups % BOX_CHANNELS == 0


@dataclass(frozen=True)
class PixelBoxes:
    """The boxes of pixels that a tile of halo rows needs; boxes are numbered over the batch."""

    image: HaloImage  # the halo rows
    block_m: int  # rows of the product per work tile
    box_pixels: int  # pixels per box: an odd number of 16-byte chunks, or a whole plane
    count: int  # boxes per tile

    @property
    def pixels(self) -> int:
        """Pixels of a plane."""
        return math.prod(self.image.w.input_size)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.image.itemsize

    @property
    def pitch_bytes(self) -> int:
        """Bytes from a channel of a box to the next."""
        return self.box_pixels * self.itemsize

    @property
    def vector(self) -> int:
        """Pixels of the widest vector that does not cross the end of a plane; 0 if it is too small to copy."""
        return count_vector_pixels(self.pixels, self.itemsize)

    @property
    def are_planes(self) -> bool:
        """Whether boxes are planes."""
        return copies_planes(self.image.w)

    @property
    def has_matrices(self) -> bool:
        """Whether `ldmatrix` can load from boxes."""
        return self.itemsize == MATRIX_ITEMSIZE and not self.are_planes

    @property
    def uses_tma(self) -> bool:
        """Whether TMA can copy boxes."""
        return self.are_planes or self.vector * self.itemsize == CHUNK_BYTES

    @property
    def per_plane(self) -> int:
        """Boxes per plane."""
        return ceil_div(self.pixels, self.box_pixels)

    @property
    def box_bytes(self) -> int:
        """Bytes from a box in shared memory to the next."""
        return round_up(BOX_CHANNELS * self.pitch_bytes, TMA_ALIGNMENT_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of the boxes of a tile in shared memory."""
        return self.count * self.box_bytes

    @property
    def num_groups(self) -> int:
        """Groups of eight pixels in the boxes of a tile."""
        return ceil_div(self.count * self.box_pixels, GROUP)

    @property
    def tx_bytes(self) -> int:
        """Bytes that TMA copies for a tile."""
        return self.count * BOX_CHANNELS * self.pitch_bytes

    def tensor_map(self) -> maps.TensorMap:
        """Return the tensor map of X for boxes of channels × pixels, or of rows of chunks of eight channels."""
        w = self.image.w
        if self.are_planes:
            pixels = max(d for d in range(1, maps.MAX_BOX_ELEMENTS // GROUP + 1) if self.pixels % d == 0)
            box = (GROUP * pixels, self.pixels // pixels, BOX_CHANNELS // GROUP)
            extents, strides = (*box[:2], w.N * w.C // GROUP), (GROUP * pixels, GROUP * self.pixels)
            return maps.make_tiled_map(w.storage, self.itemsize, extents, strides, box, 0)
        extents, strides = (self.pixels, w.C, w.N), (self.pixels, self.pixels * w.C)
        box = (self.box_pixels, BOX_CHANNELS, 1)
        return maps.make_tiled_map(w.storage, self.itemsize, extents, strides, box, 0)

    def locate(self, box: Expr, channel: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the coordinates of a box in the tensor map; channels beyond the last one become zeros."""
        image, box_idx, w = box // self.per_plane, box % self.per_plane, self.image.w
        if self.are_planes:
            chunk = image * (w.C // GROUP) + channel // GROUP
            return 0, 0, T.Select(channel < w.C, chunk, w.N * w.C // GROUP)
        return box_idx * self.box_pixels, channel, image

    def first_box(self, first_row: Expr) -> Expr:
        """Return the number of the first box of a tile."""
        w, is_reset, pixel = self.image.w, False, 0
        for axis, size in enumerate(w.input_size):
            position = self._position(first_row, axis)
            clamped = T.max(T.min(position, size - 1), 0)
            pixel = pixel * size + (clamped if is_reset is False else T.Select(is_reset, 0, clamped))
            is_negative = position < 0
            is_reset = is_negative if is_reset is False else T.Or(is_reset, is_negative)
        return first_row // math.prod(self.image.extents) * self.per_plane + pixel // self.box_pixels

    def _position(self, row: Expr, axis: int) -> Expr:
        """Return the coordinate of a halo row of the first plane along an axis, negative in front of the image."""
        w, extents = self.image.w, self.image.extents
        return row // math.prod(extents[axis + 1 :]) % extents[axis] * w.stride[axis] - w.pad_low[axis]


@functools.lru_cache(maxsize=1024)
def choose_pixel_boxes(w: Conv, block_m: int) -> PixelBoxes:
    """Return the boxes for tiles of a size: those that are copied fastest by the number and length of their rows."""
    image, pixels = HaloImage(w), math.prod(w.input_size)
    vector, bounds = count_vector_pixels(pixels, image.itemsize), _list_pixel_bounds(image, block_m)
    max_pixels = maps.MAX_BOX_ELEMENTS if vector * image.itemsize == CHUNK_BYTES else vector * WARP_SIZE
    sizes = [pixels] if copies_planes(w) else range(3 * GROUP, max_pixels, 2 * GROUP)
    options = []
    for box_pixels in sizes:
        per_plane = ceil_div(pixels, box_pixels)
        first, last = (images * per_plane + bound // box_pixels for images, bound in bounds)
        options.append(PixelBoxes(image, block_m, box_pixels, int((last - first).max()) + 1))
    return min(options, key=lambda boxes: boxes.count * (boxes.pitch_bytes + ROW_COST_BYTES))


def _list_pixel_bounds(image: HaloImage, block_m: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the image and a bound of the pixel, of the first and the last row of each tile of a period."""
    rows_per_image = math.prod(image.extents)
    num_starts = min(ceil_div(image.num_rows, block_m), rows_per_image // math.gcd(rows_per_image, block_m))
    first = np.arange(num_starts) * block_m
    last = np.minimum(first + image.rows_per_plane(block_m) - 1, image.num_rows - 1)
    ends = (first, False), (last, True)
    return [(row // rows_per_image, _bound_pixel(image, row, is_upper=is_upper)) for row, is_upper in ends]


def _bound_pixel(image: HaloImage, row: np.ndarray, *, is_upper: bool) -> np.ndarray:
    """Return a pixel that is not behind those of the rows from `row` on, or not in front of those up to it."""
    w, pixel = image.w, np.zeros_like(row)
    is_first, is_last = np.zeros(row.shape, bool), np.zeros(row.shape, bool)
    for axis, size in enumerate(w.input_size):
        position = row // math.prod(image.extents[axis + 1 :]) % image.extents[axis] * w.stride[axis] - w.pad_low[axis]
        position = position + (w.stride[axis] - 1 if is_upper else 0)
        clamped = np.where(is_first, 0, np.where(is_last, size - 1, np.clip(position, 0, size - 1)))
        pixel = pixel * size + clamped
        is_first |= (position < 0) & ~is_last
        is_last |= (position >= size) & is_upper & ~is_first
    return pixel


@dataclass(frozen=True)
class HaloTranspose:
    """Loads and transposes the halo rows of work tiles."""

    boxes: PixelBoxes
    layout: SmemLayout  # layout of a stage of halo rows; its rows are those of all planes
    channels_per_group: int
    block_k: int  # channels per stage of halo rows

    @property
    def _image(self) -> HaloImage:
        return self.boxes.image

    @property
    def _plane_rows(self) -> int:
        return self.layout.rows // self._image.num_planes

    @property
    def _sets_per_warp(self) -> int:
        """Sets of four groups of pixels that a warp transposes, for each eight channels."""
        return ceil_div(self.boxes.num_groups, MATRICES * NUM_TRANSPOSE_WARPS)

    def produce_pixels(
        self, tile: WorkTile, k_range: KRange, tensor_map: Expr, pipeline: TmaPipeline, state: PipelineState
    ) -> None:
        """Copy the boxes of a work tile for all of its channels; run by one thread."""
        boxes = self.boxes
        first_box = Register("first_box", value=boxes.first_box(tile.m)).value
        first_channel = tile.group * self.channels_per_group + k_range.first * self.block_k
        with serial_loop(k_range.count * (self.block_k // BOX_CHANNELS), "copy") as copy:
            pipeline.producer_acquire(state.index, state.phase)
            address, barrier = pipeline.stage_address(state.index), pipeline.full_barrier(state.index)
            for i in range(boxes.count):
                coordinates = boxes.locate(first_box + i, first_channel + copy * BOX_CHANNELS)
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
        boxes, w = self.boxes, self._image.w
        first_box = Register("first_box", value=boxes.first_box(tile.m)).value
        first_channel = tile.group * self.channels_per_group + k_range.first * self.block_k
        vectors_per_row, nbytes = boxes.box_pixels // boxes.vector, boxes.vector * boxes.itemsize
        with serial_loop(k_range.count * (self.block_k // BOX_CHANNELS), "copy") as copy:
            pipeline.producer_acquire(state.index, state.phase)
            address = pipeline.stage_address(state.index) + to_uint32(lane * nbytes)
            channel = first_channel + copy * BOX_CHANNELS
            for i in range(boxes.count):
                image, box = (first_box + i) // boxes.per_plane, (first_box + i) % boxes.per_plane
                pixel = box * boxes.box_pixels + lane * boxes.vector
                is_inside = logical_and(pixel < boxes.pixels, image < w.N)
                index = (image * w.C + channel) * boxes.pixels + pixel
                with if_(lane < vectors_per_row):
                    for c in range(BOX_CHANNELS):
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
            unused: Shared-memory address of `UNUSED_BYTES`.
        """
        (boxes, rows), (boxes_state, rows_state) = pipelines, states
        halo_rows = self._locate_rows(tile.m, thread)
        num_registers = min(MAX_SETS_IN_FLIGHT, self._sets_per_warp)
        registers = [allocate(f"matrices_{i}", MATRICES, "uint32") for i in range(num_registers)]
        with serial_loop(k_range.count, "k_block") as k_block:
            rows.producer_acquire(rows_state.index, rows_state.phase)
            address = rows.stage_address(rows_state.index)
            with if_(k_block < rows.stages):  # later blocks of the tile have zeros in the same rows
                self._clear_rows(tile.m, thread, address)
            with serial_loop(self.block_k // BOX_CHANNELS, "copy") as copy:
                boxes.consumer_wait(boxes_state.index, boxes_state.phase)
                for chunk in range(BOX_CHANNELS // self._chunk):
                    offset = chunk * self._chunk * self.boxes.pitch_bytes
                    source = boxes.stage_address(boxes_state.index) + to_uint32(offset)
                    chunk_idx = copy * (BOX_CHANNELS // self._chunk) + chunk
                    self._transpose(registers, halo_rows, thread, source, address, chunk_idx, unused)
                emit_ptx("bar.warp.sync", T.uint32(0xFFFFFFFF))
                with if_(thread % WARP_SIZE == 0):
                    boxes.consumer_arrive(boxes_state.index)
                boxes_state.advance()
            rows.producer_commit(rows_state.index)
            rows_state.advance()

    @property
    def _chunk(self) -> int:
        """Channels per chunk of a halo row."""
        return CHUNK_BYTES // self.boxes.itemsize

    def _group(self, set_idx: int, thread: Expr) -> Expr:
        """Return the group of pixels of the matrix whose row this lane addresses."""
        return (set_idx * NUM_TRANSPOSE_WARPS + thread // WARP_SIZE) * MATRICES + thread % WARP_SIZE // GROUP

    def _locate_rows(self, first_row: Expr, thread: Expr) -> list[Expr]:
        """Compute the row in shared memory of this lane's pixel in each set; the number of rows if there is none."""
        boxes, image, w = self.boxes, self._image, self._image.w
        first_box = Register("first_box", value=boxes.first_box(first_row)).value
        rows = []
        for set_idx in range(self._sets_per_warp):
            pixel_in_tile = self._group(set_idx, thread) * GROUP + thread % GROUP
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
            row = Register("row", value=row - first_row).value
            conditions += [row >= 0, row < self._plane_rows]
            if image.num_planes > 1:
                row = row + plane * self._plane_rows
            row = T.Select(logical_and(*conditions), row, self.layout.rows)
            rows.append(Register(f"row_{set_idx}", value=row).value)
        return rows

    def _clear_rows(self, first_row: Expr, thread: Expr, address: Expr) -> None:
        """Set the rows to zero that belong to no pixel."""
        image, w, zeros = self._image, self._image.w, allocate("zeros", 4, "uint32")
        for e in range(4):
            store(zeros, e, T.uint32(0))
        with items_loop(self.layout.rows, thread, NUM_TRANSPOSE_THREADS) as item:
            row, plane = first_row + item % self._plane_rows, item // self._plane_rows
            conditions = [row < image.num_rows]
            for axis, size in enumerate(w.input_size):
                position = row // image.row_steps[axis] % image.extents[axis] * w.stride[axis] - w.pad_low[axis]
                if image.planes[axis] > 1:
                    position = position + plane // math.prod(image.planes[axis + 1 :]) % image.planes[axis]
                conditions += [position >= 0, position < size]
            with if_(T.Not(logical_and(*conditions))):
                for chunk in range(self.layout.row_bytes // CHUNK_BYTES):
                    store_shared(address + self.layout.swizzled_offset(item, chunk), zeros, CHUNK_BYTES)

    def _transpose(
        self,
        registers: list[Buffer],
        halo_rows: list[Expr],
        thread: Expr,
        source: Expr,
        address: Expr,
        chunk_idx: Expr,
        unused: Expr,
    ) -> None:
        """Move eight channels of all pixels of this warp."""
        boxes, groups_per_box = self.boxes, self.boxes.box_pixels // GROUP
        lane_unused = unused + to_uint32(thread * CHUNK_BYTES)
        for first in range(0, self._sets_per_warp, len(registers)):
            rows = halo_rows[first : first + len(registers)]
            for i, matrices in enumerate(registers[: len(rows)]):
                if not boxes.has_matrices:
                    self._load_elements(matrices, self._group(first + i, thread) * GROUP + thread % GROUP, source)
                    continue
                group = T.min(self._group(first + i, thread), boxes.num_groups - 1)
                offset = group // groups_per_box * boxes.box_bytes + group % groups_per_box * CHUNK_BYTES
                words = [matrices[e] for e in range(MATRICES)]
                ldmatrix_x4(words, source + to_uint32(offset + thread % GROUP * boxes.pitch_bytes), transposed=True)
            for row, matrices in zip(rows, registers, strict=False):
                destination = address + self.layout.swizzled_offset(row, chunk_idx)
                destination = T.Select(row < self.layout.rows, destination, lane_unused)
                if not boxes.has_matrices:
                    store_shared(destination, matrices, CHUNK_BYTES)
                else:
                    stmatrix_x4(destination, [matrices[e] for e in range(MATRICES)])

    def _load_elements(self, chunk: Buffer, pixel: Expr, source: Expr) -> None:
        """Load a chunk of channels of a pixel of the boxes, element by element."""
        boxes = self.boxes
        pixel = T.min(pixel, boxes.count * boxes.box_pixels - 1)
        offset = pixel // boxes.box_pixels * boxes.box_bytes + pixel % boxes.box_pixels * boxes.itemsize
        addresses = [source + to_uint32(offset + c * boxes.pitch_bytes) for c in range(self._chunk)]
        if boxes.itemsize > MATRIX_ITEMSIZE:
            for c, address in enumerate(addresses):
                emit_ptx("ld.shared.b32", chunk[c], address)
            return
        halves = allocate("halves", GROUP, "uint16")
        for c, address in enumerate(addresses):
            emit_ptx("ld.shared.b16", halves[c], address)
        for word in range(MATRICES):
            low, high = (T.Cast("uint32", halves[2 * word + e]) for e in range(2))
            store(chunk, word, low | T.shift_left(high, T.uint32(16)))
