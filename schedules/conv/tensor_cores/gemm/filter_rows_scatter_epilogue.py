"""Epilogue of a product with filters as rows whose threads scatter columns to pixels of the output.

`stmatrix` transposes the accumulators on the way to shared memory, as in `filter_rows_epilogue`. TMA cannot store the
pixels of halo rows, between which there are zeros. The threads of a warpgroup therefore store vectors of filters of the
pixels that exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARPGROUP_SIZE
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    choose_offset_dtype,
    if_,
    load_global,
    load_shared,
    logical_and,
    store,
    store_global,
    store_shared,
    to_offset,
    to_uint32,
)
from .atoms import ThreadPosition, named_barrier_sync
from .epilogue_ops import EpilogueOps
from .filter_rows_epilogue import FilterArguments, FilterRowsEpilogue, FilterRowsEpilogueTile
from .halo_pixels import HaloPixels
from .pipelines import PipelineState, TmaPipeline
from .smem_layout import CHUNK_BYTES
from .tile_scheduler import WorkTile

STAGED_PIXELS = 64  # pixels of a warpgroup in shared memory
SUBTILE_PIXELS = 16  # pixels of a subtile, which an stmatrix stores
CHUNKS = 8  # vectors of the 64 filters of a subtile, of 16-bit results


class FilterRowsScatterEpilogue(FilterRowsEpilogue):
    """Applies the epilogue to a warpgroup's accumulators, and stores the filters of existing pixels.

    Args:
        tile: Division into subtiles of 16 pixels.
        ops: The epilogue, with one residual at most.
        channels: Per-channel arguments.
        pipeline: `STAGED_PIXELS` of each warpgroup, whose barriers are not used.
        arguments: Argument buffers by name.
        pixels: Pixels of the columns.
    """

    def __init__(
        self,
        tile: FilterRowsEpilogueTile,
        ops: EpilogueOps,
        channels: FilterArguments,
        pipeline: TmaPipeline,
        arguments: Mapping[str, Buffer],
        pixels: HaloPixels,
    ) -> None:
        arrays = [arguments[name] for name in ("Y", *ops.residuals)]
        super().__init__(tile, ops, channels, pipeline, arrays)
        self._output, *self._residual_arrays = arrays
        self._pixels, self._num_filters = pixels, pixels.w.O
        self._rows_per_pass = WARPGROUP_SIZE // CHUNKS
        self._dtype = choose_offset_dtype(pixels.rows * self._num_filters)
        num_rows = ceil_div(tile.atom.n, self._rows_per_pass)
        self._indices = allocate("first_element", num_rows, self._dtype)  # of each pixel; -1: there is none
        num_vectors = STAGED_PIXELS // self._rows_per_pass
        self._vectors = [allocate(f"vector_{i}", CHUNK_BYTES // 4, "uint32") for i in range(num_vectors)]
        self._vector_filters = CHUNK_BYTES // get_itemsize(tile.dtype)

    def store(
        self,
        accumulators: Sequence[Expr],
        tile: WorkTile,
        state: PipelineState,
        thread: ThreadPosition,
        warpgroup: Expr,
    ) -> None:
        """Store a warpgroup's part of a work tile; `warpgroup` is its index among those that share the tile."""
        buffer, chunk = self._pipeline.stage_address(thread.warpgroup), thread.warpgroup_thread % CHUNKS
        self._locate_pixels(tile, thread)
        for m_atom in range(self._tile.m_atoms):
            first_filter = self._tile.row(tile, warpgroup, m_atom) + chunk * self._vector_filters
            for first in range(0, self._tile.atom.n, STAGED_PIXELS):
                num_pixels = min(STAGED_PIXELS, self._tile.atom.n - first)
                accesses = self._list_accesses(first, num_pixels, first_filter, buffer, thread)
                named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
                if self._residual is not None:
                    for vector, address, index, is_inside in accesses:
                        with if_(is_inside):
                            load_global(vector, self._residual_arrays[0], index, self._vector_filters)
                            store_shared(address, vector, CHUNK_BYTES)
                    named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
                for pixel in range(0, num_pixels, SUBTILE_PIXELS):
                    subtile = buffer + to_uint32(pixel * self._tile.layout.row_bytes)
                    self._copy_to_smem(accumulators, m_atom, (first + pixel) // SUBTILE_PIXELS, subtile, thread)
                named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
                for vector, address, _, _ in accesses:
                    load_shared(vector, address, CHUNK_BYTES)
                for vector, _, index, is_inside in accesses:
                    with if_(is_inside):
                        store_global(self._output, index, vector, self._vector_filters)

    def finish(self, thread: ThreadPosition) -> None:
        """Do nothing, as TMA reads no shared memory."""

    def _locate_pixels(self, tile: WorkTile, thread: ThreadPosition) -> None:
        """Compute the index of the first output of each pixel of which a thread stores vectors, in registers."""
        for i in range(ceil_div(self._tile.atom.n, self._rows_per_pass)):
            row = thread.warpgroup_thread // CHUNKS + i * self._rows_per_pass
            pixel, exists = self._pixels.locate_pixel(0, tile.n + row)
            element = to_offset(pixel, self._dtype) * self._num_filters
            store(self._indices, i, T.Select(exists, element, to_offset(-1, self._dtype)))

    def _list_accesses(
        self, first: int, num_pixels: int, first_filter: Expr, buffer: Expr, thread: ThreadPosition
    ) -> list[tuple[Buffer, Expr, Expr, Expr]]:
        """Return the vectors of a thread: registers, address, index in the output, and whether it exists."""
        chunk, accesses = thread.warpgroup_thread % CHUNKS, []
        for i in range(num_pixels // self._rows_per_pass):
            row = thread.warpgroup_thread // CHUNKS + i * self._rows_per_pass
            index = self._indices[first // self._rows_per_pass + i]
            exists = logical_and(index >= 0, first_filter < self._num_filters)
            address = buffer + self._tile.layout.swizzled_offset(row, chunk)
            accesses.append((self._vectors[i], address, index + first_filter, exists))
        return accesses
