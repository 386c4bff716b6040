"""Loader of channels-first pixels by threads: vectors of pixels are transposed in registers to rows of channels.

TMA cannot write what K-major wgmma operands need from a channels-first array: neighbouring pixels are contiguous, and a
tiled copy starts at a multiple of 16 bytes, which excludes most offsets along a line. A thread therefore loads a vector
of neighbouring pixels for each channel of a 16-byte chunk. It exchanges rows and columns of these elements in
registers, and stores a chunk for each pixel in the swizzle of the operand. The lanes of a warp that store at a time
write whole rows, free of bank conflicts. Loads of several vectors are in flight at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    if_,
    is_below,
    load_global,
    logical_and,
    serial_loop,
    store,
    store_shared,
)
from .halo_image import HaloImage
from .pipelines import AsyncPipeline
from .smem_layout import CHUNK_BYTES, SmemLayout

MAX_REGISTERS_IN_FLIGHT = 64  # registers of a thread for vectors that it loads at a time


@dataclass(frozen=True)
class HaloLoader:
    """Loads the halo rows of work tiles."""

    image: HaloImage  # the halo rows of X
    layout: SmemLayout  # layout of a stage; its rows are those of all planes
    block_m: int  # rows of the product per work tile
    source: Buffer  # the array X
    channels_per_group: int
    num_warps: int  # warps that load

    @property
    def num_threads(self) -> int:
        """Threads that load."""
        return self.num_warps * WARP_SIZE

    @property
    def _chunk(self) -> int:
        """Channels per chunk."""
        return CHUNK_BYTES // self.image.itemsize

    def locate(self, first_row: Expr) -> Expr:
        """Compute the index of the first vector of a work tile, in a register."""
        image = self.image
        return Register("first_vector", value=image.vector_index(image.first_column(first_row))).value

    def load(
        self,
        first_row: Expr,
        first_vector: Expr,
        group: Expr,
        channel: Expr,
        thread: Expr,
        pipeline: AsyncPipeline,
        stage: tuple[Expr, Expr],
    ) -> None:
        """Load some channels of the halo rows of a work tile; run by all loading threads.

        The first vectors are requested before the stage is empty.

        Args:
            first_row: First row of the work tile.
            first_vector: Result of `locate` for this row.
            group: Group of the convolution.
            channel: First channel within the group.
            thread: Index of this thread among those that load.
            pipeline: Stages of the halo rows.
            stage: Index and phase of the stage.
        """
        image, elements = self.image, self.image.input_vector
        registers_per_channel = max(1, elements * image.itemsize // 4)
        chunks_per_row = self.layout.row_bytes // CHUNK_BYTES
        vectors_per_pass = self.num_threads // chunks_per_row
        outer_planes = math.prod(image.planes[:-1])
        max_vectors = image.max_vectors(self.block_m)
        num_items = max_vectors * outer_planes
        num_passes = ceil_div(num_items, vectors_per_pass)
        in_flight = min(num_passes, max(1, MAX_REGISTERS_IN_FLIGHT // (self._chunk * registers_per_channel)))
        chunk = thread % chunks_per_row
        channel = channel + chunk * self._chunk
        registers = [
            [allocate(f"pixels_{i}_{c}", registers_per_channel, "uint32") for c in range(self._chunk)]
            for i in range(in_flight)
        ]
        address = pipeline.stage_address(stage[0])
        num_batches = ceil_div(num_passes, in_flight)
        with serial_loop(num_batches, "batch") as batch:
            items = [(batch * in_flight + i) * vectors_per_pass + thread // chunks_per_row for i in range(in_flight)]
            for item, vectors in zip(items, registers, strict=True):
                plane, vector_idx = (item // max_vectors, item % max_vectors) if outer_planes > 1 else (0, item)
                is_item = is_below(item, num_items, num_batches * in_flight * vectors_per_pass)
                vector = first_vector + vector_idx
                self._load_vector(vectors, vector, plane, group, channel, is_item)
            with if_(batch == 0):
                pipeline.producer_acquire(*stage)
            for item, vectors in zip(items, registers, strict=True):
                plane, vector_idx = (item // max_vectors, item % max_vectors) if outer_planes > 1 else (0, item)
                is_item = is_below(item, num_items, num_batches * in_flight * vectors_per_pass)
                vector = first_vector + vector_idx
                self._store_vector(vectors, vector, plane, first_row, chunk, address, is_item)

    def _load_vector(
        self, vectors: Sequence[Buffer], vector: Expr, plane: Expr, group: Expr, channel: Expr, is_item: Expr
    ) -> None:
        """Load a vector of pixels for each channel of a chunk; zeros where there are none."""
        image, w = self.image, self.image.w
        line, column = self._split(vector)
        conditions = [is_item, line >= 1, column < w.input_size[-1]]
        if self.channels_per_group % (self.layout.row_bytes // image.itemsize):
            conditions.append(channel < self.channels_per_group)
        rest: Expr = T.max(line - 1, 0)
        coordinates = [column]
        for axis in range(w.spatial_ndim - 2, -1, -1):
            extent, planes = image.extents[axis], image.planes[axis]
            position = rest % extent * w.stride[axis] - w.pad_low[axis]
            if planes > 1:
                position = position + plane // math.prod(image.planes[axis + 1 : -1]) % planes
            conditions += [position >= 0, position < w.input_size[axis]]
            coordinates.insert(0, position)
            rest = rest // extent
        conditions.append(rest < w.N)
        pixel: Expr = 0
        for size, coordinate in zip(w.input_size, coordinates, strict=True):
            pixel = pixel * size + coordinate
        pixels = math.prod(w.input_size)
        index = (rest * w.C + group * self.channels_per_group + channel) * pixels + pixel
        for registers in vectors:
            for e in range(max(1, image.input_vector * image.itemsize // 4)):
                store(registers, e, T.uint32(0))
        with if_(logical_and(*conditions)):
            for c, registers in enumerate(vectors):
                load_global(registers, self.source, index + c * pixels, image.input_vector, is_constant=False)

    def _store_vector(
        self,
        vectors: Sequence[Buffer],
        vector: Expr,
        plane: Expr,
        first_row: Expr,
        chunk: Expr,
        address: Expr,
        is_item: Expr,
    ) -> None:
        """Store a chunk of channels for each pixel of a vector."""
        image, w = self.image, self.image.w
        stride, planes, plane_rows = w.stride[-1], image.planes[-1], self.layout.rows // image.num_planes
        line, first_column = self._split(vector)
        words = allocate("chunk", 4, "uint32")
        for e in range(image.input_vector):
            column = first_column + (w.pad_low[-1] + e)
            row = Register("row", value=(line - 1) * image.extents[-1] + column // stride - first_row)
            conditions = [is_item, row.value >= 0, row.value < plane_rows]
            if image.columns_per_line % image.input_vector:
                conditions.append(first_column + e < image.columns_per_line)
            if planes < stride:
                conditions.append(column % stride < planes)
            with if_(logical_and(*conditions)):
                plane_idx = plane * planes + column % stride if image.num_planes > 1 else 0
                for word in range(4):
                    store(words, word, self._combine(vectors, word, e))
                store_shared(
                    address + self.layout.swizzled_offset(plane_idx * plane_rows + row.value, chunk), words, CHUNK_BYTES
                )

    def _split(self, vector: Expr) -> tuple[Expr, Expr]:
        """Return the line of a vector, counted from the one before the first, and its first column."""
        image = self.image
        return vector // image.vectors_per_line, vector % image.vectors_per_line * image.input_vector

    def _combine(self, vectors: Sequence[Buffer], word: int, element: int) -> Expr:
        """Return a word of the chunk of a pixel: one channel of 32 bits, or two of 16 bits."""
        if self.image.itemsize == 4:
            return vectors[word][element]
        low, high = (vectors[2 * word + e][element // 2] for e in range(2))
        if element % 2:
            return T.shift_right(low, T.uint32(16)) | (high & T.uint32(0xFFFF0000))
        return (low & T.uint32(0xFFFF)) | T.shift_left(high, T.uint32(16))
