"""Windows of pixels in shared memory that all taps of a filter read, for channels-last arrays.

A work tile is a rectangle of output pixels, and its *window* has all pixels of X that they read. TMA copies each window
once, with zeros outside of the image. In a volume, a tile is a rectangle of one slice, and has a window for each tap
along the depth, which are loaded and multiplied one after another. The rows of a wgmma are the 8 × 8 pixels of a
*patch*: eight neighbouring pixels are neighbouring rows in shared memory, and the lines of the window are at the stride
of the matrix descriptor. A tap is an offset of its address.

With a stride, a window has a plane for each remainder of the coordinates by the stride, as in `halo_image`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from tvmconv import tensor_map as maps
from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Buffer, Expr, Register, to_uint32
from .accumulators import Accumulators
from .atoms import ThreadPosition, WgmmaAtom, wgmma_commit_group, wgmma_fence, wgmma_wait_group
from .epilogue_tile import EpilogueTile
from .pipelines import PipelineState, TmaPipeline
from .smem_layout import MatrixDescriptor, SmemLayout
from .tile_scheduler import WorkTile
from .tma import TmaCopy
from .wgmma_mainloop import OperandTile

PATCH = 8  # lines, and columns, of output pixels whose products a wgmma computes


@dataclass(frozen=True)
class TapOffset:
    """Where a tap reads a window, for the first output pixel of a tile."""

    plane: int  # index among the planes of the window
    line: int
    column: int


@dataclass(frozen=True)
class PatchTiles:
    """Division of the outputs of a convolution of images or volumes among work tiles, and their windows.

    Axes are the last two ones: lines and columns. Volumes have strides of 1 along them.
    """

    w: Conv  # the convolution, channels last
    lines: int  # output lines per tile
    columns: int  # output columns per tile

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    def _tap_positions(self, axis: int) -> list[tuple[int, int]]:
        """Return the quotient and the remainder by the stride of the coordinate that each tap of an axis reads."""
        w, axis = self.w, self.w.spatial_ndim - 2 + axis
        return [divmod(tap * w.dilation[axis] - w.pad_low[axis], w.stride[axis]) for tap in range(w.kernel[axis])]

    @property
    def depth_taps(self) -> tuple[int, ...]:
        """First slice of a volume that each tap along the depth reads, one window each; (0,) for images."""
        w = self.w
        if w.spatial_ndim == 2:
            return (0,)
        return tuple(tap * w.dilation[0] - w.pad_low[0] for tap in range(w.kernel[0]))

    @functools.cached_property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """Remainders by the strides along both axes of each plane that a tap reads."""
        remainders = ([rest for _, rest in self._tap_positions(axis)] for axis in range(2))
        return tuple(sorted({(row, column) for row, column in itertools.product(*remainders)}))

    @functools.cached_property
    def taps(self) -> tuple[TapOffset, ...]:
        """Where each tap along lines and columns reads a window, in the order of the filter."""
        rows, columns = self._tap_positions(0), self._tap_positions(1)
        first = self.first_tap
        return tuple(
            TapOffset(self.planes.index((row_rest, column_rest)), row - first[0], column - first[1])
            for (row, row_rest), (column, column_rest) in itertools.product(rows, columns)
        )

    @property
    def first_tap(self) -> tuple[int, int]:
        """First line and column of the window of the output in the corner of the image, in steps of the stride."""
        row, column = (min(position for position, _ in self._tap_positions(axis)) for axis in range(2))
        return row, column

    @property
    def window_lines(self) -> int:
        """Lines of a plane of a window."""
        return self.lines + max(tap.line for tap in self.taps)

    @property
    def pitch(self) -> int:
        """Columns of a plane of a window, whole atoms of the swizzle, so that all lines have the same alignment."""
        return round_up(self.columns + max(tap.column for tap in self.taps), PATCH)

    @property
    def plane_rows(self) -> int:
        """Pixels of a plane of a window, its rows in shared memory."""
        return self.window_lines * self.pitch

    @property
    def per_image(self) -> tuple[int, int]:
        """Tiles along the height and the width of an image."""
        height, width = self.w.output_size[-2:]
        return ceil_div(height, self.lines), ceil_div(width, self.columns)

    @property
    def count(self) -> int:
        """Number of tiles."""
        return self.w.N * math.prod(self.w.output_size[:-2]) * math.prod(self.per_image)

    @property
    def patches(self) -> int:
        """Patches per tile."""
        return self.lines * self.columns // PATCH**2

    def locate(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the image, or the slice of all volumes, and the first output line and column of a tile."""
        along_height, along_width = self.per_image
        line = tile // along_width % along_height * self.lines
        return tile // (along_height * along_width), line, tile % along_width * self.columns

    def locate_outer(self, image: Expr, step: int = 1, offset: int = 0) -> tuple[Expr, ...]:
        """Return the image; of a slice of volumes its depth, times a step and with an offset, and the volume."""
        if self.w.spatial_ndim == 2:
            return (image,)
        depth = self.w.output_size[0]
        return image % depth * step + offset, image // depth

    def input_map(self, box_channels: int) -> maps.TensorMap:
        """Return the tensor map of a plane of X: channels of neighbouring columns, columns, lines, images.

        That of volumes has channels, columns, lines, slices, volumes.
        """
        w, (height, width), (step_y, step_x) = self.w, self.w.input_size[-2:], self.w.stride[-2:]
        line = width * w.C
        if w.spatial_ndim > 2:
            extents = (w.C, width, height, w.input_size[0], w.N)
            strides = (w.C, line, height * line, w.input_size[0] * height * line)
            box = (box_channels, self.pitch, self.window_lines, 1, 1)
            return maps.make_tiled_map(w.storage, self.itemsize, extents, strides, box, box_channels * self.itemsize)
        extents = (step_x * w.C, width // step_x, step_y, height // step_y, w.N)
        strides = (step_x * w.C, line, step_y * line, height * line)
        box = (box_channels, self.pitch, 1, self.window_lines, 1)
        return maps.make_tiled_map(w.storage, self.itemsize, extents, strides, box, box_channels * self.itemsize)

    def load(
        self, destination: Expr, copy: TmaCopy, tile: Expr, box_channels: int, box_bytes: int, depth_tap: int
    ) -> None:
        """Copy a window of a tile, one box for each plane and each block of channels; run by one thread."""
        image, line, column = self.locate(tile)
        first_line, first_column = self.first_tap
        blocks = range(self.w.C // box_channels)
        if self.w.spatial_ndim > 2:
            outer = self.locate_outer(image, self.w.stride[0], depth_tap)
            for block in blocks:
                coordinates = (block * box_channels, column + first_column, line + first_line, *outer)
                copy.issue(destination + to_uint32(block * box_bytes), coordinates)
            return
        for box, ((rest_y, rest_x), block) in enumerate(itertools.product(self.planes, blocks)):
            channel = rest_x * self.w.C + block * box_channels
            coordinates = (channel, column + first_column, rest_y, line + first_line, image)
            copy.issue(destination + to_uint32(box * box_bytes), coordinates)


@dataclass(frozen=True)
class PatchEpilogueTile(EpilogueTile):
    """Division of a warpgroup's accumulators into subtiles that are patches of the output."""

    tiles: PatchTiles | None = None  # the work tiles

    def coordinates(self, tile: WorkTile, column: Expr, row: Expr) -> tuple[Expr, ...]:
        """Return the coordinates of a patch: channel, column, line, image; or slice and volume."""
        assert self.tiles
        image, line, first_column = self.tiles.locate(tile.m // (self.tiles.patches * self.atom.m))
        outer = self.tiles.locate_outer(image)
        patch, per_line = row // self.atom.m % self.tiles.patches, self.tiles.columns // PATCH
        return column, first_column + patch % per_line * PATCH, line + patch // per_line * PATCH, *outer

    def output_map(self) -> maps.TensorMap:
        """Return the tensor map of the output."""
        assert self.tiles
        w = self.tiles.w
        extents = (w.O, *reversed(w.output_size), w.N)
        strides = tuple(itertools.accumulate(extents[:-1], operator.mul))
        box = (self.n, PATCH, PATCH, *(1,) * (len(extents) - 3))
        return maps.make_tiled_map(self.dtype, get_itemsize(self.dtype), extents, strides, box, self.row_bytes)


@dataclass(frozen=True)
class WindowMainloop:
    """Multiplies windows by filters that stay in shared memory."""

    tiles: PatchTiles
    atom: WgmmaAtom  # the wgmma instruction
    m_atoms: int  # patches of a warpgroup
    window: SmemLayout  # a plane of a window with a block of channels, in one box
    filters: OperandTile  # the filters of a tap with a block of channels, in one box
    promoted_taps: int = 0  # blocks of channels of a tap after which sums are promoted; 0: never

    @property
    def block_k(self) -> int:
        """Channels per block."""
        return self.window.row_bytes // self.atom.itemsize

    @property
    def num_blocks(self) -> int:
        """Blocks of channels."""
        return self.tiles.w.C // self.block_k

    @property
    def num_accumulators(self) -> int:
        """Accumulator registers per thread."""
        return self.m_atoms * self.atom.num_accumulators

    @property
    def window_bytes(self) -> int:
        """Bytes of a window of a tile."""
        return len(self.tiles.planes) * self.num_blocks * self.window.nbytes

    @property
    def filter_bytes(self) -> int:
        """Bytes of all filters."""
        return self.num_taps * self.num_blocks * self.filters.layout.nbytes

    @property
    def num_taps(self) -> int:
        """Taps of a filter."""
        return len(self.tiles.depth_taps) * len(self.tiles.taps)

    def load_filters(self, tensor_map: Expr, pipeline: TmaPipeline) -> None:
        """Load all filters; run by one thread."""
        pipeline.producer_acquire(0, 0)
        copy, (position,) = TmaCopy(tensor_map, pipeline.full_barrier(0)), self.filters.locate(0, 0, 0)
        kernel = self.tiles.w.kernel
        boxes = itertools.product(range(self.num_blocks), *map(range, kernel))
        for box, (block, *taps) in enumerate(boxes):
            destination = pipeline.stage_address(0) + to_uint32(box * self.filters.layout.nbytes)
            self.filters.operand.loader.load(destination, copy, position, (block * self.block_k, *taps))

    def load_window(self, tile: WorkTile, tensor_map: Expr, pipeline: TmaPipeline, state: PipelineState) -> None:
        """Load the windows of a work tile; run by one thread."""
        index = tile.m // (self.tiles.patches * self.atom.m)
        for depth_tap in self.tiles.depth_taps:
            pipeline.producer_acquire(state.index, state.phase)
            copy, address = TmaCopy(tensor_map, pipeline.full_barrier(state.index)), pipeline.stage_address(state.index)
            self.tiles.load(address, copy, index, self.block_k, self.window.nbytes, depth_tap)
            state.advance()

    def consume(
        self,
        accumulators: Accumulators,
        filters: Expr,
        pipeline: TmaPipeline,
        state: PipelineState,
        thread: ThreadPosition,
    ) -> None:
        """Multiply the windows of a work tile; run by all threads of a warpgroup.

        Args:
            accumulators: Sums of this thread.
            filters: Shared-memory address of the filters.
            pipeline: Stages of windows.
            state: Stage that is read next.
            thread: Position of this thread.
        """
        line_bytes = self.tiles.pitch * self.window.row_bytes
        descriptors = MatrixDescriptor("a", self.window, line_bytes), MatrixDescriptor("b", self.filters.layout)
        descriptors[1].set_address(filters)
        row = self._first_row(thread.warpgroup)
        if accumulators.promoted is not None:
            accumulators.clear_promoted()
        boxes = [*itertools.product(range(self.num_blocks), range(len(self.tiles.taps)))]
        count = self.promoted_taps or len(boxes)
        for depth_index in range(len(self.tiles.depth_taps)):
            pipeline.consumer_wait(state.index, state.phase)
            name = f"window{depth_index}" if depth_index else "window"
            first_pixel = Register(name, "uint32", pipeline.stage_address(state.index) + to_uint32(row))
            descriptors[0].set_address(first_pixel.value)
            for first in range(0, len(boxes), count):
                overwrites = accumulators.promoted is not None or depth_index == 0
                some_boxes = boxes[first : first + count]
                self._multiply(accumulators.registers, descriptors, depth_index, some_boxes, overwrites=overwrites)
                wgmma_wait_group(0)
                if first + count >= len(boxes):
                    pipeline.consumer_release(state.index, thread)
                if accumulators.promoted is not None:
                    accumulators.promote()
            state.advance()

    def _multiply(
        self,
        registers: Buffer,
        descriptors: tuple[MatrixDescriptor, MatrixDescriptor],
        depth_index: int,
        boxes: Sequence[tuple[int, int]],
        *,
        overwrites: bool,
    ) -> None:
        """Issue the wgmmas of some blocks of channels of a window's taps as one group.

        Args:
            registers: Sums of this thread.
            descriptors: Descriptors of the window and of the filters.
            depth_index: Index of the tap along the depth.
            boxes: Blocks of channels, and indices of the taps along lines and columns.
            overwrites: Whether the first products overwrite the sums.
        """
        taps, num_sums = self.tiles.taps, self.atom.num_accumulators
        wgmma_fence()
        for number, (block, tap_idx) in enumerate(boxes):
            tap = taps[tap_idx]
            box = (tap.plane * self.num_blocks + block) * self.window.nbytes
            a_offset = box + (tap.line * self.tiles.pitch + tap.column) * self.window.row_bytes
            filter_box = block * self.num_taps + depth_index * len(taps) + tap_idx
            b_offset = filter_box * self.filters.layout.nbytes
            for k, m_atom in itertools.product(range(0, self.block_k, self.atom.k), range(self.m_atoms)):
                k_bytes = k * self.atom.itemsize
                self.atom.emit(
                    [registers[m_atom * num_sums + e] for e in range(num_sums)],
                    descriptors[0].encode_operand(a_offset + self._patch_offset(m_atom) + k_bytes),
                    descriptors[1].encode_operand(b_offset + k_bytes),
                    not overwrites or number + k > 0,
                )
        wgmma_commit_group()

    def _first_row(self, warpgroup: Expr) -> Expr:
        """Return the offset of a warpgroup's first patch in the window."""
        per_line, line = self.tiles.columns // PATCH, PATCH * self.tiles.pitch
        first = warpgroup * self.m_atoms
        if self.m_atoms % per_line == 0:
            return first // per_line * (line * self.window.row_bytes)
        return (first // per_line * line + first % per_line * PATCH) * self.window.row_bytes

    def _patch_offset(self, m_atom: int) -> int:
        """Return the offset of a patch from the first one of the warpgroup."""
        line, column = divmod(m_atom, self.tiles.columns // PATCH)
        return (line * PATCH * self.tiles.pitch + column * PATCH) * self.window.row_bytes
