"""Epilogue whose threads scatter rows to pixels that are not contiguous in the output, in vectors of channels.

The pixels of a residue class of a strided dgrad are not contiguous in dX, nor are those of halo rows in Y, so no box of
TMA has them. Subtiles of the accumulators pass through shared memory. A warp reads the 16 rows that it has written
itself, so that only its own threads synchronize, and stores neighbouring vectors of a pixel together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE
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
)
from ..implicit_gemm_shape import ImplicitGemmShape
from .atoms import ThreadPosition, sync_warp
from .channel_arguments import ChannelArguments
from .epilogue_ops import EpilogueOps
from .epilogue_tile import EpilogueTile
from .pipelines import PipelineState, TmaPipeline
from .smem_layout import CHUNK_BYTES
from .tile_scheduler import WorkTile
from .tma_epilogue import TmaEpilogue

WARP_ROWS = 16  # rows of a subtile that a warp has accumulators of


class RowPixels(Protocol):
    """The pixels of the output that the rows of one or several products belong to."""

    @property
    def rows(self) -> int:
        """Rows of a product, at least as many as pixels."""

    @property
    def count(self) -> int:
        """Number of products, each of a class of pixels."""

    @property
    def have_taps(self) -> bool:
        """Whether all classes have products."""

    def locate_pixel(self, residue: Expr, row: Expr) -> tuple[Expr, Expr]:
        """Return the pixel of a row, counted over all images, and whether there is one."""


class ScatterEpilogue(TmaEpilogue):
    """Applies the epilogue to a warpgroup's accumulators as `TmaEpilogue` does, and stores them to pixels of a class.

    Args:
        tile: Division into subtiles, of which a warpgroup has one at a time in shared memory.
        ops: The epilogue, with one residual at most.
        channels: Per-channel arguments.
        pipeline: Stages of all warpgroups, whose barriers are not used.
        arguments: Argument buffers by name.
        pixels: Pixels of the rows, such as residue classes.
        shape: The product of a class.
        is_exact: Whether work tiles have no columns beyond a group.
    """

    def __init__(
        self,
        tile: EpilogueTile,
        ops: EpilogueOps,
        channels: ChannelArguments,
        pipeline: TmaPipeline,
        arguments: Mapping[str, Buffer],
        pixels: RowPixels,
        shape: ImplicitGemmShape,
        is_exact: bool,
    ) -> None:
        arrays = [arguments[name] for name in ("Y", *ops.residuals)]
        super().__init__(tile, ops, channels, pipeline, arrays)
        self._output, *self._residual_arrays = arrays
        self._pixels, self._is_exact = pixels, is_exact
        self._columns, self._row_columns = shape.n, shape.groups * shape.n
        self._chunks = tile.layout.row_bytes // CHUNK_BYTES
        self._passes = WARP_ROWS * self._chunks // WARP_SIZE
        self._dtype = choose_offset_dtype(pixels.rows * pixels.count * self._row_columns)
        self._indices = allocate("first_element", self._passes, self._dtype)  # -1: the pixel is beyond the output
        self._vectors = [allocate(f"vector_{i}", CHUNK_BYTES // 4, "uint32") for i in range(self._passes)]
        self._vector_columns = CHUNK_BYTES // get_itemsize(tile.dtype)
        self.stores_zeros = not pixels.have_taps and not ops.ops  # of classes without taps, in place of their sums

    def store(
        self,
        accumulators: Sequence[Expr],
        tile: WorkTile,
        state: PipelineState,
        thread: ThreadPosition,
        warpgroup: Expr,
    ) -> None:
        """Store a warpgroup's part of a work tile; `warpgroup` is its index among those that share the tile."""
        epilogue_tile = self._tile
        self.channels.wait(thread)
        buffer = self._pipeline.stage_address(thread.warpgroup * epilogue_tile.stages)
        rows, chunk = self._list_rows(thread)
        addresses = [buffer + epilogue_tile.layout.swizzled_offset(row, chunk) for row in rows]
        for m_atom in range(epilogue_tile.m_atoms):
            self._locate_rows(tile, thread, warpgroup, m_atom)
            for n_idx in range(epilogue_tile.subtiles_n):
                accesses = list(zip(self._vectors, addresses, self._list_vectors(tile, thread, n_idx), strict=True))
                sync_warp()
                if self._residual is not None:
                    for vector, _, (index, is_inside) in accesses:
                        with if_(is_inside):
                            load_global(vector, self._residual_arrays[0], index, self._vector_columns)
                    for vector, address, (_, is_inside) in accesses:
                        with if_(is_inside):
                            store_shared(address, vector, CHUNK_BYTES)
                    sync_warp()
                self._copy_to_smem(accumulators, m_atom, n_idx, buffer, thread)
                sync_warp()
                for vector, address, _ in accesses:
                    load_shared(vector, address, CHUNK_BYTES)
                for vector, _, (index, is_inside) in accesses:
                    with if_(is_inside):
                        store_global(self._output, index, vector, self._vector_columns)

    def finish(self, thread: ThreadPosition) -> None:
        """Do nothing, as TMA reads no shared memory."""

    def store_zeros(self, tile: WorkTile, thread: ThreadPosition, warpgroup: Expr) -> None:
        """Store zeros to a warpgroup's part of a work tile, whose class has no taps; there are no operations."""
        vector = self._vectors[0]
        for e in range(CHUNK_BYTES // 4):
            store(vector, e, T.uint32(0))
        for m_atom in range(self._tile.m_atoms):
            self._locate_rows(tile, thread, warpgroup, m_atom)
            vectors = [self._list_vectors(tile, thread, n_idx) for n_idx in range(self._tile.subtiles_n)]
            for row_vectors in zip(*vectors, strict=True):  # those of a pixel follow one another
                for index, is_inside in row_vectors:
                    with if_(is_inside):
                        store_global(self._output, index, vector, self._vector_columns)

    def _list_rows(self, thread: ThreadPosition) -> tuple[list[Expr], Expr]:
        """Return the rows of a subtile of which a thread stores a vector, and the index of the vector in these rows."""
        first_row = thread.warpgroup_thread // WARP_SIZE * WARP_ROWS + thread.lane // self._chunks
        return [first_row + i * (WARP_SIZE // self._chunks) for i in range(self._passes)], thread.lane % self._chunks

    def _locate_rows(self, tile: WorkTile, thread: ThreadPosition, warpgroup: Expr, m_atom: int) -> None:
        """Compute the index of the first element that a thread stores of each of its rows, in registers."""
        rows, chunk = self._list_rows(thread)
        first_column = tile.group * self._columns + tile.n + chunk * self._vector_columns
        for i, row in enumerate(rows):
            first_row = self._tile.row(tile, warpgroup, m_atom)
            pixel, exists = self._pixels.locate_pixel(tile.residue, first_row + row)
            element = to_offset(pixel, self._dtype) * self._row_columns + first_column
            store(self._indices, i, T.Select(exists, element, to_offset(-1, self._dtype)))

    def _list_vectors(self, tile: WorkTile, thread: ThreadPosition, n_idx: int) -> list[tuple[Expr, Expr]]:
        """Return the index of a thread's vector in each of its rows of a subtile, and whether it is in the output."""
        first_column = n_idx * self._tile.n
        column = tile.n + first_column + thread.lane % self._chunks * self._vector_columns
        is_column = True if self._is_exact else column < self._columns
        return [
            (self._indices[i] + first_column, logical_and(is_column, self._indices[i] >= 0))
            for i in range(self._passes)
        ]
