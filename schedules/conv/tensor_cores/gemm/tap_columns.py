"""Taps of a filter as columns of the product, for few filters: each line of the input is loaded once for all of them.

A product with rows (input pixels) and columns (tap, filter) has the terms of all outputs that read a pixel. An output
is the sum of terms of neighbouring pixels, each of another column. A work tile has the pixels of a window of lines, and
stores the outputs whose terms are all in the window. Source: Vasudevan, Anderson, Gregg, "Parallel Multi Channel
Convolution using General Matrix Multiplication", 2017 (kn2row).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv3d
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_if_else,
    emit_ptx,
    fill_zeros,
    if_,
    is_below,
    logical_and,
    serial_loop,
    store,
    store_global,
    to_uint32,
    unrolled_loop,
)
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from .atoms import ThreadPosition, WgmmaAtom
from .epilogue_ops import EpilogueOps, apply_to_vector
from .tile_reduction import TileReduction
from .tile_scheduler import WorkTile
from .tma import TmaCopy
from .tma_loaders import Position

WINDOW_COLUMNS = 64  # input pixels of a line of a window, the rows of a wgmma
COLUMN_UNIT = 8  # columns of a product are a multiple of this
PADDING_ROWS = 4  # rows between the columns of terms in shared memory, so that pairs lie in distinct banks


@dataclass(frozen=True)
class WindowTiles:
    """Division of the outputs among windows of input lines; the convolution is a volume."""

    w: Conv3d  # the convolution
    lines: int  # input lines per window

    @property
    def num_columns(self) -> int:
        """Columns of the product: taps of a plane × filters, padded to whole instructions."""
        return round_up(math.prod(self.w.kernel[1:]) * self.w.O, COLUMN_UNIT)

    @property
    def rows(self) -> int:
        """Rows of the product per window."""
        return self.lines * WINDOW_COLUMNS

    @property
    def output_lines(self) -> int:
        """Output lines per window; none if the window has fewer lines than the filter."""
        return self.lines - self.w.window[1] + 1

    @property
    def output_columns(self) -> int:
        """Output pixels of a line per window."""
        return WINDOW_COLUMNS - self.w.window[2] + 1

    @property
    def windows_per_plane(self) -> tuple[int, int]:
        """Windows along the height and along the width of a plane."""
        return ceil_div(self.w.P, self.output_lines), ceil_div(self.w.Q, self.output_columns)

    @property
    def count(self) -> int:
        """Number of windows."""
        return self.w.N * self.w.Z * math.prod(self.windows_per_plane)

    def locate(self, row: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the output plane, counted over all images, and the first output of the window with a row.

        If planes share input frames, the windows of all planes of an image at one place follow one another, so that L2
        has the frames after their first use; a plane of a video may exceed it.
        """
        along_height, along_width = self.windows_per_plane
        window = row // self.rows
        place, plane = window % (along_height * along_width), window // (along_height * along_width)
        if self.w.kernel[0] > 1 and self.w.Z > 1:
            planes, places = self.w.Z, along_height * along_width
            place, plane = window // planes % places, window // (planes * places) * planes + window % planes
        return plane, place // along_width * self.output_lines, place % along_width * self.output_columns


