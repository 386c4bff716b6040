"""Rows of a volume below a tile of output pixels, in shared memory as they are in memory, channels interleaved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvmconv.arithmetic import round_up
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Buffer, Expr, allocate, items_loop, logical_and, to_uint32
from ..gemm.cp_async import copy_elements
from ..implicit_gemm_shape import VECTOR_BYTES


@dataclass(frozen=True)
class RowWindow:
    """The rows below a tile of one output plane; its sizes may be columns of many tiles.

    Rows are copied in vectors that divide the elements of an image row, so that a vector is inside of the image or
    outside. Tiles begin at multiples of 16 columns, hence the first pixel of all tiles has the same place in a vector.
    """

    w: Conv  # the forward convolution of three spatial axes, channels last
    block_p: Any  # output rows of the tile
    block_q: Any  # output columns of the tile

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def vector(self) -> int:
        """Elements per copy."""
        return math.gcd(self.w.input_size[-1] * self.w.C, VECTOR_BYTES // self.itemsize)

    @property
    def lead(self) -> int:
        """Elements before the first pixel of a row in shared memory."""
        return -self.w.pad_low[-1] * self.w.C % self.vector

    @property
    def rows_per_plane(self) -> Any:
        """Rows of a plane of the input."""
        return (self.block_p - 1) * self.w.stride[1] + self.w.window[1]

    @property
    def num_rows(self) -> Any:
        """Rows of all planes that taps along the depth read."""
        return self.w.kernel[0] * self.rows_per_plane

    @property
    def row_elements(self) -> Any:
        """Elements of a row that are copied."""
        pixels = (self.block_q - 1) * self.w.stride[-1] + self.w.window[-1]
        return round_up(self.lead + pixels * self.w.C, self.vector)

    @property
    def row_bytes(self) -> Any:
        """Bytes from a row to the next in shared memory."""
        return round_up(self.row_elements * self.itemsize, VECTOR_BYTES)

    @property
    def nbytes(self) -> Any:
        """Bytes of the window."""
        return self.num_rows * self.row_bytes

    @property
    def num_copies(self) -> Any:
        """Copies of the window."""
        return self.num_rows * (self.row_elements // self.vector)

    def copy(
        self, source: Buffer, address: Expr, tile: tuple[Expr, Expr, Expr], thread: Expr, num_threads: int
    ) -> None:
        """Start the copies, with zeros outside of the image.

        `tile` is the output plane, counted over all images, and the first output row and column of the tile.
        """
        w, (output_plane, row, column), half = self.w, tile, allocate("gathered", 1, "uint32")
        (num_planes, num_rows, width), output_planes = w.input_size, w.output_size[0]
        row_elements, rows_per_plane = width * w.C, int(self.rows_per_plane)
        vectors_per_row = int(self.row_elements // self.vector)
        with items_loop(int(self.num_copies), thread, num_threads) as item:
            window_row, vector = item // vectors_per_row, item % vectors_per_row
            tap, plane_row = 0, window_row
            if w.kernel[0] > 1:
                tap, plane_row = window_row // rows_per_plane, window_row % rows_per_plane
            z = output_plane % output_planes * w.stride[0] - w.pad_low[0] + tap * w.dilation[0]
            y = row * w.stride[1] - w.pad_low[1] + plane_row
            element = column * (w.stride[2] * w.C) - (w.pad_low[2] * w.C + self.lead) + vector * self.vector
            is_inside = logical_and(z >= 0, z < num_planes, y >= 0, y < num_rows, element >= 0, element < row_elements)
            index = ((output_plane // output_planes * num_planes + z) * num_rows + y) * row_elements + element
            destination = address + to_uint32(window_row * int(self.row_bytes))
            destination = destination + to_uint32(vector * (self.vector * self.itemsize))
            nbytes = self.vector * self.itemsize
            copy_elements(destination, source, index, nbytes, is_inside, half)

    def tap_offset(self, column: Expr) -> Expr:
        """Return the offset in bytes of (tap, channel), the index of which in memory order is `column`."""
        w = self.w
        tap, channel = column // w.C, column % w.C
        filter_row, pixel = tap // w.kernel[2], tap % w.kernel[2] * w.dilation[2]
        plane, row = filter_row // w.kernel[1], filter_row % w.kernel[1] * w.dilation[1]
        row = plane * int(self.rows_per_plane) + row
        return row * int(self.row_bytes) + (pixel * w.C + channel) * self.itemsize

    def pixel_offset(self, row: Expr, column: Expr) -> Expr:
        """Return the offset in bytes of the pixel under the first tap of an output pixel of the tile."""
        element = column * (self.w.stride[2] * self.w.C) + self.lead
        return row * (self.w.stride[1] * int(self.row_bytes)) + element * self.itemsize
