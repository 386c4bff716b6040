"""Operands that threads copy by cp.async: each thread gathers 16-byte chunks of some rows of a K tile.

Source: PTX ISA, "cp.async".
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    choose_offset_dtype,
    emit_if_else,
    emit_ptx,
    guarded_loop,
    if_,
    load_global,
    logical_and,
    store,
    to_offset,
    to_uint32,
    unrolled_loop,
)
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .residue_classes import divide
from .smem_layout import SmemLayout

MIN_COPY_BYTES = 4  # cp.async copies 4, 8 or 16 bytes


def cp_async(
    destination: Expr, source: Buffer, index: Expr, nbytes: int, is_inside: Expr = True, *, prefetches_l2: bool = True
) -> None:
    """Start a copy of contiguous elements to shared memory.

    Args:
        destination: Shared-memory address.
        source: Array to copy from.
        index: Index of the first element.
        nbytes: Bytes of the copy: 4, 8 or 16.
        is_inside: Whether to copy elements; otherwise the bytes become zeros and nothing is read.
        prefetches_l2: Whether the L2 cache loads 128 bytes.
    """
    cache = "cg" if nbytes == VECTOR_BYTES else "ca"  # only 16 bytes can bypass the L1 cache
    source_bytes = () if is_inside is True else (T.Select(is_inside, T.uint32(nbytes), T.uint32(0)),)
    mnemonic = f"cp.async.{cache}.shared.global{'.L2::128B' if prefetches_l2 else ''}"
    emit_ptx(mnemonic, destination, source.access_ptr("r", offset=index), nbytes, *source_bytes)


def copy_elements(
    destination: Expr, source: Buffer, index: Expr, nbytes: int, is_inside: Expr, register: Buffer
) -> None:
    """Copy 2, 4, 8 or 16 bytes of contiguous elements to shared memory, or zeros if not `is_inside`.

    cp.async copies at least 4 bytes; 2 bytes pass through `register`, an array of uint32.
    """
    if nbytes >= MIN_COPY_BYTES:
        cp_async(destination, source, index, nbytes, is_inside)
        return
    store(register, 0, T.uint32(0))
    with if_(is_inside):
        load_global(register, source, index, nbytes // get_itemsize(str(source.dtype)))
    emit_ptx("st.shared.b16", destination, T.Cast("uint16", register[0]))


@dataclass(frozen=True)
class CopyThreads:
    """Division of a K tile's rows among threads: neighbouring threads copy neighbouring chunks of a row."""

    layout: SmemLayout  # layout of the operand in shared memory
    num_threads: int  # threads that copy
    thread: Expr  # index of this thread

    @property
    def chunks_per_row(self) -> int:
        """Chunks of 16 bytes per row."""
        return self.layout.row_bytes // VECTOR_BYTES

    @property
    def rows_per_pass(self) -> int:
        """Rows that all threads copy at a time."""
        return self.num_threads // self.chunks_per_row

    @property
    def passes(self) -> int:
        """Rows that a thread copies."""
        return ceil_div(self.layout.rows, self.rows_per_pass)

    @property
    def chunk(self) -> Expr:
        """Chunk that this thread copies of each of its rows."""
        return self.thread % self.chunks_per_row

    @property
    def row(self) -> Expr:
        """First row that this thread copies."""
        return self.thread // self.chunks_per_row

    def rows_loop(self) -> AbstractContextManager[Expr]:
        """Open a loop over this thread's rows."""
        is_exact = self.layout.rows % self.rows_per_pass == 0
        return guarded_loop(
            unrolled_loop(self.passes, "i"),
            lambda i: True if is_exact else self.row + i * self.rows_per_pass < self.layout.rows,
        )

    def destination(self, stage: Expr, offset: int) -> Expr:
        """Return the shared-memory address of this thread's first chunk of an operand at an offset in a stage."""
        chunk = self.chunk ^ self.layout.swizzle_mask(self.row)
        address = stage + to_uint32(self.row * self.layout.row_bytes) + to_uint32(chunk * VECTOR_BYTES)
        return address + to_uint32(offset) if offset else address


