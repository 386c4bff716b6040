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
from .tile_scheduler import WorkTile
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
    """Multiplies halo rows that TMA copies; the CTAs of a cluster load a part of the filters each.

    Either halo rows are the rows of the product and filters its columns, or the other way round.
    """

    has_filter_rows: bool = False  # whether filters are the rows of the product

    def order_operands(self, halo: Operands, filters: Operands) -> tuple[Operands, Operands]:
        """Return what belongs to the operands A and B of the product."""
        return (filters, halo) if self.has_filter_rows else (halo, filters)

    def locate_operands(self, tile: WorkTile) -> tuple[Expr, Expr]:
        """Return the first halo row and the first filter of a work tile."""
        return (tile.n, tile.m) if self.has_filter_rows else (tile.m, tile.n)

    @property
    def pixels(self) -> HaloPixels:
        """The halo rows."""
        assert isinstance(self.image, HaloPixels)
        return self.image

    @property
    def plane_bytes(self) -> int:
        """Bytes of a plane of halo rows in shared memory."""
        return self.a_layout.nbytes // self.image.num_planes

    def input_map(self) -> maps.TensorMap:
        """Return the tensor map of X."""
        rows = self.a_layout.rows // self.image.num_planes
        return self.pixels.tensor_map(rows, self.block_k, self.a_layout.row_bytes)

    def load_pixels(
        self, tile: WorkTile, num_blocks: int, tensor_map: Expr, pipeline: TmaPipeline, state: PipelineState
    ) -> None:
        """Load the halo rows of all blocks of channels of a work tile; run by one thread."""
        first_row, _ = self.locate_operands(tile)
        pixel = self.pixels.locate_first_pixel(first_row)
        with serial_loop(num_blocks, "k_block") as k_block:
            pipeline.producer_acquire(state.index, state.phase)
            copy = TmaCopy(tensor_map, pipeline.full_barrier(state.index))
            address = pipeline.stage_address(state.index)
            self.pixels.load(address, copy, pixel, k_block * self.block_k, self.plane_bytes)
            state.advance()

    def load_filters(
        self, tile: WorkTile, num_blocks: int, tensor_map: Expr, pipeline: TmaPipeline, state: PipelineState
    ) -> None:
        """Load the filters of all taps of each block of channels of a work tile; run by one thread."""
        cluster, b, (_, first_filter) = pipeline.cluster, self.b, self.locate_operands(tile)
        rank = cluster.rank_n if self.has_filter_rows else cluster.rank_m
        mask = cluster.a_multicast_mask() if self.has_filter_rows else cluster.b_multicast_mask()
        (position,) = b.locate(first_filter, tile.group, rank)
        offset = to_uint32(rank * (b.copy_rows * b.layout.row_bytes)) if cluster.size > 1 else T.uint32(0)
        with serial_loop(num_blocks, "k_block") as k_block, serial_loop(self.num_taps, "tap") as tap:
            pipeline.producer_acquire(state.index, state.phase)
            copy = TmaCopy(tensor_map, pipeline.full_barrier(state.index), mask)
            destination, k = (
                pipeline.stage_address(state.index) + offset,
                (k_block * self.block_k, *self.split_tap(tap)),
            )
            b.operand.loader.load(destination, copy, position, k)
            state.advance()
