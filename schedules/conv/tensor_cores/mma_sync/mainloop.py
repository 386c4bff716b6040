"""Mainloop of `mma_sync`: k-tiles in a shared-memory pipeline, fragments loaded one mma ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import epilogue

from ....tir_builder import (
    Expr,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    logical_and,
    serial_loop,
    store,
    to_uint32,
    unrolled_loop,
)
from ..gemm.epilogue_ops import load_argument
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from .loader import MmaSyncLoader
from .tile_config import MMA_M, MMA_N

MMA_MNEMONIC = {
    "float16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "tf32": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
}
LDMATRIX_MNEMONIC = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"


class MmaSyncMainloop(MmaSyncLoader):
    """Accumulation of a tile by mma: each k-tile is multiplied while later ones are copied."""

    def init_accumulators(self) -> None:
        """Initialize the accumulators with zero, or with the residual in the first part of the reduction."""
        fill_zeros(self.accum, self.warp_mmas_m * self.warp_mmas_n * 4)
        is_first_part = logical_and(
            self.is_first_k_slice(), True if self.config.split_k == 1 else self.split_k_idx == 0
        )
        width = math.gcd(self.gemm.n, 2)
        for op in self.accum_ops:
            if op.argument_kind != "output":
                continue
            with (
                if_(is_first_part),
                unrolled_loop(self.warp_mmas_n, "j") as mma_n,
                unrolled_loop(self.warp_mmas_m, "i") as mma_m,
                unrolled_loop(2, "h") as pixel_half,
            ):
                pixel, channel = self.accum_pixel(mma_m, pixel_half), self.accum_channel(mma_n)
                for pair in range(0, 2, width):
                    with if_(self.is_inside_output(pixel, channel + pair)):
                        residual_values = self.read_op_argument(op, pixel, channel + pair, width)
                        self.apply_op_to_accumulators(
                            op, (mma_m * self.warp_mmas_n + mma_n) * 4 + pixel_half * 2 + pair, residual_values
                        )

    def apply_op_to_accumulators(
        self, op: epilogue.EpilogueOp, first_accum: Expr, argument_values: Sequence[Expr]
    ) -> None:
        """Apply an epilogue operation to neighbouring accumulators."""
        for e, value in enumerate(argument_values):
            store(self.accum, first_accum + e, op.compute(self.accum[first_accum + e], value))

    def read_op_argument(self, op: epilogue.EpilogueOp, pixel: Expr, channel: Expr, num_channels: int) -> list[Expr]:
        """Load an operation's argument for neighbouring channels of a pixel, in the accumulation dtype."""
        output_channel = self.group_idx * self.gemm.n + channel
        output_index = pixel * self.w.O + output_channel
        return load_argument(
            op, self.arguments, self.w.storage, output_channel, output_index, num_channels, self.packed
        )

    def run_mainloop(self, next_tile_idx: Expr, has_next_tile: Expr) -> None:
        """Multiply all k-tiles; each is copied `stages` - 1 k-tiles ahead, and its fragments are loaded one mma ahead.

        The copies that follow the last k-tile of this tile are the first ones of the next tile. Within a k-tile,
        fragment loads come before copies, because an mma waits for fragments sooner. Copies are spread over the mma
        steps, so that they are issued while the tensor cores compute.
        """
        config, prefetch_distance, last_mma = self.config, self.config.stages - 1, self.warp_mmas_k - 1

        def emit_load(k_tile: Expr, load_operand: Callable[[Expr, Expr], None]) -> None:
            with if_(k_tile + prefetch_distance < self.k_tiles_per_block):
                load_operand(k_tile + prefetch_distance, self.smem_pipe_slots[1])
            if config.tiles_per_block > 1:
                with if_(
                    logical_and(
                        k_tile + prefetch_distance >= self.k_tiles_per_block,
                        has_next_tile,
                        self.is_valid_tile(next_tile_idx),
                    )
                ):
                    load_operand(k_tile + (prefetch_distance - self.k_tiles_per_block), self.smem_pipe_slots[1])

        def advance_slot(slot_idx: int) -> None:
            store(
                self.smem_pipe_slots,
                slot_idx,
                T.Select(self.smem_pipe_slots[slot_idx] == config.stages - 1, 0, self.smem_pipe_slots[slot_idx] + 1),
            )

        with serial_loop(self.k_tiles_per_block, "step") as k_tile:
            if config.tiles_per_block > 1:
                with if_(
                    logical_and(
                        k_tile + prefetch_distance == self.k_tiles_per_block,
                        has_next_tile,
                        self.is_valid_tile(next_tile_idx),
                    )
                ):
                    self.init_row_pointers(next_tile_idx)
            for mma in range(self.warp_mmas_k):
                if mma == last_mma:
                    advance_slot(0)
                    self.wait_stage()
                    self.load_fragments(self.smem_pipe_slots[0], 0, 0)
                else:
                    self.load_fragments(self.smem_pipe_slots[0], mma + 1, (mma + 1) % 2)
                if mma == 0:
                    emit_load(k_tile, self.load_input)
                if mma == min(1, last_mma - 1):
                    emit_load(k_tile, self.load_weights)
                    emit_call(T.ptx.cp.async_.commit_group())
                    advance_slot(1)
                self.issue_mmas(mma % 2)

    def wait_stage(self) -> None:
        """Wait for the next stage, and for all warps to have read the previous one."""
        emit_call(T.ptx.cp.async_.wait_group(self.config.stages - 2))
        emit_call(T.cuda.cta_sync())

    def load_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        """Load this warp's operands for one mma step into one of two register sets.

        An `ldmatrix` of four matrices reads 16 rows × 32 bytes: the input fragment of one mma, or the weight fragments
        of two.
        """
        lane, first_chunk = self.lane_idx, (self.warp_k * self.warp_mmas_k + mma_k) * 2
        stage_address = self.smem_base[0] + to_uint32(stage * self.stage_bytes)
        row, chunk = self.warp_m * (self.warp_mmas_m * MMA_M) + lane % 16, first_chunk + lane // 16
        address = (
            stage_address
            + to_uint32(row * self.k_tile_row_bytes)
            + to_uint32((chunk ^ self.swizzle_mask(lane % 8)) * VECTOR_BYTES)
        )
        with unrolled_loop(self.warp_mmas_m, "i") as mma_m:
            registers = [self.a_frag[(fragment_set * self.warp_mmas_m + mma_m) * 4 + e] for e in range(4)]
            emit_ptx(LDMATRIX_MNEMONIC, *registers, address + to_uint32(mma_m * (MMA_M * self.k_tile_row_bytes)))
        row, chunk = self.warp_n * (self.warp_mmas_n * MMA_N) + lane % 8 + lane // 16 * 8, first_chunk + lane // 8 % 2
        address = (
            stage_address
            + to_uint32(self.config.block_m * self.k_tile_row_bytes)
            + to_uint32(row * self.k_tile_row_bytes)
        )
        address = address + to_uint32((chunk ^ self.swizzle_mask(lane % 8)) * VECTOR_BYTES)
        with unrolled_loop(self.warp_mmas_n // 2, "j") as mma_n_pair:
            registers = [self.b_frag[(fragment_set * self.warp_mmas_n + mma_n_pair * 2) * 2 + e] for e in range(4)]
            emit_ptx(
                LDMATRIX_MNEMONIC, *registers, address + to_uint32(mma_n_pair * (2 * MMA_N * self.k_tile_row_bytes))
            )

    def issue_mmas(self, fragment_set: int) -> None:
        """Multiply the fragments of one of the two register sets."""
        with unrolled_loop(self.warp_mmas_m, "i") as mma_m, unrolled_loop(self.warp_mmas_n, "j") as mma_n:
            accum_regs = [self.accum[(mma_m * self.warp_mmas_n + mma_n) * 4 + e] for e in range(4)]
            a_regs = [self.a_frag[(fragment_set * self.warp_mmas_m + mma_m) * 4 + e] for e in range(4)]
            b_regs = [self.b_frag[(fragment_set * self.warp_mmas_n + mma_n) * 2 + e] for e in range(2)]
            emit_ptx(MMA_MNEMONIC[self.w.dtype], *accum_regs, *a_regs, *b_regs, *accum_regs)

    def reduce_sliced_k(self) -> None:
        """Add the accumulators of the warps along the reduction in shared memory, into the first of these warps."""
        num_accum, threads = self.warp_mmas_m * self.warp_mmas_n * 4, self.config.num_threads // self.config.warps_k
        thread_address = self.smem_base[0] + to_uint32(self.thread_idx % threads * ACCUMULATOR_BYTES)
        with if_(self.warp_k > 0), unrolled_loop(num_accum, "i") as accum_idx:
            address = thread_address + to_uint32((self.warp_k - 1) * (threads * num_accum * ACCUMULATOR_BYTES))
            emit_ptx(
                "st.shared.b32", address + to_uint32(accum_idx * (threads * ACCUMULATOR_BYTES)), self.accum[accum_idx]
            )
        emit_call(T.cuda.cta_sync())
        with (
            if_(self.warp_k == 0),
            unrolled_loop(self.config.warps_k - 1, "g") as k_slice,
            unrolled_loop(num_accum, "i") as accum_idx,
        ):
            emit_ptx(
                "ld.shared.b32",
                self.values[0],
                thread_address + to_uint32((k_slice * num_accum + accum_idx) * (threads * ACCUMULATOR_BYTES)),
            )
            store(self.accum, accum_idx, self.accum[accum_idx] + self.values[0])
        emit_call(T.cuda.cta_sync())