class _GatherLoader:
    """Copies the rows of an operand along the reduction, of which `contiguous` elements are neighbours for any tap.

    Args:
        source: The tensor.
        dtype: Its dtype.
        channels: Channels per group, contiguous for each tap.
        block_k: Elements of the reduction per K tile.
        k_extent: Elements of the reduction, beyond which zeros are copied; None if K tiles never overhang.
        copy: Division among threads.
    """

    def __init__(
        self, source: Buffer, dtype: str, channels: int, block_k: int, k_extent: int | None, copy: CopyThreads
    ) -> None:
        self._source, self._itemsize, self._copy = source, get_itemsize(dtype), copy
        self._channels, self._block_k, self._k_extent = channels, block_k, k_extent
        self._chunk_elements = VECTOR_BYTES // self._itemsize
        self._contiguous = math.gcd(channels, self._chunk_elements)
        self._half = allocate("gathered", 1, "uint32")

    def _is_valid_k(self, k: Expr) -> Expr:
        return True if self._k_extent is None else k < self._k_extent

    def _pieces(self, first_k: Expr) -> list[tuple[int, Expr]]:
        """Return each piece of this thread's chunk: its first element, and the index of that in the reduction."""
        elements = range(0, self._chunk_elements, self._contiguous)
        return [(element, first_k + self._copy.chunk * self._chunk_elements + element) for element in elements]

    def _row_address(self, destination: Expr, i: Expr) -> Expr:
        return destination + to_uint32(i * self._copy.rows_per_pass * self._copy.layout.row_bytes)

    def _copy_piece(
        self, destination: Expr, element: int, index: Expr, is_inside: Expr, source: Buffer | None = None
    ) -> None:
        """Copy contiguous elements of the tensor, or of another one, to shared memory, or zeros if not `is_inside`."""
        destination = destination + to_uint32(element * self._itemsize)
        nbytes = self._contiguous * self._itemsize
        source = self._source if source is None else source
        copy_elements(destination, source, index, nbytes, is_inside, self._half)


