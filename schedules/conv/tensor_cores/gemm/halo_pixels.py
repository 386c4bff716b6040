"""Halo rows of channels-last pixels, which TMA copies as runs in im2col mode.

The halo rows of an image (`halo_image`) are its pixels line by line, with zeros between lines and images. In im2col
mode TMA counts the pixels of a bounding box in the same way: after the end of a line it continues in the next one, and
after the last line in the next image. If the box is wider and higher than the image by the padding, one copy has the
rows of a tile and its halo, zeros included. All taps of a filter read them, as offsets of wgmma's matrix descriptor.

With strides there is a copy for each plane of halo rows. Their pixels are apart by the stride, and the offset of the
copy is the remainder of their coordinates.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.arithmetic import round_up

from ....tir_builder import Expr, Register, logical_and, serial_loop, to_uint32
from .halo_image import SWIZZLE_ROWS, HaloImage
from .halo_mainloop import HaloMainloop, Operands
from .pipelines import PipelineState, TmaPipeline
from .tile_scheduler import Cluster, KRange, WorkTile
from .tma import TmaCopy


@dataclass(frozen=True)
class HaloPixels(HaloImage):
    """The halo rows of a channels-last X, and the pixels of Y that they belong to."""

    @property
    def output_vector(self) -> int:
        """Pixels of Y in a vector, which are not contiguous."""
        return 1

    def rows_per_plane(self, block_m: Any) -> Any:
        """Return the halo rows of a tile in a plane: those of the tile and its halo, in whole swizzle atoms."""
        return round_up(block_m + self.halo_rows, SWIZZLE_ROWS)

    def tensor_map(self, rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of halo rows × channels."""
        w = self.w
        extents, box = (w.C, *reversed(w.input_size), w.N), (box_channels, rows)
        corner, positions = tuple(-pad for pad in reversed(w.pad_low)), tuple(reversed(self.extents))
        strides = tuple(reversed(w.stride))
        return maps.make_im2col_map(w.storage, self.itemsize, extents, box, strides, corner, positions, swizzle_bytes)

    @property
    def has_bounding_box(self) -> bool:
        """Whether the bounding box, which has the zeros behind lines and images, is in TMA's range."""
        upper_corner = self.tensor_map(SWIZZLE_ROWS, box_channels=1, swizzle_bytes=0).upper_corner
        return max(upper_corner) < maps.CORNER_LIMITS[self.w.spatial_ndim + 2]

    def locate_first_pixel(self, row: Expr) -> list[Expr]:
        """Return the coordinates of a halo row in the first plane, the innermost axis first, and its image."""
        w, coordinates = self.w, []
        for axis in range(w.spatial_ndim):
            position = row // self.row_steps[axis] % self.extents[axis] * w.stride[axis] - w.pad_low[axis]
            coordinates.append(Register(f"pixel_{axis}", value=position).value)
        return [*reversed(coordinates), Register("pixel_image", value=row // math.prod(self.extents)).value]

    def load(self, destination: Expr, copy: TmaCopy, pixel: list[Expr], channel: Expr, plane_bytes: int) -> None:
        """Copy the halo rows of a tile with a block of channels, one box for each plane; run by one thread."""
        for index, plane in enumerate(itertools.product(*map(range, self.planes))):
            offsets = [T.uint16(remainder) for remainder in reversed(plane)]
            copy.issue(destination + to_uint32(index * plane_bytes), (channel, *pixel), offsets)

    @property
    def rows(self) -> int:
        """Rows of the product, with those of no pixel."""
        return self.num_rows

    count, have_taps = 1, True  # one class of pixels, all of which have products

    def locate_pixel(self, residue: Expr, row: Expr) -> tuple[Expr, Expr]:
        """Return the pixel of Y of a halo row, counted over all images, and whether there is one."""
        pixel, conditions = row // math.prod(self.extents), [row < self.num_rows]
        for axis, (size, extent) in enumerate(zip(self.w.output_size, self.extents, strict=True)):
            position = row // self.row_steps[axis] % extent
            conditions.append(True if size == extent else position < size)
            pixel = pixel * size + position
        return pixel, logical_and(*conditions)


@dataclass(frozen=True)
class HaloPixelsMainloop(HaloMainloop):
    """Multiplies halo rows that TMA copies.

    Either halo rows are the rows of the product and filters its columns, or the other way round.
    """

    has_filter_rows: bool = False  # whether filters are the rows of the product

    def order_operands(self, halo: Operands, filters: Operands) -> tuple[Operands, Operands]:
        """Return what belongs to the operands A and B of the product."""
        return (filters, halo) if self.has_filter_rows else (halo, filters)

    def locate_filters(self, tile: WorkTile, cluster: Cluster) -> tuple[Expr, Expr, Expr]:
        """Return the first filter of a work tile, the part that a CTA loads, and the multicast mask."""
        if self.has_filter_rows:
            return tile.m, cluster.rank_n, cluster.a_multicast_mask()
        return super().locate_filters(tile, cluster)

    @property
    def pixels(self) -> HaloPixels:
        """The halo rows."""
        assert isinstance(self.image, HaloPixels)
        return self.image

    def input_map(self) -> maps.TensorMap:
        """Return the tensor map of X."""
        return self.pixels.tensor_map(self.plane_rows, self.block_k, self.halo_layout.row_bytes)

    def produce_pixels(
        self, tile: WorkTile, k_range: KRange, tensor_map: Expr, pipeline: TmaPipeline, state: PipelineState
    ) -> None:
        """Load the halo rows of the channel blocks of a work tile; run by one thread."""
        pixel = self.pixels.locate_first_pixel(tile.n if self.has_filter_rows else tile.m)
        plane_bytes = self.plane_rows * self.halo_layout.row_bytes
        with serial_loop(k_range.count, "k_block") as k_block:
            pipeline.producer_acquire(state.index, state.phase)
            copy = TmaCopy(tensor_map, pipeline.full_barrier(state.index))
            channel = (k_range.first + k_block) * self.block_k
            self.pixels.load(pipeline.stage_address(state.index), copy, pixel, channel, plane_bytes)
            state.advance()
