"""Split reduction within a cluster: CTAs exchange partial sums through distributed shared memory.

Each CTA adds up and stores a share of the rows of the tile. Partial sums are pushed to the CTA that adds them up,
because a thread does not wait for remote stores, unlike remote loads. A cluster of one CTA is a store without TMA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_call,
    emit_ptx,
    if_,
    is_below,
    load_shared,
    logical_and,
    serial_loop,
    store,
    store_global,
    to_uint32,
)
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from .atoms import ThreadPosition, WgmmaAtom
from .channels_first_epilogue import ChannelsFirstOutput
from .epilogue_ops import EpilogueOps, apply_to_pixels, apply_to_vector
from .pipelines import map_to_cta, sync_cluster_relaxed
from .residue_classes import ResidueClasses
from .tile_reduction import TileReduction
from .tile_scheduler import WorkTile

PIECE_M, PIECE_N = 4, 8  # rows × columns of partial sums that are contiguous in shared memory
_PIECE_ELEMENTS = PIECE_M * PIECE_N
_PIXEL_REGISTERS = {"sums": "float32", "values": "float32", "words": "uint32"}  # names and dtypes


@dataclass(frozen=True)
class ClusterReduction(TileReduction):
    """Adds up the partial sums of the CTAs of a cluster, applies the epilogue and stores the tile."""

    shape: ImplicitGemmShape  # the product
    atom: WgmmaAtom  # the wgmma instruction
    m_atoms: int  # instructions of a warpgroup along M
    block_m: int  # rows of the tile
    rows_per_cta: int  # rows that one CTA adds up, a multiple of `PIECE_M`
    num_ctas: int  # CTAs of the cluster
    num_threads: int  # threads that hold accumulators
    vector_channels: int  # neighbouring channels that a thread stores at a time
    residues: ResidueClasses | None = None  # residue classes of the rows; None if rows are pixels of the output
    output: ChannelsFirstOutput | None = None  # the output, if it is channels first; residuals are as well
    k_slices: int = 1  # groups of warpgroups with sums of different K tiles
    cluster_shape: tuple[int, int] = (1, 1)  # CTAs along M and N that share operands, with tiles of whole clusters

    def _wait_for_reads(self) -> None:
        """Wait until all threads of the cluster have read the stages."""
        if self.num_ctas > 1:
            sync_cluster_relaxed()
        else:
            self._sync()

    def _sync(self) -> None:
        """Wait for all threads of the cluster."""
        emit_call(T.cuda.cluster_sync() if self.num_ctas > 1 else T.cuda.cta_sync())

    def _offset(self, split: Expr, row: Expr, column: Expr) -> Expr:
        """Return the shared-memory offset of a partial sum.

        Half a warp stores the pairs of one piece at a time, and a quarter of a warp loads a piece in vectors of four.
        Both access each bank once. If the output is channels first, the rows of a column are neighbours in a piece, and
        a column exchanges its place with the next one in every second row of pieces, which half a warp also stores.
        """
        piece_row = (split * self.rows_per_cta + row) // PIECE_M
        piece = piece_row * (self.atom.n // PIECE_N) + column // PIECE_N
        element = row % PIECE_M * PIECE_N + column % PIECE_N
        if self.output:
            parity = piece_row % 2
            place = column % 2 + parity - column % 2 * parity * 2  # exclusive or
            element = (column % PIECE_N // 2 * 2 + place) * PIECE_M + row % PIECE_M
        return to_uint32((piece * _PIECE_ELEMENTS + element) * ACCUMULATOR_BYTES)

    def _stage(self, accumulators: Sequence[Expr], split: Expr, thread: ThreadPosition, smem: Expr) -> None:
        """Store this thread's partial sums to the shared memory of the CTAs that add them up."""
        width = 1 if self.output else 2  # neighbouring columns that are contiguous in shared memory
        names = ["remote_sums", "remote_sums_1"][: 2 // width]
        remotes, suffix = [Register(name, "uint32") for name in names], ".v2.b32" if width == 2 else ".b32"
        mnemonic = f"st.shared{suffix}"
        warp_row = thread.warpgroup_thread // WARP_SIZE * 16
        warpgroup = thread.warpgroup
        if self.k_slices > 1:
            warpgroups = self.num_threads // WARPGROUP_SIZE // self.k_slices
            split, warpgroup = split * self.k_slices + warpgroup // warpgroups, warpgroup % warpgroups
        first_row = warpgroup * (self.m_atoms * self.atom.m) + warp_row + thread.lane // 4
        for m_atom in range(self.m_atoms):
            for half in range(2):
                row = first_row + (m_atom * self.atom.m + half * 8)
                for e, remote in enumerate(remotes):
                    address = smem + self._offset(split, row % self.rows_per_cta, thread.lane % 4 * 2 + e)
                    if self.num_ctas > 1:
                        mnemonic = f"st.shared::cluster{suffix}"
                        map_to_cta(remote, address, row // self.rows_per_cta)
                    else:
                        remote.set(address)
                for columns in range(self.atom.n // PIECE_N):
                    first = m_atom * self.atom.num_accumulators + columns * 4 + half * 2
                    pair = [accumulators[first + e] for e in range(2)]
                    for e, remote in enumerate(remotes):
                        values = pair[e * width : (e + 1) * width]
                        emit_ptx(mnemonic, remote.value + self._offset(0, 0, columns * PIECE_N), *values)

    def _add_up_parts(self, smem: Expr, row: Expr, column: Expr, sums: Buffer, words: Buffer, count: int) -> None:
        """Load neighbouring sums of all CTAs from this CTA's shared memory, and add them up."""
        for part in range(self.num_ctas * self.k_slices):
            load_shared(words if part else sums, smem + self._offset(part, row, column), count * ACCUMULATOR_BYTES)
            for e in range(count if part else 0):
                store(sums, e, sums[e] + T.reinterpret("float32", words[e]))

    def _store(
        self,
        tile: WorkTile,
        split: Expr,
        thread: ThreadPosition,
        smem: Expr,
        ops: EpilogueOps,
        arguments: Mapping[str, Buffer],
    ) -> None:
        """Store this CTA's share of the rows."""
        store_share = self._store_pixels if self.output else self._store_vectors
        store_share(tile, split, thread, smem, ops, arguments)

    def _store_vectors(
        self,
        tile: WorkTile,
        split: Expr,
        thread: ThreadPosition,
        smem: Expr,
        ops: EpilogueOps,
        arguments: Mapping[str, Buffer],
    ) -> None:
        """Add up this CTA's share of the rows, apply the epilogue and store the results in vectors of channels."""
        vector, shape, rows, n = self.vector_channels, self.shape, self.rows_per_cta, self.atom.n
        vectors_per_row, pieces_per_row, num_vectors = PIECE_N // vector, n // PIECE_N, rows * n // vector
        values, words = allocate("values", 8, "float32"), allocate("words", 8, "uint32")
        with serial_loop(ceil_div(num_vectors, self.num_threads), "i") as i:
            index = i * self.num_threads + thread.thread
            piece = index // (vectors_per_row * PIECE_M)
            row = piece // pieces_per_row * PIECE_M + index // vectors_per_row % PIECE_M
            column = piece % pieces_per_row * PIECE_N + index % vectors_per_row * vector
            tile_row = split * rows + row
            m, channel = tile.m + tile_row, tile.n + column
            pixel, is_pixel = m, is_below(m, shape.m, self.block_m * self.cluster_shape[0])
            if self.residues:
                pixel, is_pixel = self.residues.locate_pixel(tile.residue, m)
            elif shape.frames > 1:
                pixel = tile.residue * shape.m + m
            is_inside = logical_and(
                is_below(index, num_vectors, self.num_threads),
                True if self.num_ctas * rows == self.block_m else tile_row < self.block_m,
                is_pixel,
                is_below(channel, shape.n, n * self.cluster_shape[1]),
            )
            with if_(is_inside):
                self._add_up_parts(smem, row, column, values, words, vector)
                channel = tile.group * shape.n + channel
                output_index = pixel * (shape.groups * shape.n) + channel
                apply_to_vector(ops, arguments, channel, output_index, vector, values, words)
                store_global(arguments["Y"], output_index, words, vector)

    def _store_pixels(
        self,
        tile: WorkTile,
        split: Expr,
        thread: ThreadPosition,
        smem: Expr,
        ops: EpilogueOps,
        arguments: Mapping[str, Buffer],
    ) -> None:
        """Do what `_store_vectors` does for a channels-first output; a thread adds up neighbouring pixels."""
        output, shape, rows, n = self.output, self.shape, self.rows_per_cta, self.atom.n
        assert output
        vector, num_columns = math.gcd(output.vector, PIECE_M), rows // PIECE_M * n
        sums, values, words = (allocate(name, 8, dtype) for name, dtype in _PIXEL_REGISTERS.items())
        with serial_loop(ceil_div(num_columns, self.num_threads), "i") as i:
            index = i * self.num_threads + thread.thread
            row, column = index // n * PIECE_M, index % n
            tile_row, channel = split * rows + row, tile.n + column
            is_inside = logical_and(
                is_below(index, num_columns, self.num_threads),
                True if self.num_ctas * rows == self.block_m else tile_row < self.block_m,
                is_below(channel, shape.n, n * self.cluster_shape[1]),
            )
            with if_(is_inside):
                self._add_up_parts(smem, row, column, sums, words, PIECE_M)
                for first in range(0, PIECE_M, vector):
                    m, output_channel = tile.m + (tile_row + first), tile.group * shape.n + channel
                    with if_(is_below(m, shape.m, self.block_m * self.cluster_shape[0])):
                        image, pixel = output.locate(m)
                        output_index = output.index(image, output_channel, pixel)
                        with if_(image < output.images if output.has_further_rows else True):
                            for e in range(vector):
                                store(values, e, sums[first + e])
                            apply_to_pixels(ops, arguments, output_channel, output_index, vector, values, words)
                            store_global(arguments["Y"], output_index, words, vector)