class ImageGather(_GatherLoader):
    """Operand of filter positions × (tap, channel): the pixels under the taps of a forward convolution.

    The pixels of an upsampled axis are neighbors of themselves, so that the offset of a pixel is computed for each tap.
    Pixels of cached frames are copied from a tensor of their own.
    """

    def __init__(
        self,
        w: Conv,
        source: Buffer,
        block_k: int,
        k_extent: int | None,
        copy: CopyThreads,
        cache: Buffer | None = None,
    ) -> None:
        super().__init__(source, w.storage, w.C // w.groups, block_k, k_extent, copy)
        self._w, self._cache = w, cache
        shape = (w.N, *w.x_size, w.C)
        self._strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self._dtype = choose_offset_dtype(math.prod(w.input_shape))
        # Offset of each row's pixel under the first tap, without upsampled axes, whose coordinates change by tap.
        self._offset = allocate("pixel", copy.passes, self._dtype)
        self._coordinates = [allocate(f"first_{axis}", copy.passes, "int32") for axis in range(w.spatial_ndim)]
        # Offset in the cache, minus the offset that the frame would have in front of X.
        self._cache_offset = allocate("cached_pixel", copy.passes, self._dtype) if cache is not None else None

    def locate(self, first_row: Expr, group: Expr) -> None:
        """Compute the pixels of the rows of a work tile; rows past the end repeat the last one."""
        w, copy, last_row = self._w, self._copy, self._w.N * math.prod(self._w.output_size) - 1
        with unrolled_loop(copy.passes, "i") as i:
            row = T.min(first_row + copy.row + i * copy.rows_per_pass, last_row)
            position = row % math.prod(w.output_size)
            image = row // math.prod(w.output_size)
            offset = to_offset(image, self._dtype) * self._strides[0] + group * self._channels
            if self._cache_offset is not None:
                frames = image * (w.cached_frames - w.x_size[0]) + w.cached_frames
                offset = offset - w.cached_frames * self._strides[1]
                store(self._cache_offset, i, to_offset(frames, self._dtype) * self._strides[1])
            for axis, coordinates in enumerate(self._coordinates):
                output = position // math.prod(w.output_size[axis + 1 :]) % w.output_size[axis]
                store(coordinates, i, output * w.stride[axis] - w.pad_low[axis])
                if w.upsampling[axis] == 1:
                    offset = offset + to_offset(coordinates[i], self._dtype) * self._strides[1 + axis]
            store(self._offset, i, offset)

    def load(self, stage: Expr, offset: int, first_k: Expr) -> None:
        """Start the copies of a K tile to an offset in a stage."""
        w, destination = self._w, self._copy.destination(stage, offset)
        is_within_tap = self._channels % self._block_k == 0  # the tap is then the same for all threads
        for element, k in self._pieces(first_k):
            tap = (first_k if is_within_tap else k) // self._channels
            offset, steps = k - tap * self._channels, self._steps_of_tap(tap)
            for axis, step in enumerate(steps):
                if w.upsampling[axis] == 1:
                    offset = offset + to_offset(step, self._dtype) * self._strides[1 + axis]
            with self._copy.rows_loop() as i:
                pixel = [coordinates[i] + step for coordinates, step in zip(self._coordinates, steps, strict=True)]
                checks = [
                    T.Cast("uint32", pixel[axis]) < T.uint32(w.input_size[axis])
                    for axis in range(w.spatial_ndim)
                    if self._has_border(axis)
                ]
                is_inside = logical_and(*checks, self._is_valid_k(k))
                index = self._offset[i] + offset
                for axis, factor in enumerate(w.upsampling):
                    if factor > 1:
                        stored = to_offset(divide(pixel[axis], factor), self._dtype)
                        index = index + stored * self._strides[1 + axis]
                self._copy_pixel(self._row_address(destination, i), element, index, is_inside, pixel[0], i)

    def _copy_pixel(self, destination: Expr, element: int, index: Expr, is_inside: Expr, frame: Expr, i: Expr) -> None:
        """Copy channels of a pixel of X, or of a cached frame."""

        def copy(source: Buffer, offset: Expr) -> None:
            self._copy_piece(destination, element, offset, is_inside, source)

        if self._cache is None:
            copy(self._source, index)
            return
        assert self._cache_offset is not None
        cached = index + self._cache_offset[i]
        emit_if_else(
            frame < self._w.cached_frames * self._w.upsampling[0],
            lambda: copy(self._cache, cached),
            lambda: copy(self._source, index),
        )

    def _has_border(self, axis: int) -> bool:
        """Return whether the filter overhangs the image's border along an axis."""
        w = self._w
        last = (w.output_size[axis] - 1) * w.stride[axis] + w.window[axis] - 1 - w.pad_low[axis]
        return w.pad_low[axis] > 0 or last >= w.input_size[axis]

    def _steps_of_tap(self, tap: Expr) -> list[Expr]:
        """Return the distance of the pixels under a tap from those under the first one, along each axis."""
        kernel, dilation = self._w.kernel, self._w.dilation
        return [
            tap // math.prod(kernel[axis + 1 :]) % kernel[axis] * dilation[axis] for axis in range(self._w.spatial_ndim)
        ]


class FilterGather(_GatherLoader):
    """Operand of filters × (tap, channel), whose rows are contiguous."""

    def __init__(
        self,
        shape: ImplicitGemmShape,
        dtype: str,
        source: Buffer,
        block_k: int,
        k_extent: int | None,
        copy: CopyThreads,
    ) -> None:
        super().__init__(source, dtype, shape.channels_per_group, block_k, k_extent, copy)
        self._shape = shape
        self._offset = allocate("filter", copy.passes, "int32")

    def locate(self, first_row: Expr, group: Expr) -> None:
        """Compute the offsets of the rows of a work tile; rows past the end repeat the last one."""
        shape, copy = self._shape, self._copy
        with unrolled_loop(copy.passes, "i") as i:
            row = T.min(first_row + copy.row + i * copy.rows_per_pass, shape.n - 1)
            store(self._offset, i, self._row_offset(row, group))

    def load(self, stage: Expr, offset: int, first_k: Expr) -> None:
        """Start the copies of a K tile to an offset in a stage."""
        destination = self._copy.destination(stage, offset)
        for element, k in self._pieces(first_k):
            with self._copy.rows_loop() as i:
                address = self._row_address(destination, i)
                self._copy_piece(address, element, self._offset[i] + self._k_offset(k), self._is_valid_k(k))

    def _row_offset(self, row: Expr, group: Expr) -> Expr:
        """Return the index of a filter of a group."""
        return (group * self._shape.n + row) * self._shape.k

    def _k_offset(self, k: Expr) -> Expr:
        """Return the distance of an element of the reduction from the first one of its row."""
        return k


class TransposedFilterGather(FilterGather):
    """The filters of a dgrad from a transposed weight (taps, channels of a group, filters of all groups).

    Rows are channels, and the reduction runs over flipped taps and the filters of a group.
    """

    def _row_offset(self, row: Expr, group: Expr) -> Expr:
        return row * (self._shape.groups * self._channels) + group * self._channels

    def _k_offset(self, k: Expr) -> Expr:
        # Beyond the last tap nothing is read, and the index only has to stay inside.
        tap = T.max(self._shape.k // self._channels - 1 - k // self._channels, 0)
        return tap * (self._shape.n * self._shape.groups * self._channels) + k % self._channels
