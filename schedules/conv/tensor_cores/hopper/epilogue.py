"""Epilogue of `hopper`: accumulators are stored by TMA in epilogue tiles, or reduced over a cluster first."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import epilogue

from ....tir_builder import (
    Expr,
    emit_call,
    emit_ptx,
    if_,
    load_global,
    load_shared,
    logical_and,
    pack,
    serial_loop,
    store,
    store_global,
    to_uint32,
    unpack,
    unrolled_loop,
)
from ..epilogue_ops import apply_epilogue, split_trailing_relu
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from .base import HopperKernelBase
from .tile_config import MAX_EPILOGUE_ROW_BYTES, REDUCE_PIECE_M, REDUCE_PIECE_N
from .tma_requirements import WARPGROUP_THREADS, WGMMA_M

STMATRIX_MNEMONIC = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
LDMATRIX_MNEMONIC = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
TMA_STORE_MNEMONIC = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"


class HopperEpilogue(HopperKernelBase):
    """The end of a tile: the epilogue and the store to global memory."""

    # --- store ---

    def prefetch_channel_args(self) -> None:
        """Prefetch per-channel epilogue arguments to registers; they arrive during the mainloop."""
        config, gemm = self.config, self.gemm
        for name in self.channel_args:
            for i in range(ceil_div(config.block_n, WARPGROUP_THREADS)):
                n = self.thread_idx % WARPGROUP_THREADS + i * WARPGROUP_THREADS
                store(self.channel_arg_regs[name], i, T.float32(0))
                with if_(
                    logical_and(
                        True if config.block_n % WARPGROUP_THREADS == 0 else n < config.block_n,
                        self.is_valid_channel(self.tile_offset_n + n),
                    )
                ):
                    load_global(self.packed, self.arguments[name], self.group_idx * gemm.n + self.tile_offset_n + n, 1)
                    store(self.channel_arg_regs[name], i, T.reinterpret("float32", self.packed[0]))

    def is_valid_channel(self, n: Expr) -> Expr:
        """Return whether a channel is inside its group, not in the overhang of the last tile."""
        return True if self.gemm.n % self.config.block_n == 0 and self.config.cluster_n == 1 else n < self.gemm.n

    def store_channel_args_to_smem(self) -> None:
        """Store the prefetched per-channel arguments to shared memory for all threads of the warpgroup."""
        config = self.config
        if not self.channel_args:
            return
        for name in self.channel_args:
            for i in range(ceil_div(config.block_n, WARPGROUP_THREADS)):
                n = self.thread_idx % WARPGROUP_THREADS + i * WARPGROUP_THREADS
                with if_(True if config.block_n % WARPGROUP_THREADS == 0 else n < config.block_n):
                    emit_ptx("st.shared.b32", self.channel_arg_address(name, n), self.channel_arg_regs[name][i])
        self.sync_warpgroup()

    def channel_arg_address(self, name: str, n: Expr) -> Expr:
        """Return the shared-memory address of a per-channel argument of the tile."""
        arg_idx = self.warpgroup_idx * len(self.channel_args) + self.channel_args.index(name)
        return (
            self.smem_base[0]
            + to_uint32(self.channel_args_offset)
            + to_uint32((arg_idx * self.config.block_n + n) * ACCUMULATOR_BYTES)
        )

    def store_tile(self) -> None:
        """Apply the epilogue to a tile and store it in epilogue tiles; one is stored while the next is computed."""
        config = self.config
        is_leader = self.thread_idx % WARPGROUP_THREADS == 0
        num_tiles_n = config.block_n // self.epilogue_tile_n
        for m_tile in range(config.wgmma_m_tiles):
            for n_tile in range(num_tiles_n):
                stage_address = self.epilogue_stage_address(self.epilogue_state[0])
                if self.residual_name:
                    emit_call(
                        T.cuda.mbarrier_wait(
                            self.residual_full_barrier(
                                self.warpgroup_idx * self.epilogue_stages + self.epilogue_state[0]
                            ),
                            self.epilogue_state[1],
                        )
                    )
                else:
                    with if_(is_leader):
                        emit_ptx("cp.async.bulk.wait_group.read", self.epilogue_stages - 1)
                    self.sync_warpgroup()
                self.apply_epilogue_to_tile(m_tile, n_tile, stage_address)
                emit_call(T.ptx.fence.proxy.async_.shared__cta())
                self.sync_warpgroup()
                with if_(is_leader):
                    pixel = (
                        self.tile_offset_m + self.warpgroup_idx * (config.wgmma_m_tiles * WGMMA_M) + m_tile * WGMMA_M
                    )
                    emit_ptx(
                        TMA_STORE_MNEMONIC,
                        self.output_map,
                        self.tile_offset_n + n_tile * self.epilogue_tile_n,
                        pixel,
                        self.group_idx,
                        stage_address,
                    )
                    emit_call(T.ptx.cp.async_.bulk.commit_group())
                    if self.residual_name:
                        emit_ptx("cp.async.bulk.wait_group.read", 0)
                        residual_stage = self.warpgroup_idx * self.epilogue_stages + self.epilogue_state[0]
                        emit_ptx("mbarrier.arrive.shared.b64", self.residual_empty_barrier(residual_stage), T.uint32(1))
                self.advance_pipeline_state(self.epilogue_state, self.epilogue_stages)

    def epilogue_stage_address(self, stage: Expr) -> Expr:
        """Return the shared-memory address of an epilogue stage of this warpgroup."""
        stage_idx = self.warpgroup_idx * self.epilogue_stages + stage
        return (
            self.smem_base[0]
            + to_uint32(int(self.config.mainloop_smem_bytes()))
            + to_uint32(stage_idx * self.epilogue_stage_bytes)
        )

    def swizzled_offset(self, row: Expr, chunk: Expr) -> Expr:
        """Return the offset of a 16-byte chunk in an epilogue tile, in TMA's swizzle."""
        rows_per_128_bytes = MAX_EPILOGUE_ROW_BYTES // self.epilogue_row_bytes
        return to_uint32(row * self.epilogue_row_bytes) + to_uint32(
            (chunk ^ (row // rows_per_128_bytes % (self.epilogue_row_bytes // VECTOR_BYTES))) * VECTOR_BYTES
        )

    def apply_epilogue_to_tile(self, m_tile: int, n_tile: int, stage_address: Expr) -> None:
        """Apply the epilogue to an epilogue tile of the accumulators, and store the result to an epilogue stage."""
        config = self.config
        warp_row = self.thread_idx % WARPGROUP_THREADS // WARP_SIZE * 16
        first_accum = (
            m_tile * (int(config.num_accumulators) // config.wgmma_m_tiles) + n_tile * self.epilogue_tile_n // 8 * 4
        )
        if self.gemm.itemsize == 2:
            addresses = [  # one address per 16 pixels × 16 channels of a warp
                stage_address
                + self.swizzled_offset(warp_row + self.lane_idx % 16, channel_group * 2 + self.lane_idx // 16)
                for channel_group in range(self.epilogue_tile_n // 16)
            ]
            if self.residual_name:
                for channel_group, address in enumerate(addresses):
                    emit_ptx(
                        LDMATRIX_MNEMONIC, *(self.residual_words[channel_group * 4 + e] for e in range(4)), address
                    )
                emit_ptx("bar.warp.sync", T.uint32(0xFFFFFFFF))
            for channel_group, address in enumerate(addresses):
                for channel_half in range(2):
                    n = n_tile * self.epilogue_tile_n + channel_group * 16 + channel_half * 8
                    channel_values = self.load_channel_args(n)
                    for pixel_half in range(2):
                        accum_pair = [
                            self.accum[first_accum + (channel_group * 2 + channel_half) * 4 + pixel_half * 2 + e]
                            for e in range(2)
                        ]
                        residual_values: list[Expr] = (
                            self.unpack_halves(self.residual_words[channel_group * 4 + channel_half * 2 + pixel_half])
                            if self.residual_name
                            else [None] * 2
                        )
                        self.apply_epilogue_to_pair(
                            accum_pair, channel_values, residual_values, channel_half * 2 + pixel_half
                        )
                emit_ptx(STMATRIX_MNEMONIC, address, *(self.packed[e] for e in range(4)))
            return
        for channel_group in range(self.epilogue_tile_n // 8):  # two 8 × 8 tiles (pixels × channels) per warp
            channel_values = self.load_channel_args(n_tile * self.epilogue_tile_n + channel_group * 8)
            for pixel_half in range(2):
                row, chunk = warp_row + self.lane_idx // 4 + pixel_half * 8, channel_group * 2 + self.lane_idx % 4 // 2
                address = stage_address + self.swizzled_offset(row, chunk) + to_uint32(self.lane_idx % 2 * 8)
                residual_values = [None] * 2
                if self.residual_name:
                    load_shared(self.residual_words, address, 8)
                    residual_values = [T.reinterpret("float32", self.residual_words[e]) for e in range(2)]
                accum_pair = [self.accum[first_accum + channel_group * 4 + pixel_half * 2 + e] for e in range(2)]
                self.apply_epilogue_to_pair(accum_pair, channel_values, residual_values, 0)
                emit_ptx("st.shared.v2.b32", address, self.packed[0], self.packed[1])

    def unpack_halves(self, word: Expr) -> list[Expr]:
        """Return the two 16-bit elements of a word, in the accumulation dtype."""
        store(self.packed, 7, word)
        return unpack([self.packed[7]], 2, self.w.storage)

    def load_channel_args(self, n: int) -> dict[str, list[Expr]]:
        """Load the per-channel arguments of this thread's two channels among 8 channels that start at `n`."""
        channel_values: dict[str, list[Expr]] = {}
        for arg_idx, name in enumerate(self.channel_args):
            address = self.channel_arg_address(name, n + self.lane_idx % 4 * 2)
            emit_ptx("ld.shared.v2.b32", self.values[4 + arg_idx * 2], self.values[5 + arg_idx * 2], address)
            channel_values[name] = [self.values[4 + arg_idx * 2 + e] for e in range(2)]
        return channel_values

    def apply_epilogue_to_pair(
        self,
        accum_pair: list[Expr],
        channel_values: dict[str, list[Expr]],
        residual_values: list[Expr],
        packed_idx: int,
    ) -> None:
        """Apply the epilogue to two neighbouring accumulators and pack the rounded results."""
        ops, applies_relu = split_trailing_relu(self.epilogue_ops, self.w.storage)
        for e in range(2):
            arguments = {name: pair[e] for name, pair in channel_values.items()}
            if self.residual_name:
                arguments[self.residual_name] = residual_values[e]
            names = [operation.name for operation in ops]
            store(self.values, e, epilogue.apply_to_expression(names, accum_pair[e], arguments.__getitem__))
        pack(self.packed, packed_idx, [self.values[e] for e in range(2)], self.w.storage, applies_relu)

    def load_residual(self) -> None:
        """Copy a tile's residual by TMA, each epilogue tile as soon as its stage has been stored."""
        config = self.config
        num_tiles_n = config.block_n // self.epilogue_tile_n
        with unrolled_loop(config.wgmma_m_tiles, "i") as m_tile, unrolled_loop(num_tiles_n, "j") as n_tile:
            for warpgroup in range(config.warpgroups):
                residual_stage = warpgroup * self.epilogue_stages + self.epilogue_state[0]
                emit_call(T.cuda.mbarrier_wait(self.residual_empty_barrier(residual_stage), self.epilogue_state[1] ^ 1))
                full_barrier = self.residual_full_barrier(residual_stage)
                emit_ptx(
                    "mbarrier.arrive.expect_tx.shared.b64", full_barrier, T.uint32(WGMMA_M * self.epilogue_row_bytes)
                )
                destination = (
                    self.smem_base[0]
                    + to_uint32(int(config.mainloop_smem_bytes()))
                    + to_uint32(residual_stage * self.epilogue_stage_bytes)
                )
                pixel = self.tile_offset_m + (warpgroup * config.wgmma_m_tiles + m_tile) * WGMMA_M
                coords = (self.tile_offset_n + n_tile * self.epilogue_tile_n, pixel, self.group_idx)
                self.emit_tma_load(3, "", destination, self.residual_map, coords, full_barrier, (), None)
            self.advance_pipeline_state(self.epilogue_state, self.epilogue_stages)

    # --- cluster reduction ---

    def reduce_over_cluster(self) -> None:
        """Reduce the partial sums of all CTAs of a cluster; each CTA reduces and stores a share of the pixels."""
        is_consumer = self.thread_idx < self.num_consumer_threads
        self.sync_reduction_ctas()  # the partial sums reuse the stages, which must have been multiplied
        with if_(is_consumer):
            self.store_partials_to_dsmem()
        self.sync_reduction_ctas()
        with if_(is_consumer):
            self.reduce_and_store()

    def sync_reduction_ctas(self) -> None:
        """Synchronize all threads of the CTAs that share a reduction."""
        emit_call(T.cuda.cluster_sync() if self.config.split_k > 1 else T.cuda.cta_sync())

    def store_partials_to_dsmem(self) -> None:
        """Store this thread's accumulators to the shared memory of the CTAs that reduce them.

        Remote stores are used because a thread does not wait for each of them, unlike remote loads.
        """
        config = self.config
        accum_per_m_tile = int(config.num_accumulators) // config.wgmma_m_tiles
        first_row = (
            self.warpgroup_idx * (config.wgmma_m_tiles * WGMMA_M)
            + self.thread_idx % WARPGROUP_THREADS // WARP_SIZE * 16
            + self.lane_idx // 4
        )
        for m_tile in range(config.wgmma_m_tiles):
            for pixel_half in range(2):
                row = first_row + (m_tile * WGMMA_M + pixel_half * 8)
                address = self.smem_base[0] + self.partial_address(
                    self.split_k_idx, row % int(config.reduce_rows_per_cta), self.lane_idx % 4 * 2
                )
                if config.split_k > 1:
                    emit_ptx(
                        "mapa.shared::cluster.u32",
                        self.remote_address[0],
                        address,
                        to_uint32(row // int(config.reduce_rows_per_cta)),
                    )
                else:
                    store(self.remote_address, 0, address)
                for channel_group in range(config.block_n // 8):
                    accum_pair = [
                        self.accum[m_tile * accum_per_m_tile + channel_group * 4 + pixel_half * 2 + e] for e in range(2)
                    ]
                    destination = self.remote_address[0] + self.partial_address(0, 0, channel_group * 8)
                    emit_ptx(
                        "st.shared::cluster.v2.b32" if config.split_k > 1 else "st.shared.v2.b32",
                        destination,
                        *accum_pair,
                    )

    def partial_address(self, split_k_idx: Expr, row: Expr, column: Expr) -> Expr:
        """Return the shared-memory offset of a partial sum, in pieces of 4 pixels × 8 channels.

        Half a warp stores the pairs of one piece at a time, and a quarter of a warp loads a piece in vectors of four.
        Both access each bank once.
        """
        config = self.config
        piece_idx = (split_k_idx * int(config.reduce_rows_per_cta) + row) // REDUCE_PIECE_M * (
            config.block_n // REDUCE_PIECE_N
        ) + column // REDUCE_PIECE_N
        element_in_piece = row % REDUCE_PIECE_M * REDUCE_PIECE_N + column % REDUCE_PIECE_N
        return to_uint32((piece_idx * (REDUCE_PIECE_M * REDUCE_PIECE_N) + element_in_piece) * ACCUMULATOR_BYTES)

    def reduce_and_store(self) -> None:
        """Reduce this CTA's share of the pixels, apply the epilogue and store the results in vectors of channels."""
        config, gemm, w = self.config, self.gemm, self.w
        vectors_per_piece_row, pieces_per_row = REDUCE_PIECE_N // self.vector_channels, config.block_n // REDUCE_PIECE_N
        rows_per_cta = int(config.reduce_rows_per_cta)
        num_vectors = rows_per_cta * config.block_n // self.vector_channels
        with serial_loop(ceil_div(num_vectors, self.num_consumer_threads), "i") as i:
            vector_idx = i * self.num_consumer_threads + self.thread_idx
            piece_idx = vector_idx // (vectors_per_piece_row * REDUCE_PIECE_M)
            row = piece_idx // pieces_per_row * REDUCE_PIECE_M + vector_idx // vectors_per_piece_row % REDUCE_PIECE_M
            column = (
                piece_idx % pieces_per_row * REDUCE_PIECE_N + vector_idx % vectors_per_piece_row * self.vector_channels
            )
            tile_row = self.split_k_idx * rows_per_cta + row
            pixel, channel = self.tile_offset_m + tile_row, self.tile_offset_n + column
            is_inside = logical_and(
                True if num_vectors % self.num_consumer_threads == 0 else vector_idx < num_vectors,
                True if config.split_k * rows_per_cta == self.block_m else tile_row < self.block_m,
                True if gemm.m % self.block_m == 0 else pixel < gemm.m,
                True if gemm.n % config.block_n == 0 else channel < gemm.n,
            )
            with if_(is_inside):
                self.accumulate_partials(row, column)
                output_channel = self.group_idx * gemm.n + channel
                apply_epilogue(
                    w,
                    self.arguments,
                    self.epilogue_ops,
                    pixel,
                    output_channel,
                    self.vector_channels,
                    self.values,
                    self.packed,
                )
                store_global(self.arguments["Y"], pixel * w.O + output_channel, self.packed, self.vector_channels)

    def accumulate_partials(self, row: Expr, column: Expr) -> None:
        """Load neighbouring partial sums and add up those of all CTAs of the cluster."""
        for split_k_idx in range(self.config.split_k):
            address = self.smem_base[0] + self.partial_address(split_k_idx, row, column)
            load_shared(self.packed if split_k_idx else self.values, address, self.vector_channels * ACCUMULATOR_BYTES)
            for e in range(self.vector_channels if split_k_idx else 0):
                store(self.values, e, self.values[e] + T.reinterpret("float32", self.packed[e]))
