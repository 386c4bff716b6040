"""Epilogue of `mma_sync`: accumulators are staged in shared memory and stored, or stored to a workspace."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import epilogue

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    emit_ptx,
    fill_zeros,
    if_,
    load_global,
    load_shared,
    logical_and,
    pack,
    serial_loop,
    store,
    store_global,
    to_uint32,
    unrolled_loop,
)
from ..gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from .base import MmaSyncKernelBase
from .tile_config import MMA_M, MMA_N

VECTORS_IN_FLIGHT = 4  # maximum number of output vectors that a thread holds at a time
STAGED_TILE = "staged"  # name of a vector that is copied from shared memory unchanged


class MmaSyncEpilogue(MmaSyncKernelBase):
    """The end of a tile: the epilogue and the store to global memory."""

    def store_partials_to_workspace(self, workspace: Buffer) -> None:
        """Store this block's accumulators to the workspace (parts, pixels, channels)."""
        gemm = self.gemm
        num_channels = math.gcd(gemm.n, 2)
        with (
            unrolled_loop(self.warp_mmas_m, "i") as mma_m,
            unrolled_loop(self.warp_mmas_n, "j") as mma_n,
            unrolled_loop(2, "h") as pixel_half,
        ):
            pixel, channel = self.accum_pixel(mma_m, pixel_half), self.accum_channel(mma_n)
            element_offset = (self.split_k_idx * gemm.m + pixel) * self.w.O + self.group_idx * gemm.n + channel
            for pair in range(0, 2, num_channels):
                with if_(self.is_inside_output(pixel, channel + pair)):
                    first_accum = (mma_m * self.warp_mmas_n + mma_n) * 4 + pixel_half * 2 + pair
                    for e in range(num_channels):
                        store(self.values, e, self.accum[first_accum + e])
                    pointer = workspace.access_ptr("w", offset=element_offset + pair)
                    emit_ptx(
                        f"st.global{'.v2' if num_channels == 2 else ''}.b32",
                        pointer,
                        *(self.values[e] for e in range(num_channels)),
                    )

    def store_accumulators_to_smem(self) -> None:
        """Store the accumulators to shared memory, from which threads read neighbouring channels."""
        itemsize = self.staged_itemsize
        all_ops = EpilogueOps(tuple(self.accum_ops), "float32" if self.stores_raw_accumulators else self.w.storage)
        applies_relu = all_ops.fuses_relu
        ops = all_ops.ops[:-1] if applies_relu else all_ops.ops
        row = self.warp_m * (self.warp_mmas_m * MMA_M) + self.lane_idx // 4
        column = self.warp_n * (self.warp_mmas_n * MMA_N) + self.lane_idx % 4 * 2
        address = (
            self.smem_base[0]
            + to_uint32(self.output_tile_offset)
            + to_uint32(row * self.pitch_bytes)
            + to_uint32(column * itemsize)
        )
        for arg_idx, op in enumerate(self.channel_arg_ops):
            arg_regs = self.channel_arg_regs[op.name]
            with unrolled_loop(self.warp_mmas_n, "j") as mma_n:
                emit_ptx(
                    "ld.shared.v2.b32",
                    arg_regs[mma_n * 2],
                    arg_regs[mma_n * 2 + 1],
                    self.channel_arg_address(arg_idx, column + mma_n * MMA_N),
                )
        with (
            unrolled_loop(self.warp_mmas_m, "i") as mma_m,
            unrolled_loop(self.warp_mmas_n, "j") as mma_n,
            unrolled_loop(2, "h") as pixel_half,
        ):
            accum_regs = [self.accum[(mma_m * self.warp_mmas_n + mma_n) * 4 + pixel_half * 2 + e] for e in range(2)]
            pair = [self.apply_accum_ops(ops, value, mma_n * 2 + e) for e, value in enumerate(accum_regs)]
            destination = (
                address
                + to_uint32((mma_m * MMA_M + pixel_half * 8) * self.pitch_bytes)
                + to_uint32(mma_n * (MMA_N * itemsize))
            )
            if itemsize == ACCUMULATOR_BYTES:
                emit_ptx("st.shared.v2.b32", destination, *pair)
            else:
                pack(self.packed, 0, pair, self.w.storage, applies_relu)
                emit_ptx("st.shared.b32", destination, self.packed[0])

    def apply_accum_ops(self, ops: Sequence[epilogue.EpilogueOp], value: Expr, channel_idx: Expr) -> Expr:
        """Return an accumulator after the operations on accumulators, except the residual that initialized it."""
        for op in ops:
            if op.argument_kind == "channel":
                value = op.compute(value, self.channel_arg_regs[op.name][channel_idx])
            elif not op.argument_kind:
                value = op.compute(value)
        return value

    def store_tile(self) -> None:
        """Store the tile from shared memory in vectors of channels; each block of a cluster stores a share of the
        pixels.

        A thread holds several vectors at a time: it issues all loads before it waits for any.
        """
        config, gemm, w = self.config, self.gemm, self.w
        num_vectors = config.block_m // config.split_k * (config.block_n // self.vector_elements)
        num_passes = ceil_div(num_vectors, config.num_threads)
        vectors_in_flight = math.gcd(num_passes, VECTORS_IN_FLIGHT)
        residual_ops = [operation for operation in self.vector_ops if operation.argument_kind == "output"]
        register_names = (
            [operation.name for operation in residual_ops] if self.stores_raw_accumulators else [STAGED_TILE]
        )
        prefetched = [
            {name: allocate(f"{name}_{vector_number}", 8, "uint32") for name in register_names}
            for vector_number in range(vectors_in_flight)
        ]
        with serial_loop(num_passes // vectors_in_flight, "i") as i:
            vector_indices = [
                (i * vectors_in_flight + vector_number) * config.num_threads + self.thread_idx
                for vector_number in range(vectors_in_flight)
            ]
            for vector_idx, prefetched_words in zip(vector_indices, prefetched, strict=True):
                is_inside, smem_offset, pixel, channel = self.locate_output_vector(vector_idx, num_vectors)
                with if_(is_inside):
                    if not self.stores_raw_accumulators:
                        load_shared(
                            prefetched_words[STAGED_TILE],
                            self.smem_base[0] + smem_offset,
                            self.vector_elements * gemm.itemsize,
                        )
                    for operation in residual_ops if self.stores_raw_accumulators else ():
                        load_global(
                            prefetched_words[operation.name],
                            self.arguments[operation.name],
                            pixel * w.O + channel,
                            self.vector_elements,
                        )
            for vector_idx, prefetched_words in zip(vector_indices, prefetched, strict=True):
                is_inside, smem_offset, pixel, channel = self.locate_output_vector(vector_idx, num_vectors)
                with if_(is_inside):
                    if self.stores_raw_accumulators:
                        self.accumulate_partials(smem_offset)
                        apply_to_vector(
                            EpilogueOps(tuple(self.vector_ops), w.storage),
                            self.arguments,
                            channel,
                            pixel * w.O + channel,
                            self.vector_elements,
                            self.values,
                            self.packed,
                            prefetched_words,
                        )
                    packed_outputs = self.packed if self.stores_raw_accumulators else prefetched_words[STAGED_TILE]
                    store_global(self.arguments["Y"], pixel * w.O + channel, packed_outputs, self.vector_elements)

    def locate_output_vector(self, vector_idx: Expr, num_vectors: int) -> tuple[Expr, Expr, Expr, Expr]:
        """Return whether an output vector is stored, its offset in shared memory, its pixel and its first channel."""
        config, vectors_per_row = self.config, self.config.block_n // self.vector_elements
        row, column = (
            self.split_k_idx * (config.block_m // config.split_k) + vector_idx // vectors_per_row,
            vector_idx % vectors_per_row * self.vector_elements,
        )
        pixel, channel = self.tile_offset_m + row, self.tile_offset_n + column
        is_inside = logical_and(
            True if num_vectors % config.num_threads == 0 else vector_idx < num_vectors,
            self.is_inside_output(pixel, channel),
        )
        smem_offset = (
            to_uint32(self.output_tile_offset)
            + to_uint32(row * self.pitch_bytes)
            + to_uint32(column * self.staged_itemsize)
        )
        return is_inside, smem_offset, pixel, self.group_idx * self.gemm.n + channel

    def accumulate_partials(self, smem_offset: Expr) -> None:
        """Load neighbouring accumulators of the tile, summed over the blocks of a cluster."""
        if self.config.split_k == 1:
            load_shared(self.values, self.smem_base[0] + smem_offset, self.vector_elements * ACCUMULATOR_BYTES)
            return
        total = self.values
        fill_zeros(total, self.vector_elements)
        with unrolled_loop(int(self.config.split_k), "g") as part_idx:
            emit_ptx("mapa.shared::cluster.u32", self.packed[0], self.smem_base[0] + smem_offset, to_uint32(part_idx))
            for first_element in range(0, self.vector_elements, 4):
                num_elements = min(4, self.vector_elements - first_element)
                suffix = f".v{num_elements}" if num_elements > 1 else ""
                loaded_words = [self.packed[1 + e] for e in range(num_elements)]
                emit_ptx(
                    f"ld.shared::cluster{suffix}.b32",
                    *loaded_words,
                    self.packed[0] + to_uint32(first_element * ACCUMULATOR_BYTES),
                )
                for e in range(num_elements):
                    store(
                        total, first_element + e, total[first_element + e] + T.reinterpret("float32", loaded_words[e])
                    )
