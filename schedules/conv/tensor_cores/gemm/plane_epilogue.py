"""Epilogue for small channels-first planes of an odd number of 16-bit pixels, which TMA stores as contiguous bytes.

No vector of such pixels is aligned, but the planes of eight channels are whole 16-byte chunks. Where the 64 rows of a
wgmma are one plane, with zeros between its lines or behind it, a warpgroup packs the pixels of a subtile's channels in
shared memory as they lie in the output, and TMA stores them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Buffer, Expr, Register, emit_ptx, if_, to_uint32
from .atoms import ThreadPosition, WgmmaAtom, named_barrier_sync
from .channels_first_epilogue import ChannelsFirstEpilogue
from .halo_image import HaloImage
from .pipelines import PipelineState
from .tile_scheduler import WorkTile
from .tma import tma_store, tma_store_fence, tma_store_wait

GROUP = 8  # channels whose planes are whole chunks of 16 bytes


def can_store_planes(image: HaloImage) -> bool:
    """Return whether the rows of an instruction are one plane of Y, of an odd number of 16-bit pixels."""
    w, pixels = image.w, math.prod(image.w.output_size)
    has_odd_planes = pixels % 2 == 1 and image.itemsize == 2
    return has_odd_planes and math.prod(image.extents) == WgmmaAtom.m and w.O % GROUP == 0 and w.groups == 1


def make_plane_map(w: Conv, channels: int) -> maps.TensorMap:
    """Return the tensor map of Y for boxes of the planes of some channels: chunks, rows of them, groups, images."""
    pixels = math.prod(w.output_size)
    divisor = max(d for d in range(1, maps.MAX_BOX_ELEMENTS // GROUP + 1) if pixels % d == 0)
    extents = GROUP * divisor, pixels // divisor, w.O // GROUP, w.N
    strides = GROUP * divisor, GROUP * pixels, w.O * pixels
    box = (*extents[:2], channels // GROUP, 1)
    return maps.make_tiled_map(w.storage, get_itemsize(w.storage), extents, strides, box, 0)


class PlaneEpilogue(ChannelsFirstEpilogue):
    """Applies the epilogue to a warpgroup's accumulators and stores planes by TMA.

    Args:
        image: Halo rows, which are those of the product.
        tensor_map: Tensor map of the output.
        arguments: The arguments of `ChannelsFirstEpilogue`.
    """

    def __init__(self, image: HaloImage, tensor_map: Expr, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._image, self._tensor_map = image, tensor_map

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
        buffer, pixel = self._pipeline.stage_address(thread.warpgroup), Register("residual_pixel")
        for m_atom in range(epilogue_tile.m_atoms):
            row = epilogue_tile.row(tile, warpgroup, m_atom)
            image = Register("image", value=row // epilogue_tile.atom.m).value
            row_image, row_pixel = output.locate(row + thread.warpgroup_thread % epilogue_tile.atom.m)
            pixel.set(row_pixel)
            for n_idx in range(epilogue_tile.subtiles_n):
                first_channel = tile.n + n_idx * epilogue_tile.n
                with if_(thread.is_warpgroup_leader):
                    tma_store_wait(0)
                named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
                for name in self._residuals:
                    self._load_residual(name, (row_image, 0, first_channel, pixel.value), buffer, thread)
                self._copy_to_smem(accumulators, m_atom, n_idx, buffer, thread)
                tma_store_fence()
                named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
                with if_(thread.is_warpgroup_leader):
                    tma_store(self._tensor_map, (0, 0, first_channel // GROUP, image), buffer)

    def finish(self, thread: ThreadPosition) -> None:
        """Wait until TMA has read all subtiles from shared memory."""
        with if_(thread.is_warpgroup_leader):
            tma_store_wait(0)

    def _copy_to_smem(
        self, accumulators: Sequence[Expr], m_atom: int, n_idx: int, buffer: Buffer, thread: ThreadPosition
    ) -> None:
        """Apply the epilogue to a subtile and copy the results to shared memory, each pixel on its own."""
        values, channel = self._tile.select_fragment(accumulators, m_atom, n_idx, thread)
        column, itemsize, output = thread.lane % 4 * 2, self._output.itemsize, self._output
        positions = []
        for half in range(2):
            image, pixel = output.locate(thread.warpgroup_thread // WARP_SIZE * 16 + half * 8 + thread.lane // 4)
            positions.append((Register("plane", value=image).value, Register("pixel", value=pixel).value))
        for columns in range(self._tile.n // 8):
            channel_values = self.channels.load(channel + columns * 8)
            for half, (image, pixel) in enumerate(positions):
                self._finish_pair(values, columns * 2 + half, channel_values, half)
                address = buffer + to_uint32(((columns * 8 + column) * output.pixels + pixel) * itemsize)
                with if_(image == 0):  # others are zeros between lines, or behind the plane
                    for e in range(2):
                        word = T.shift_right(self._packed[half], T.uint32(16 * e))
                        destination = address + to_uint32(e * output.pixels * itemsize)
                        emit_ptx("st.shared.b16", destination, T.Cast("uint16", word))
