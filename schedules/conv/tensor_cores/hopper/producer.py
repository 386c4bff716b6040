"""Producer of `hopper`: one thread issues the TMA copies of a stage as soon as the stage is empty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Expr, emit_call, emit_ptx, if_, serial_loop, store, to_uint32
from .base import HopperKernelBase
from .tma_requirements import WGMMA_M


class HopperProducer(HopperKernelBase):
    """The producer warp, which copies operands stage by stage."""

    def run_producer(self) -> None:
        """Copy the operands of a tile's k-tiles, each as soon as a stage is empty."""
        config = self.config
        self.init_pixel_coords()
        self.init_k_iterator()
        with serial_loop(self.num_own_k_tiles(), "step"):
            emit_call(T.cuda.mbarrier_wait(self.empty_barrier(self.mainloop_state[0]), self.mainloop_state[1] ^ 1))
            emit_ptx(
                "mbarrier.arrive.expect_tx.shared.b64",
                self.full_barrier(self.mainloop_state[0]),
                T.uint32(self.transaction_bytes),
            )
            self.load_input()
            self.load_weights()
            self.advance_k()
            self.advance_pipeline_state(self.mainloop_state, config.stages)

    def init_pixel_coords(self) -> None:
        """Compute the coordinates of the first pixel of each input copy that this CTA issues for a tile."""
        w = self.w
        for copy_idx in range(self.num_input_copies):
            pixel = self.tile_offset_m + self.cta_rank_n * self.multicast_slice_m + copy_idx * WGMMA_M
            for axis in range(w.spatial_ndim):
                output_coord = pixel // math.prod(w.output_size[axis + 1 :]) % w.output_size[axis]
                store(
                    self.pixel_coords,
                    copy_idx * (w.spatial_ndim + 1) + axis,
                    output_coord * w.stride[axis] - w.pad_low[axis],
                )
            store(
                self.pixel_coords, copy_idx * (w.spatial_ndim + 1) + w.spatial_ndim, pixel // math.prod(w.output_size)
            )

    def init_k_iterator(self) -> None:
        """Compute the tap and the channels of this CTA's first k-tile."""
        w, k_tile = self.w, self.split_k_idx * self.k_tiles_per_cta
        tap_idx = k_tile // self.k_tiles_per_tap
        for axis in range(w.spatial_ndim):
            store(
                self.tap_coords,
                axis,
                tap_idx // math.prod(self.k_tile_taps_shape[axis + 1 :]) % self.k_tile_taps_shape[axis],
            )
        store(self.channel_offset, 0, k_tile % self.k_tiles_per_tap * self.block_k)

    def advance_k(self) -> None:
        """Advance to the next channels, and after the last ones to the next tap."""
        store(self.channel_offset, 0, self.channel_offset[0] + self.block_k)
        if self.num_k_tile_taps == 1:
            return
        with if_(self.channel_offset[0] == self.k_tiles_per_tap * self.block_k):
            store(self.channel_offset, 0, 0)
            self.advance_tap(self.w.spatial_ndim - 1)

    def advance_tap(self, axis: int) -> None:
        """Advance to the next tap along an axis, with a carry to the axis before it."""
        store(self.tap_coords, axis, self.tap_coords[axis] + 1)
        if axis > 0:
            with if_(self.tap_coords[axis] == self.k_tile_taps_shape[axis]):
                store(self.tap_coords, axis, 0)
                self.advance_tap(axis - 1)

    def load_input(self) -> None:
        """Copy this CTA's slice of a k-tile's pixels to all CTAs that share it."""
        w, config = self.w, self.config
        full_barrier = self.full_barrier(self.mainloop_state[0])
        mask = self.multicast_mask([(True, rank_n) for rank_n in range(config.cluster_n)])
        if self.taps_share_copy:
            for copy_idx in range(self.num_input_copies):
                destination = self.stage_address() + to_uint32(copy_idx * self.input_copy_bytes)
                coords = [
                    self.pixel_coords[copy_idx * (w.spatial_ndim + 1) + axis]
                    for axis in (*reversed(range(w.spatial_ndim)), w.spatial_ndim)
                ]
                for axis in range(w.spatial_ndim - 1):
                    coords[w.spatial_ndim - 1 - axis] = (
                        coords[w.spatial_ndim - 1 - axis] + self.tap_coords[axis] * w.dilation[axis]
                    )
                channel = self.group_idx * self.gemm.channels_per_group + self.channel_offset[0]
                self.emit_tma_load(
                    w.spatial_ndim + 2, "", destination, self.input_map, (channel, *coords), full_barrier, (), mask
                )
            return
        for k_atom in range(self.num_k_atoms):
            slice_offset = self.cta_rank_n * (self.multicast_slice_m * self.swizzle_bytes) + k_atom * (
                self.block_m * self.swizzle_bytes
            )
            destination = self.stage_address() + to_uint32(slice_offset)
            channel = self.group_idx * self.gemm.channels_per_group + self.channel_offset[0] + k_atom * self.atom_k
            if self.is_pointwise:
                pixel = self.tile_offset_m + self.cta_rank_n * self.multicast_slice_m
                self.emit_tma_load(2, "", destination, self.input_map, (channel, pixel), full_barrier, (), mask)
                continue
            coords_of_image = [self.pixel_coords[axis] for axis in (*reversed(range(w.spatial_ndim)), w.spatial_ndim)]
            offsets = [
                T.Cast("uint16", self.tap_coords[axis] * w.dilation[axis]) for axis in reversed(range(w.spatial_ndim))
            ]
            self.emit_tma_load(
                w.spatial_ndim + 2,
                ".im2col",
                destination,
                self.input_map,
                (channel, *coords_of_image),
                full_barrier,
                offsets,
                mask,
            )

    def load_weights(self) -> None:
        """Copy this CTA's slice of a k-tile's weights to all CTAs that share it."""
        config, w = self.config, self.w
        full_barrier = self.full_barrier(self.mainloop_state[0])
        mask = self.multicast_mask([(rank_m, True) for rank_m in range(config.cluster_m)])
        first_tap: Expr = 0
        for axis in range(w.spatial_ndim):
            first_tap = first_tap * w.kernel[axis] + self.tap_coords[axis]
        channel_out = self.group_idx * self.gemm.n + self.tile_offset_n + self.cta_rank_m * self.multicast_slice_n
        for atom_idx in range(self.num_k_atoms * config.taps_per_copy):
            k_atom, tap_in_copy = atom_idx % self.num_k_atoms, atom_idx // self.num_k_atoms
            slice_offset = self.cta_rank_m * (self.multicast_slice_n * self.swizzle_bytes) + atom_idx * (
                config.block_n * self.swizzle_bytes
            )
            destination = self.stage_address() + to_uint32(self.input_bytes) + to_uint32(slice_offset)
            channel = self.channel_offset[0] + k_atom * self.atom_k
            self.emit_tma_load(
                3,
                "",
                destination,
                self.weight_map,
                (channel, first_tap + tap_in_copy, channel_out),
                full_barrier,
                (),
                mask,
            )

    def multicast_mask(self, ctas: Sequence[tuple[Any, Any]]) -> Expr:
        """Return the multicast mask of CTAs, each given by its two ranks; True stands for this CTA's own rank."""
        if len(ctas) == 1:
            return None
        mask: Expr = T.uint32(0)
        for rank_m, rank_n in ctas:
            mask = mask | T.shift_left(T.uint32(1), to_uint32(self.compute_cta_rank(rank_m, rank_n)))
        return T.Cast("uint16", mask)
