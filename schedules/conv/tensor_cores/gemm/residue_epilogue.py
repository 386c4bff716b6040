"""Epilogue of a strided dgrad: subtiles pass through shared memory, and warps store them in vectors of channels.

The pixels of a residue class are not contiguous in dX, so no box of TMA has them. A warp reads the 16 rows that it has
written itself, so that only its own threads synchronize, and stores neighbouring vectors of a pixel together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_ptx,
    if_,
    load_global,
    load_shared,
    logical_and,
    store,
    store_global,
    store_shared,
)
from ..implicit_gemm_shape import ImplicitGemmShape
from .atoms import ThreadPosition
from .channel_arguments import ChannelArguments
from .epilogue_ops import EpilogueOps
from .pipelines import PipelineState, TmaPipeline
from .residue_classes import ResidueClasses
from .smem_layout import CHUNK_BYTES
from .tile_scheduler import WorkTile
from .tma_epilogue import EpilogueTile, TmaEpilogue

WARP_ROWS = 16  # rows of a subtile that a warp has accumulators of


class ResidueEpilogue(TmaEpilogue):
    """Applies the epilogue to a warpgroup's accumulators as `TmaEpilogue` does, and stores them to pixels of a class.

    Args:
        tile: Division into subtiles, of which a warpgroup has one at a time in shared memory.
        ops: The epilogue, with one residual at most.
        channels: Per-channel arguments.
        pipeline: Stages of all warpgroups, whose barriers are not used.
        arguments: Argument buffers by name.
        residues: The residue classes.
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
        residues: ResidueClasses,
        shape: ImplicitGemmShape,
        is_exact: bool,
    ) -> None:
        arrays = [arguments[name] for name in ("Y", *ops.residuals)]
        super().__init__(tile, ops, channels, pipeline, arrays)
        self._output, *self._residual_arrays = arrays
        self._residues, self._is_exact = residues, is_exact
        self._columns, self._row_columns = shape.n, shape.groups * shape.n
        self._passes = WARP_ROWS * tile.layout.row_bytes // (CHUNK_BYTES * WARP_SIZE)
        self._pixels = allocate("pixels", self._passes, "int32")  # -1: beyond the output
        self._vectors = [allocate(f"vector_{i}", CHUNK_BYTES // 4, "uint32") for i in range(self._passes)]
        self._vector_columns = CHUNK_BYTES // get_itemsize(tile.dtype)

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
        chunks = epilogue_tile.layout.row_bytes // CHUNK_BYTES
        lane_row, chunk = thread.lane // chunks, thread.lane % chunks
        rows = [
            thread.warpgroup_thread // WARP_SIZE * WARP_ROWS + i * (WARP_SIZE // chunks) + lane_row
            for i in range(self._passes)
        ]
        addresses = [buffer + epilogue_tile.layout.swizzled_offset(row, chunk) for row in rows]
        output_row = Register("output_row")
        for m_atom in range(epilogue_tile.m_atoms):
            for i, row in enumerate(rows):
                output_row.set(epilogue_tile.row(tile, warpgroup, m_atom) + row)
                pixel, exists = self._residues.locate_pixel(tile.residue, output_row.value)
                store(self._pixels, i, T.Select(exists, pixel, -1))
            for n_idx in range(epilogue_tile.subtiles_n):
                column = tile.n + n_idx * epilogue_tile.n + chunk * self._vector_columns
                is_column = True if self._is_exact else column < self._columns
                indices = [
                    self._pixels[i] * self._row_columns + tile.group * self._columns + column
                    for i in range(self._passes)
                ]
                are_inside = [logical_and(is_column, self._pixels[i] >= 0) for i in range(self._passes)]
                vectors = list(zip(self._vectors, addresses, indices, are_inside, strict=True))
                _sync_warp()
                if self._residual is not None:
                    for vector, _, index, is_inside in vectors:
                        with if_(is_inside):
                            load_global(vector, self._residual_arrays[0], index, self._vector_columns)
                    for vector, address, _, is_inside in vectors:
                        with if_(is_inside):
                            store_shared(address, vector, CHUNK_BYTES)
                    _sync_warp()
                self._copy_to_smem(accumulators, m_atom, n_idx, buffer, thread)
                _sync_warp()
                for vector, address, _, _ in vectors:
                    load_shared(vector, address, CHUNK_BYTES)
                for vector, _, index, is_inside in vectors:
                    with if_(is_inside):
                        store_global(self._output, index, vector, self._vector_columns)

    def finish(self, thread: ThreadPosition) -> None:
        """Do nothing, as TMA reads no shared memory."""


def _sync_warp() -> None:
    emit_ptx("bar.warp.sync", T.uint32(0xFFFFFFFF))
