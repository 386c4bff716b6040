"""Epilogue of an mma.sync kernel whose output is channels first: the staged tile is stored in vectors of pixels.

A row of the staged tile has the pixels of one channel. The two accumulators of a thread that are neighbours belong to
neighbouring channels, so each is stored on its own; the lanes of a warp access distinct banks. Threads then store
vectors of pixels: of 16 bytes if the number of pixels of an image permits, and else of the largest size that does not
cross an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Buffer, Expr, emit_ptx, if_, is_below, logical_and, to_uint32, unrolled_loop
from ..implicit_gemm_shape import ImplicitGemmShape
from .channels_first_epilogue import ChannelsFirstOutput
from .epilogue_ops import apply_to_pixels
from .mma_sync_mainloop import WarpTiling
from .staged_epilogue import StagedEpilogue
from .tile_scheduler import WorkTile
from .workspace_reduction import OutputVector


@dataclass(frozen=True)
class StagedPixelsEpilogue(StagedEpilogue):
    """The epilogue of a CTA; `pitch_bytes` are those from one channel of the staged tile to the next."""

    output: ChannelsFirstOutput | None = None  # the output; None is not allowed

    @property
    def _pixels(self) -> ChannelsFirstOutput:
        assert self.output
        return self.output

    @property
    def vector(self) -> int:
        """Neighbouring pixels that a thread stores at a time."""
        return math.gcd(self._pixels.vector, self.tiling.block_m // self.num_parts)

    @property
    def _strides(self) -> tuple[int, int]:
        return self.staged_itemsize, self.pitch_bytes

    @property
    def _residual_width(self) -> int:
        return 1

    def _output_index(self, row: Expr, channel: Expr) -> Expr:
        image, pixel = self._pixels.locate(row)
        return self._pixels.index(image, channel, pixel)

    def _is_pixel(self, row: Expr) -> Expr:
        return self._pixels.locate(row)[0] < self._pixels.images if self._pixels.has_further_rows else True

    def _store_sums(self, address: Expr, pair: Sequence[Expr]) -> None:
        for e in range(2):
            emit_ptx("st.shared.b32", address + to_uint32(e * self.pitch_bytes), pair[e])

    def _store_packed(self, address: Expr, word: Expr) -> None:
        for e in range(2):
            half = T.Cast("uint16", T.shift_right(word, T.uint32(16 * e)))
            emit_ptx("st.shared.b16", address + to_uint32(e * self.pitch_bytes), half)

    def _apply_vector_ops(
        self, channel: Expr, index: Expr, values: Buffer, words: Buffer, prefetched: Mapping[str, Buffer]
    ) -> None:
        apply_to_pixels(self.vector_ops, self.arguments, channel, index, self.vector, values, words, prefetched)

    def _locate(self, vector_idx: Expr, num_vectors: int, tile: WorkTile) -> tuple[Expr, Expr, Expr, Expr]:
        tiling, rows_per_cta = self.tiling, self.tiling.block_m // self.num_parts
        vectors_per_channel = rows_per_cta // self.vector
        row = self.split * rows_per_cta + vector_idx % vectors_per_channel * self.vector
        column = vector_idx // vectors_per_channel
        is_inside = logical_and(
            is_below(vector_idx, num_vectors, tiling.num_threads),
            tiling.is_inside(self.shape, tile.m + row, tile.n + column),
            self._is_pixel(tile.m + row),
        )
        offset = to_uint32(self.tile_offset) + to_uint32(column * self.pitch_bytes)
        offset = offset + to_uint32(row * self.staged_itemsize)
        channel = tile.group * self.shape.n + (tile.n + column)
        return is_inside, offset, channel, self._output_index(tile.m + row, channel)


def store_partial_sums_of_pixels(
    workspace: Buffer,
    accumulators: Buffer,
    tiling: WarpTiling,
    tile: WorkTile,
    split: Expr,
    shape: ImplicitGemmShape,
    output: ChannelsFirstOutput,
) -> None:
    """Store the accumulators of a work tile to the workspace, for each part as the output lies."""
    m_loop, n_loop = unrolled_loop(tiling.mmas_m, "i"), unrolled_loop(tiling.mmas_n, "j")
    with m_loop as mma_m, n_loop as mma_n, unrolled_loop(2, "h") as half:
        row, column = tiling.row(tile, mma_m, half), tiling.column(tile, mma_n)
        image, pixel = output.locate(row)
        is_pixel = image < output.images if output.has_further_rows else True
        num_outputs = output.images * output.pixels * shape.groups * shape.n
        for e in range(2):
            index = output.index(image, tile.group * shape.n + (column + e), pixel)
            with if_(logical_and(tiling.is_inside(shape, row, column + e), is_pixel)):
                address = workspace.access_ptr("w", offset=split * num_outputs + index)
                emit_ptx("st.global.b32", address, accumulators[tiling.accumulator(mma_m, mma_n, half) + e])


def locate_pixels(item: Expr, vector: int, shape: ImplicitGemmShape, output: ChannelsFirstOutput) -> OutputVector:
    """Return neighbouring pixels of a channel, and where `store_partial_sums_of_pixels` stored their partial sums."""
    index, channels = item * vector, shape.groups * shape.n
    channel = item // (output.pixels // vector) % channels
    return OutputVector(channel, index, lambda part: part * (shape.m * channels) + index)
