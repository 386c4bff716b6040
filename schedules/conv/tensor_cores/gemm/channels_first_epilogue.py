"""Epilogue of a Hopper kernel whose output is channels first: subtiles are transposed in shared memory.

The accumulators of a thread belong to neighbouring channels of a pixel, while neighbouring pixels of a channel are
contiguous in the output. `stmatrix` transposes the 8 × 8 matrices of a subtile on the way to shared memory, where a row
has 64 pixels of one channel. The threads of a warpgroup then store vectors of pixels: of 16 bytes if the number of
pixels of an image permits, and else of the largest size that does not cross an image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads import Conv
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
    store_global,
    store_shared,
    to_uint32,
)
from .atoms import ThreadPosition, ldmatrix_x4, named_barrier_sync, stmatrix_x4
from .channel_arguments import ChannelArguments
from .epilogue_ops import EpilogueOps, apply_to_columns
from .epilogue_tile import EpilogueTile
from .pipelines import PipelineState, TmaPipeline
from .smem_layout import CHUNK_BYTES, SmemLayout
from .tile_scheduler import WorkTile


@dataclass(frozen=True)
class ChannelsFirstOutput:
    """An output (images, groups × channels, pixels), and residuals of the same shape."""

    pixels: int  # pixels of an image
    channels: int  # channels of a group
    groups: int  # number of groups
    images: int  # number of images
    itemsize: int  # bytes per element
    # Rows of the product per image, as many as pixels by default. Further rows behind the pixels are not stored.
    rows_per_image: int = 0

    @classmethod
    def from_workload(cls, w: Conv, rows_per_image: int = 0) -> ChannelsFirstOutput:
        """Return the output of a convolution."""
        sizes = math.prod(w.output_size), w.O // w.groups, w.groups, w.N
        return cls(*sizes, get_itemsize(w.storage), rows_per_image)

    @property
    def has_further_rows(self) -> bool:
        """Whether the product has rows that are no pixels."""
        return self.rows_per_image > self.pixels

    @property
    def vector(self) -> int:
        """Pixels of the widest vector that does not cross an image."""
        return math.gcd(self.pixels, CHUNK_BYTES // self.itemsize)

    def locate(self, row: Expr) -> tuple[Expr, Expr]:
        """Return the image and the pixel of a row; the image is one beyond the last if there is no pixel."""
        if not self.has_further_rows:
            return row // self.pixels, row % self.pixels
        pixel = row % self.rows_per_image
        return T.Select(pixel < self.pixels, row // self.rows_per_image, self.images), pixel

    def index(self, image: Expr, channel: Expr, pixel: Expr) -> Expr:
        """Return the index of an element; channels are counted over all groups."""
        return (image * (self.groups * self.channels) + channel) * self.pixels + pixel


class ChannelsFirstEpilogue:
    """Applies the epilogue to a warpgroup's accumulators and stores them in vectors of pixels.

    Args:
        tile: Division into subtiles, of which one at a time is in shared memory.
        ops: The epilogue.
        channels: Per-channel arguments.
        pipeline: Stages of which each warpgroup uses one, without the barriers.
        arguments: Argument buffers by name.
        output: The output.
        is_exact: Whether work tiles have no rows beyond the output, and no columns beyond the channels of a group.
    """

    def __init__(
        self,
        tile: EpilogueTile,
        ops: EpilogueOps,
        channels: ChannelArguments,
        pipeline: TmaPipeline,
        arguments: dict[str, Buffer],
        output: ChannelsFirstOutput,
        is_exact: tuple[bool, bool],
    ) -> None:
        self._tile, self._output, self._ops, self.channels = tile, output, ops, channels
        self._arguments, self._pipeline = arguments, pipeline
        self._has_exact_rows, self._has_exact_columns = is_exact
        self._layout = SmemLayout(tile.n, tile.atom.m * output.itemsize)  # a row has the pixels of a channel
        self._packed, self._pair = allocate("packed", 4, "uint32"), allocate("output_pair", 2, "float32")
        self._residuals = {name: allocate(name, tile.n * output.itemsize // 4, "uint32") for name in ops.residuals}
        self._vector = allocate("pixels", 4, "uint32")

    def store(
        self,
        accumulators: Sequence[Expr],
        tile: WorkTile,
        state: PipelineState,
        thread: ThreadPosition,
        warpgroup: Expr,
    ) -> None:
        """Store a warpgroup's part of a work tile; `warpgroup` is its index among those that share the tile."""
        epilogue_tile, output = self._tile, self._output
        self.channels.wait(thread)
        buffer = self._pipeline.stage_address(thread.warpgroup)
        image, pixel = Register("image"), Register("pixel")
        for m_atom in range(epilogue_tile.m_atoms):
            first_pixel = thread.warpgroup_thread % (epilogue_tile.atom.m // output.vector) * output.vector
            row = epilogue_tile.row(tile, warpgroup, m_atom) + first_pixel
            row_image, row_pixel = output.locate(row)
            image.set(row_image)
            pixel.set(row_pixel)
            for n_idx in range(epilogue_tile.subtiles_n):
                first_channel = tile.n + n_idx * epilogue_tile.n
                position = (image.value, tile.group * output.channels, first_channel, pixel.value)
                named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
                for name in self._residuals:
                    self._load_residual(name, position, buffer, thread)
                self._copy_to_smem(accumulators, m_atom, n_idx, buffer, thread)
                named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
                for address, index, is_inside in self._vectors(position, buffer, thread):
                    with if_(is_inside):
                        load_shared(self._vector, address, output.vector * output.itemsize)
                        store_global(self._arguments["Y"], index, self._vector, output.vector)

    def finish(self, thread: ThreadPosition) -> None:
        """Do nothing, as TMA reads no shared memory."""

    def _vectors(
        self, position: tuple[Expr, Expr, Expr, Expr], buffer: Expr, thread: ThreadPosition
    ) -> list[tuple[Expr, Expr, Expr]]:
        """Return the vectors of a thread: address in shared memory, index of the output, and whether they are in it."""
        output, (image, group_channel, first_channel, pixel) = self._output, position
        vectors_per_row = self._tile.atom.m // output.vector
        channels_per_pass = WARPGROUP_SIZE // vectors_per_row
        row_bytes = thread.warpgroup_thread % vectors_per_row * (output.vector * output.itemsize)
        is_image = True if self._has_exact_rows else image < output.images
        vectors = []
        for first in range(0, self._tile.n, channels_per_pass):
            channel = first + thread.warpgroup_thread // vectors_per_row
            offset = self._layout.swizzled_offset(channel, row_bytes // CHUNK_BYTES) + to_uint32(
                row_bytes % CHUNK_BYTES
            )
            is_inside = logical_and(
                is_image,
                True if self._tile.n % channels_per_pass == 0 else channel < self._tile.n,
                True if self._has_exact_columns else first_channel + channel < output.channels,
            )
            index = output.index(image, group_channel + first_channel + channel, pixel)
            vectors.append((buffer + offset, index, is_inside))
        return vectors

    def _load_residual(
        self, name: str, position: tuple[Expr, Expr, Expr, Expr], buffer: Expr, thread: ThreadPosition
    ) -> None:
        """Load a residual's subtile to registers, through shared memory, which transposes it."""
        output = self._output
        for address, index, is_inside in self._vectors(position, buffer, thread):
            with if_(is_inside):
                load_global(self._vector, self._arguments[name], index, output.vector)
                store_shared(address, self._vector, output.vector * output.itemsize)
        named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
        if output.itemsize == 2:
            for columns in range(self._tile.n // 16):
                registers = [self._residuals[name][columns * 4 + e] for e in range(4)]
                ldmatrix_x4(registers, self._matrix_address(columns, buffer, thread), transposed=True)
        else:
            for register, address in enumerate(self._word_addresses(buffer, thread)):
                emit_ptx("ld.shared.b32", self._residuals[name][register], address)
        named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)

    def _matrix_address(self, columns: int, buffer: Expr, thread: ThreadPosition) -> Expr:
        """Return the address that a lane passes for 16 rows × 16 columns of its warp, in four 8 × 8 matrices.

        In the order of the accumulators, the matrices of a pair have the same columns, and the second one the rows
        below.
        """
        channel = columns * 16 + thread.lane // 16 * 8 + thread.lane % 8
        chunk = thread.warpgroup_thread // WARP_SIZE * 2 + thread.lane // 8 % 2
        return buffer + self._layout.swizzled_offset(channel, chunk)

    def _word_addresses(self, buffer: Expr, thread: ThreadPosition) -> list[Expr]:
        """Return the addresses of a thread's 32-bit elements, in the order of its accumulators."""
        addresses = []
        for columns in range(self._tile.n // 8):
            for half in range(2):
                pixel = thread.warpgroup_thread // WARP_SIZE * 16 + half * 8 + thread.lane // 4
                for e in range(2):
                    channel = columns * 8 + thread.lane % 4 * 2 + e
                    offset = self._layout.swizzled_offset(channel, pixel // 4) + to_uint32(pixel % 4 * 4)
                    addresses.append(buffer + offset)
        return addresses

    def _copy_to_smem(
        self, accumulators: Sequence[Expr], m_atom: int, n_idx: int, buffer: Expr, thread: ThreadPosition
    ) -> None:
        """Apply the epilogue to a subtile and copy the results to shared memory, transposed."""
        values, channel = self._tile.select_fragment(accumulators, m_atom, n_idx, thread)
        if self._output.itemsize == 4:
            addresses = self._word_addresses(buffer, thread)
            for pair in range(len(values) // 2):
                if pair % 2 == 0:
                    channel_values = self.channels.load(channel + pair // 2 * 8)
                self._finish_pair(values, pair, channel_values, 0)
                for e in range(2):
                    emit_ptx("st.shared.b32", addresses[pair * 2 + e], self._packed[e])
            return
        for columns in range(self._tile.n // 16):
            for pair in range(4):
                if pair % 2 == 0:
                    channel_values = self.channels.load(channel + (columns * 16 + pair * 4))
                self._finish_pair(values, columns * 4 + pair, channel_values, pair)
            stmatrix_x4(
                self._matrix_address(columns, buffer, thread), [self._packed[e] for e in range(4)], transposed=True
            )

    def _finish_pair(
        self, values: Sequence[Expr], pair: int, channel_values: dict[str, list[Expr]], first_register: int
    ) -> None:
        """Apply the epilogue to two neighbouring columns and pack the rounded results."""
        words = self._output.itemsize // 2  # registers of a pair
        residuals = {
            name: [registers[pair * words + e] for e in range(words)] for name, registers in self._residuals.items()
        }
        sums = values[pair * 2 : pair * 2 + 2]
        apply_to_columns(self._ops, sums, channel_values, residuals, self._pair, self._packed, first_register)
