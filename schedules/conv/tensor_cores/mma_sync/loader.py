"""Loader of `mma_sync`: cp.async copies of im2col rows and weights to shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import Conv

from ....tir_builder import Expr, emit_ptx, guarded_loop, if_, load_global, logical_and, store, to_uint32, unrolled_loop
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from .base import MmaSyncKernelBase

CP_ASYNC_MNEMONIC = {
    16: "cp.async.cg.shared.global.L2::128B",
    8: "cp.async.ca.shared.global.L2::128B",
    4: "cp.async.ca.shared.global.L2::128B",
}


class MmaSyncLoader(MmaSyncKernelBase):
    """Asynchronous copies to shared memory: operands, some k-tiles ahead, and per-channel epilogue arguments."""

    def init_row_pointers(self, tile_idx: Expr) -> None:
        """Compute the offsets of the rows that this thread copies; rows past the end repeat the last row."""
        w, gemm = self.w, self.gemm
        offset_m, offset_n, tile_group = self.compute_tile_origin(tile_idx)
        strides = _compute_strides((w.N, *w.input_size, w.C))
        with unrolled_loop(ceil_div(self.config.block_m, self.rows_per_pass), "i") as i:
            pixel = T.min(offset_m + self.row_idx + i * self.rows_per_pass, gemm.m - 1)
            image_pixel = pixel % math.prod(w.output_size)
            element_offset = pixel // math.prod(w.output_size) * strides[0] + tile_group * gemm.channels_per_group
            for axis, coord_regs in enumerate(self.first_tap_coords):
                output_coord = image_pixel // math.prod(w.output_size[axis + 1 :]) % w.output_size[axis]
                store(coord_regs, i, output_coord * w.stride[axis] - w.pad_low[axis])
                element_offset = element_offset + coord_regs[i] * strides[1 + axis]
            store(self.pixel_offset, i, element_offset)
        with unrolled_loop(ceil_div(self.config.block_n, self.rows_per_pass), "i") as i:
            channel = T.min(offset_n + self.row_idx + i * self.rows_per_pass, gemm.n - 1)
            store(self.filter_offset, i, (tile_group * gemm.n + channel) * gemm.k)

    def load_input(self, k_tile: Expr, stage: Expr) -> None:
        """Start the copy of this block's input pixels for a k-tile into a pipeline stage."""
        gemm, config, w = self.gemm, self.config, self.w
        first_k = (self.split_k_idx * self.k_tiles_per_block + k_tile) * config.block_k
        destination = self.smem_destination(stage)
        strides = _compute_strides((w.N, *w.input_size, w.C))
        # If a k-tile lies within one tap, the tap is the same for all threads.
        within_tap = gemm.channels_per_group % config.block_k == 0
        for element in range(0, self.chunk_elements, self.contiguous_elements):
            k = first_k + self.chunk_idx * self.chunk_elements + element
            tap = (first_k if within_tap else k) // gemm.channels_per_group
            offset = k - tap * gemm.channels_per_group
            tap_offsets = []
            for axis in range(w.spatial_ndim):
                tap_offsets.append(tap // math.prod(w.kernel[axis + 1 :]) % w.kernel[axis] * w.dilation[axis])
                offset = offset + tap_offsets[axis] * strides[1 + axis]
            with self.rows_loop(config.block_m) as i:
                bounds_checks = [
                    T.Cast("uint32", self.first_tap_coords[axis][i] + tap_offsets[axis]) < T.uint32(w.input_size[axis])
                    for axis in range(w.spatial_ndim)
                    if _has_border(w, axis)
                ]
                address = destination + to_uint32(i * self.rows_per_pass * self.k_tile_row_bytes)
                self.copy_elements(
                    address,
                    element,
                    "X",
                    self.pixel_offset[i] + offset,
                    logical_and(*bounds_checks, self.is_valid_k(k)),
                )

    def load_weights(self, k_tile: Expr, stage: Expr) -> None:
        """Start the copy of this block's filters for a k-tile into a pipeline stage."""
        config = self.config
        first_k = (self.split_k_idx * self.k_tiles_per_block + k_tile) * config.block_k
        destination = self.smem_destination(stage) + to_uint32(config.block_m * self.k_tile_row_bytes)
        for element in range(0, self.chunk_elements, self.contiguous_elements):
            k = first_k + self.chunk_idx * self.chunk_elements + element
            with self.rows_loop(config.block_n) as i:
                address = destination + to_uint32(i * self.rows_per_pass * self.k_tile_row_bytes)
                self.copy_elements(address, element, "K", self.filter_offset[i] + k, self.is_valid_k(k))

    def smem_destination(self, stage: Expr) -> Expr:
        """Return the shared-memory address of the first chunk that this thread copies into a stage."""
        row_address = (
            self.smem_base[0] + to_uint32(stage * self.stage_bytes) + to_uint32(self.row_idx * self.k_tile_row_bytes)
        )
        return row_address + to_uint32((self.chunk_idx ^ self.swizzle_mask(self.row_idx)) * VECTOR_BYTES)

    def is_valid_k(self, k: Expr) -> Expr:
        """Return whether an index of the reduction is inside it, not in the overhang of the last k-tiles."""
        is_exact = self.gemm.k % (self.config.block_k * self.k_tiles_per_block * self.config.split_k) == 0
        return True if is_exact else k < self.gemm.k

    def rows_loop(self, num_rows: int) -> Any:
        """Return a loop over the rows of an operand that a thread copies."""
        is_exact = num_rows % self.rows_per_pass == 0
        passes = unrolled_loop(ceil_div(num_rows, self.rows_per_pass), "i")
        return guarded_loop(passes, lambda i: True if is_exact else self.row_idx + i * self.rows_per_pass < num_rows)

    def copy_elements(
        self, destination: Expr, element: int, argument_name: str, element_offset: Expr, is_inside: Expr
    ) -> None:
        """Copy contiguous elements of an operand to shared memory, or zeros if not `is_inside`."""
        nbytes = self.contiguous_elements * self.gemm.itemsize
        destination = destination + to_uint32(element * self.gemm.itemsize)
        if nbytes in CP_ASYNC_MNEMONIC:
            self.emit_cp_async(destination, argument_name, element_offset, nbytes, is_inside)
            return
        store(self.packed, 0, T.uint32(0))  # cp.async copies at least 4 bytes (PTX ISA, "cp.async")
        with if_(is_inside):
            load_global(self.packed, self.arguments[argument_name], element_offset, 1)
        emit_ptx("st.shared.b16", destination, T.Cast("uint16", self.packed[0]))

    def emit_cp_async(
        self, destination: Expr, argument_name: str, element_offset: Expr, nbytes: int, is_inside: Expr
    ) -> None:
        """Start the copy of contiguous elements of an argument to shared memory, or of zeros if not `is_inside`."""
        source_size = () if is_inside is True else (T.Select(is_inside, T.uint32(nbytes), T.uint32(0)),)
        emit_ptx(
            CP_ASYNC_MNEMONIC[nbytes],
            destination,
            self.arguments[argument_name].access_ptr("r", offset=element_offset),
            nbytes,
            *source_size,
        )

    def prefetch_channel_args(self) -> None:
        """Start the copy of the tile's per-channel epilogue arguments to the end of shared memory.

        The copy belongs to the first commit group of the tile and is complete for all threads at the tile's end. Of the
        blocks that split a reduction, only the first adds these arguments. All threads have read them before the copy
        for the next tile starts, because a barrier lies between the mainloop and the store of the tile.
        """
        gemm, config = self.gemm, self.config
        channels_per_copy = math.gcd(gemm.n, VECTOR_BYTES // ACCUMULATOR_BYTES)
        num_copies = config.block_n // channels_per_copy
        for arg_idx, op in enumerate(self.channel_arg_ops):
            with unrolled_loop(ceil_div(num_copies, config.num_threads), "i") as i:
                copy_idx = self.thread_idx + i * config.num_threads
                channel = self.tile_offset_n + copy_idx * channels_per_copy
                is_inside = logical_and(
                    True if gemm.n % config.block_n == 0 else channel < gemm.n,
                    True if config.split_k == 1 else self.split_k_idx == 0,
                )
                destination = self.channel_arg_address(arg_idx, copy_idx * channels_per_copy)
                source_channel = self.group_idx * gemm.n + channel
                with if_(True if num_copies % config.num_threads == 0 else copy_idx < num_copies):
                    self.emit_cp_async(
                        destination, op.name, source_channel, channels_per_copy * ACCUMULATOR_BYTES, is_inside
                    )


def _compute_strides(shape: Sequence[int]) -> list[int]:
    """Return the element strides of an array in C order."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _has_border(w: Conv, axis: int) -> bool:
    """Return whether the filter overhangs the image's border along an axis."""
    last_coord = (w.output_size[axis] - 1) * w.stride[axis] + w.window[axis] - 1 - w.pad_low[axis]
    return w.pad_low[axis] > 0 or last_coord >= w.input_size[axis]
