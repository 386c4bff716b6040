"""Consumer of `hopper`: wgmma on operands in shared memory, with one k-tile in flight while the next is issued."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Expr, emit_call, emit_ptx, if_, serial_loop, store, to_uint32
from .base import HopperKernelBase
from .tma_requirements import WARPGROUP_THREADS, WGMMA_K_BYTES

WGMMA_OPERAND_TYPE = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32"}
DESCRIPTOR_SWIZZLE_MODE = {128: 1, 64: 2, 32: 3}  # field of a matrix descriptor, by swizzle width in bytes


class HopperConsumer(HopperKernelBase):
    """Warpgroups that multiply each stage as soon as it is full."""

    def run_mainloop(self) -> None:
        """Multiply the k-tiles of a tile as they arrive; one k-tile is in flight while the next is issued."""
        config = self.config
        with serial_loop(self.num_own_k_tiles(), "step") as k_tile:
            emit_call(T.cuda.mbarrier_wait(self.full_barrier(self.mainloop_state[0]), self.mainloop_state[1]))
            self.issue_wgmmas(k_tile)
            with if_(k_tile > 0):
                emit_call(T.ptx.wgmma.wait_group.sync.aligned(1))
                self.consumer_release()
            self.advance_pipeline_state(self.mainloop_state, config.stages)
        emit_call(T.ptx.wgmma.wait_group.sync.aligned(0))
        self.consumer_release()

    def issue_wgmmas(self, k_tile: Expr) -> None:
        """Issue all wgmmas of a k-tile; the first one of a tile overwrites the accumulators."""
        config, w, itemsize = self.config, self.w, self.gemm.itemsize
        accum_per_m_tile = int(config.num_accumulators) // config.wgmma_m_tiles
        mnemonic = f"wgmma.mma_async.sync.aligned.m64n{config.block_n}k{WGMMA_K_BYTES // itemsize}.f32"
        mnemonic = f"{mnemonic}.{WGMMA_OPERAND_TYPE[w.dtype]}.{WGMMA_OPERAND_TYPE[w.dtype]}"
        signs = (1, 1) if itemsize == 4 else (1, 1, 0, 0)  # neither operand is negated or transposed
        warpgroup_offset_bytes = self.warpgroup_idx * (config.wgmma_m_tiles * self.input_copy_bytes)
        for operand_idx, address in enumerate(
            (
                self.stage_address() + to_uint32(warpgroup_offset_bytes),
                self.stage_address() + to_uint32(self.input_bytes),
            )
        ):
            store(self.descriptor_low, operand_idx, T.shift_right(address, T.uint32(4)) | T.uint32(1 << 16))
        # The upper half of a descriptor has the stride of 8 rows, in units of 16 bytes, and the swizzle mode.
        descriptor_high = (8 * self.swizzle_bytes >> 4) | DESCRIPTOR_SWIZZLE_MODE[self.swizzle_bytes] << 30

        def make_descriptor(operand_idx: int, offset_bytes: int) -> Expr:
            low = T.Cast("uint64", self.descriptor_low[operand_idx] + T.uint32(offset_bytes >> 4))
            return low | T.shift_left(T.Cast("uint64", T.uint32(descriptor_high)), T.uint64(32))

        emit_call(T.ptx.wgmma.fence.sync.aligned())
        for k in range(config.taps_per_copy * config.block_k_bytes // WGMMA_K_BYTES):
            tap_in_copy, tap_k_bytes = divmod(k * WGMMA_K_BYTES, config.block_k_bytes)
            k_atom, atom_offset_bytes = divmod(tap_k_bytes, self.swizzle_bytes)
            tap_offset_bytes = tap_in_copy * w.dilation[-1] * self.swizzle_bytes if self.taps_share_copy else 0
            for m_tile in range(config.wgmma_m_tiles):
                a_descriptor = make_descriptor(
                    0,
                    k_atom * self.block_m * self.swizzle_bytes
                    + m_tile * self.input_copy_bytes
                    + atom_offset_bytes
                    + tap_offset_bytes,
                )
                b_descriptor = make_descriptor(
                    1,
                    (tap_in_copy * self.num_k_atoms + k_atom) * config.block_n * self.swizzle_bytes + atom_offset_bytes,
                )
                accum_regs = [self.accum[m_tile * accum_per_m_tile + e] for e in range(accum_per_m_tile)]
                emit_ptx(mnemonic, *accum_regs, a_descriptor, b_descriptor, True if k else k_tile > 0, *signs)
        emit_call(T.ptx.wgmma.commit_group.sync.aligned())

    def consumer_release(self) -> None:
        """Arrive at the empty barriers of the previous stage, in all CTAs that copy into it."""
        config = self.config
        stage = T.Select(self.mainloop_state[0] == 0, config.stages - 1, self.mainloop_state[0] - 1)
        warpgroup_thread = self.thread_idx % WARPGROUP_THREADS
        if config.multicast_size == 1:
            with if_(warpgroup_thread == 0):
                emit_ptx("mbarrier.arrive.shared.b64", self.empty_barrier(stage), T.uint32(1))
            return
        writer_ranks = [self.compute_cta_rank(m, True) for m in range(config.cluster_m)]
        writer_ranks += [
            self.compute_cta_rank(True, (self.cta_rank_n + n) % config.cluster_n) for n in range(1, config.cluster_n)
        ]
        for i, writer_rank in enumerate(writer_ranks):
            with if_(warpgroup_thread == i):
                emit_ptx(
                    "mapa.shared::cluster.u32",
                    self.remote_address[0],
                    self.empty_barrier(stage),
                    to_uint32(writer_rank),
                )
                emit_call(T.ptx.mbarrier.arrive.shared__cluster.b64(self.remote_address[0]))