@dataclass(frozen=True)
class PlaneWindows:
    """Cached frames and X in tiled mode: rows are the pixels of a window, taps are those along the depth."""

    tiles: WindowTiles

    def _frames_map(self, num_frames: int, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        w = self.tiles.w
        assert box_rows == self.tiles.rows
        extents, strides = (w.C, w.W, w.H, w.N * num_frames), (w.C, w.C * w.W, w.C * w.W * w.H)
        box = (box_channels, WINDOW_COLUMNS, self.tiles.lines, 1)
        return maps.make_tiled_map(w.storage, get_itemsize(w.storage), extents, strides, box, swizzle_bytes)

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map of X."""
        return self._frames_map(self.tiles.w.D, box_rows, box_channels, swizzle_bytes)

    def cache_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap | None:
        """Return the tensor map of cached frames; None if there are none."""
        cached_frames = self.tiles.w.cached_frames
        return self._frames_map(cached_frames, box_rows, box_channels, swizzle_bytes) if cached_frames else None

    def locate(self, row: Expr, name: str) -> Position:
        """Compute the first pixel of a window, its image, and its frame under the first tap."""
        w, (plane, line, column) = self.tiles.w, self.tiles.locate(row)
        values = {
            "column": column - w.pad_low[2],
            "line": line - w.pad_low[1],
            "image": plane // w.Z,
            "frame": plane % w.Z * w.stride[0] - w.pad_low[0],
        }
        return [Register(f"{name}_{key}", value=value).value for key, value in values.items()]

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy a window of the frame under one tap; frames outside of both arrays are zeros."""
        w, (channel, tap), (column, line, image, first_frame) = self.tiles.w, k, position
        frame = first_frame + tap * w.dilation[0]

        def load_frame(array: TmaCopy, frames: int, first: int) -> None:
            is_inside = T.And(frame >= first, frame < first + frames)
            index = T.Select(is_inside, image * frames + (frame - first), w.N * frames)  # beyond the last: zeros
            array.issue(destination, (channel, column, line, index))

        if not w.cached_frames:
            load_frame(copy, w.D, 0)
            return
        emit_if_else(
            frame < w.cached_frames,
            lambda: load_frame(replace(copy, tensor_map=copy.cache_map), w.cached_frames, 0),
            lambda: load_frame(copy, w.D, w.cached_frames),
        )


@dataclass(frozen=True)
class TapColumnReduction(TileReduction):
    """Adds up the terms of the outputs of a window through shared memory, applies the epilogue and stores them."""

    tiles: WindowTiles
    atom: WgmmaAtom  # the wgmma instruction
    m_atoms: int  # instructions of a warpgroup along M
    num_threads: int  # threads that hold accumulators

    @property
    def vector(self) -> int:
        """Neighbouring channels that a thread stores at a time."""
        return math.gcd(self.tiles.w.O, VECTOR_BYTES // get_itemsize(self.tiles.w.storage))

    def _offset(self, row: Expr, column: Expr) -> Expr:
        """Return the shared-memory offset of a term: the rows of a column are neighbours."""
        return to_uint32((column * (self.tiles.rows + PADDING_ROWS) + row) * ACCUMULATOR_BYTES)

    def _stage(self, accumulators: Sequence[Expr], split: Expr, thread: ThreadPosition, smem: Expr) -> None:
        """Store this thread's terms to shared memory."""
        warp_row = thread.warpgroup_thread // WARP_SIZE * 16
        first_row = thread.warpgroup * (self.m_atoms * self.atom.m) + warp_row + thread.lane // 4
        address = Register("terms", "uint32", smem + self._offset(first_row, thread.lane % 4 * 2)).value
        for m_atom, half, column, e in itertools.product(
            range(self.m_atoms), range(2), range(self.atom.n // 8), range(2)
        ):
            value = accumulators[m_atom * self.atom.num_accumulators + column * 4 + half * 2 + e]
            offset = self._offset(m_atom * self.atom.m + half * 8, column * 8 + e)
            emit_ptx("st.shared.b32", address + offset, value)

    def _store(
        self,
        tile: WorkTile,
        split: Expr,
        thread: ThreadPosition,
        smem: Expr,
        ops: EpilogueOps,
        arguments: Mapping[str, Buffer],
    ) -> None:
        """Add up the terms of outputs, and store them in vectors of channels."""
        tiles, w, vector = self.tiles, self.tiles.w, self.vector
        vectors_per_pixel = w.O // vector
        num_items = tiles.output_lines * tiles.output_columns * vectors_per_pixel
        values, words, term = (allocate(*each) for each in (("values", 8, "float32"), ("words", 8, "uint32"), TERM))
        plane, first_line, first_column = tiles.locate(tile.m)
        with serial_loop(ceil_div(num_items, self.num_threads), "i") as i:
            item = i * self.num_threads + thread.thread
            channel, pixel = item % vectors_per_pixel * vector, item // vectors_per_pixel
            line, column = pixel // tiles.output_columns, pixel % tiles.output_columns
            is_inside = logical_and(
                is_below(item, num_items, self.num_threads),
                is_below(first_line + line, w.P, tiles.output_lines),
                is_below(first_column + column, w.Q, tiles.output_columns),
            )
            with if_(is_inside):
                fill_zeros(values, vector)
                address = Register("window", "uint32")
                address.set(smem + self._offset(line * WINDOW_COLUMNS + column, channel))
                for r, s in itertools.product(range(w.R), range(w.S)):
                    row = r * w.dilation[1] * WINDOW_COLUMNS + s * w.dilation[2]
                    with unrolled_loop(vector, "e") as e:
                        emit_ptx("ld.shared.b32", term[0], address.value + self._offset(row, (r * w.S + s) * w.O + e))
                        store(values, e, values[e] + term[0])
                output = (plane * w.P + first_line + line) * w.Q + first_column + column
                index = output * w.O + channel
                apply_to_vector(ops, arguments, channel, index, vector, values, words)
                store_global(arguments["Y"], index, words, vector)


TERM = ("term", 1, "float32")  # register of a term
