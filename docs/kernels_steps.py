"""The kernels of docs/kernels.md: a Hopper convolution in steps, each with one more layer of `tensor_cores/gemm`.

    python docs/kernels_steps.py                                              verify all steps in the emulator
    python docs/kernels_steps.py step3_tma step4_pipeline                     verify two steps
    python docs/kernels_steps.py --resources                                  compile for sm_90a; registers and spills
    python docs/kernels_steps.py --device cuda:0 --json FILE --update-page docs/kernels.md       verify and time

All steps compute a 2-D convolution in float16, channels last. Its product has M = N·P·Q pixels, N = filters, and
K = taps × channels; the page explains these letters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)
from tvmconv.builtin.conv.tensor_cores.gemm.accumulators import Accumulators
from tvmconv.builtin.conv.tensor_cores.gemm.atoms import ThreadPosition, WgmmaAtom, wgmma_wait_group
from tvmconv.builtin.conv.tensor_cores.gemm.channel_arguments import ChannelArguments
from tvmconv.builtin.conv.tensor_cores.gemm.cp_async import CopyThreads, FilterGather, ImageGather
from tvmconv.builtin.conv.tensor_cores.gemm.epilogue_ops import EpilogueOps
from tvmconv.builtin.conv.tensor_cores.gemm.pipelines import (
    BARRIER_BYTES,
    PipelineState,
    TmaPipeline,
    fence_barrier_init,
)
from tvmconv.builtin.conv.tensor_cores.gemm.problem import make_fprop
from tvmconv.builtin.conv.tensor_cores.gemm.smem_layout import SWIZZLE_ALIGNMENT_BYTES, MatrixDescriptor, SmemLayout
from tvmconv.builtin.conv.tensor_cores.gemm.tile_scheduler import SINGLE_CTA, Cluster, KRange, TileScheduler
from tvmconv.builtin.conv.tensor_cores.gemm.tma import TmaCopy, tma_store_fence, tma_store_wait
from tvmconv.builtin.conv.tensor_cores.gemm.tma_epilogue import EpilogueTile, TmaEpilogue
from tvmconv.builtin.conv.tensor_cores.gemm.tma_loaders import TapIterator
from tvmconv.builtin.conv.tensor_cores.gemm.wgmma_mainloop import OperandTile, WgmmaMainloop
from tvmconv.builtin.conv.tensor_cores.implicit_gemm_shape import ImplicitGemmShape
from tvmconv.builtin.tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    build_schedule,
    declare_tensor_map,
    emit_call,
    emit_ptx,
    if_,
    pack,
    serial_loop,
    store_global,
    thread_axis,
    to_uint32,
)

import tvmconv as tc
from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.errors import Error
from tvmconv.space import Knobs
from tvmconv.target import H200, WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads import Conv2d

if TYPE_CHECKING:
    pass

BLOCK_K = 64  # channels of a K tile: rows of 128 bytes
ROW_BYTES = 2 * BLOCK_K
NUM_SMS = H200.multiprocessors  # the H100 SXM has as many
SM_SHARED_BYTES, CTA_RESERVED_BYTES = 228 << 10, 1 << 10  # shared memory of an SM, and the driver's part for each CTA


@dataclass(frozen=True)
class Tile:
    """The tile of a CTA.

    Attributes:
        warpgroups: Consumer warpgroups; the rows of the tile are divided among them.
        m_atoms: wgmma instructions of a warpgroup along M, 64 rows each.
        n: Columns.
        stages: Stages of the pipeline.
        ctas: CTAs of a persistent grid.
        cluster_m: CTAs of a cluster that share operand B.
    """

    warpgroups: int
    m_atoms: int
    n: int
    stages: int
    ctas: int = 1
    cluster_m: int = 1

    @property
    def m(self) -> int:
        """Rows."""
        return 64 * self.m_atoms * self.warpgroups

    @property
    def moves_registers(self) -> bool:
        """Whether the accumulators need more registers than an equal share, so that the producer gives some away.

        Registers move by whole warpgroups: the producer's warpgroup then has three idle warps.
        """
        return self.warpgroups > 1 and self.m_atoms * self.n // 2 > 128

    @property
    def producer_warps(self) -> int:
        """Warps of which one thread is the producer."""
        return 4 if self.moves_registers else 1

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a K tile of both operands."""
        return (self.m + self.n) * ROW_BYTES


# --- parts that several steps share ---


def make_mainloop(w: Conv2d, tile: Tile) -> WgmmaMainloop:
    """Return the layout of a stage, the copies that fill it, and the instructions that multiply it."""
    problem = make_fprop(w, rows_per_copy=tile.m)
    atom = WgmmaAtom(tile.n, "float16", "float16")
    a_layout, b_layout = SmemLayout(tile.m, ROW_BYTES), SmemLayout(tile.n, ROW_BYTES)
    a = OperandTile(problem.a, a_layout, 0, BLOCK_K, boxes_per_tap=1, copy_rows=tile.m)
    b_rows = tile.n // tile.cluster_m  # each CTA of a cluster loads a slice
    b = OperandTile(problem.b, b_layout, a_layout.nbytes, BLOCK_K, boxes_per_tap=1, copy_rows=b_rows)
    return WgmmaMainloop(atom, tile.m_atoms, atom.m, a, b, BLOCK_K)


def declare_maps(mainloop: WgmmaMainloop, arguments: dict[str, Buffer]) -> tuple[Expr, Expr]:
    """Declare the tensor maps of both operands."""
    a, b = (
        declare_tensor_map(f"{tile.operand.tensor}_map", arguments[tile.operand.tensor], tile.tensor_map())
        for tile in (mainloop.a, mainloop.b)
    )
    return a, b


def make_descriptors(mainloop: WgmmaMainloop) -> tuple[MatrixDescriptor, MatrixDescriptor]:
    """Return the matrix descriptors of both operands."""
    return MatrixDescriptor("a", mainloop.a.layout), MatrixDescriptor("b", mainloop.b.layout)


def align_smem(nbytes: int) -> Expr:
    """Allocate shared memory, and return its address as a multiple of the swizzle's period."""
    smem = allocate("smem", (nbytes + SWIZZLE_ALIGNMENT_BYTES) // 4, "uint32", "shared.dyn")
    address = T.cuda.cvta_generic_to_shared(smem.access_ptr("rw")) + to_uint32(SWIZZLE_ALIGNMENT_BYTES - 1)
    return Register("smem_base", "uint32", address & T.uint32(0xFFFFFFFF - (SWIZZLE_ALIGNMENT_BYTES - 1))).value


def init_pipeline(pipeline: TmaPipeline, thread: ThreadPosition) -> None:
    """Initialize the barriers before any thread uses them."""
    with if_(thread.thread == 0):
        pipeline.init_barriers()
        fence_barrier_init()
    emit_call(T.cuda.cluster_sync() if pipeline.cluster.size > 1 else T.cuda.cta_sync())


def count_k_tiles(w: Conv2d) -> int:
    """Return the K tiles of the reduction: the taps, each with `BLOCK_K` channels at a time."""
    return w.R * w.S * ceil_div(w.C, BLOCK_K)


def make_tap_iterator(w: Conv2d) -> TapIterator:
    """Return the iterator over the K tiles."""
    return TapIterator(w.kernel, ceil_div(w.C, BLOCK_K), BLOCK_K)


def store_fragments(
    w: Conv2d, accumulators: Sequence[Expr], tile: Tile, m: Expr, n: Expr, thread: ThreadPosition, y: Buffer
):
    """Store the accumulators as a thread has them: pairs of neighbouring columns of some rows."""
    num_rows, packed = w.N * w.P * w.Q, allocate("packed", 1, "uint32")
    for m_atom in range(tile.m_atoms):
        for half in range(2):
            row = m + m_atom * 64 + thread.warp * 16 + half * 8 + thread.lane // 4
            with if_(row < num_rows):
                for j in range(tile.n // 8):
                    first = m_atom * tile.n // 2 + j * 4 + half * 2
                    pack(packed, 0, [accumulators[first], accumulators[first + 1]], "float16")
                    store_global(y, row * w.O + n + j * 8 + thread.lane % 4 * 2, packed, 2)


# --- step 2: one wgmma tile ---


def emit_gather(w: Conv2d, tile: Tile, arguments: dict[str, Buffer]) -> None:
    """Threads copy a K tile to swizzled shared memory, and their warpgroup multiplies it."""
    shape, mainloop = ImplicitGemmShape.from_workload(w), make_mainloop(w, tile)
    tiles_n = w.O // tile.n
    grid = ceil_div(shape.m, tile.m) * tiles_n
    with thread_axis(grid, "blockIdx.x") as cta, thread_axis(WARPGROUP_SIZE, "threadIdx.x") as index:
        thread, smem = ThreadPosition(index), align_smem(tile.stage_bytes)
        m, n = cta // tiles_n * tile.m, cta % tiles_n * tile.n
        a_threads, b_threads = (CopyThreads(each.layout, WARPGROUP_SIZE, index) for each in (mainloop.a, mainloop.b))
        pixels = ImageGather(w, arguments["X"], BLOCK_K, None, a_threads)
        filters = FilterGather(shape, w.storage, arguments["K"], BLOCK_K, None, b_threads)
        pixels.locate(m, 0)
        filters.locate(n, 0)
        accumulators = allocate("accumulators", mainloop.num_accumulators, "float32")
        descriptors = make_descriptors(mainloop)
        with serial_loop(count_k_tiles(w), "k_tile") as k_tile:
            pixels.load(smem, 0, k_tile * BLOCK_K)
            filters.load(smem, mainloop.b.offset, k_tile * BLOCK_K)
            emit_call(T.ptx.cp.async_.commit_group())
            emit_call(T.ptx.cp.async_.wait_group(0))
            tma_store_fence()  # wgmma reads by the async proxy
            emit_call(T.cuda.cta_sync())
            mainloop.multiply(accumulators, descriptors, smem, 0, k_tile > 0)
            wgmma_wait_group(0)
            emit_call(T.cuda.cta_sync())  # before the next copies overwrite the tile
        store_fragments(w, accumulators, tile, m, n, thread, arguments["Y"])


# --- step 3: TMA ---


def emit_tma(w: Conv2d, tile: Tile, arguments: dict[str, Buffer]) -> None:
    """One thread starts two TMA copies for a K tile, and a barrier counts their bytes."""
    shape, mainloop = ImplicitGemmShape.from_workload(w), make_mainloop(w, tile)
    x_map, k_map = declare_maps(mainloop, arguments)
    tiles_n = w.O // tile.n
    grid = ceil_div(shape.m, tile.m) * tiles_n
    with thread_axis(grid, "blockIdx.x") as cta, thread_axis(WARPGROUP_SIZE, "threadIdx.x") as index:
        thread, smem = ThreadPosition(index), align_smem(tile.stage_bytes + BARRIER_BYTES)
        full_barrier = smem + to_uint32(tile.stage_bytes)
        with if_(index == 0):
            emit_ptx("mbarrier.init.shared.b64", full_barrier, T.uint32(1))  # one arrival, by thread 0
            fence_barrier_init()
        emit_call(T.cuda.cta_sync())
        m, n = cta // tiles_n * tile.m, cta % tiles_n * tile.n
        pixel, row = mainloop.a.locate(m, 0, 0), mainloop.b.locate(n, 0, 0)
        accumulators = allocate("accumulators", mainloop.num_accumulators, "float32")
        descriptors, k = make_descriptors(mainloop), make_tap_iterator(w)
        k.seek(0)
        with serial_loop(count_k_tiles(w), "k_tile") as k_tile:
            with if_(index == 0):
                emit_ptx("mbarrier.arrive.expect_tx.shared.b64", full_barrier, T.uint32(tile.stage_bytes))
                mainloop.a.load(smem, TmaCopy(x_map, full_barrier), pixel, 0, 0, k)
                mainloop.b.load(smem, TmaCopy(k_map, full_barrier), row, 0, 0, k)
            emit_call(T.cuda.mbarrier_wait(full_barrier, k_tile % 2))  # the phase bit flips with each K tile
            mainloop.multiply(accumulators, descriptors, smem, 0, k_tile > 0)
            wgmma_wait_group(0)
            emit_call(T.cuda.cta_sync())  # before the next copies overwrite the tile
            k.advance()
        store_fragments(w, accumulators, tile, m, n, thread, arguments["Y"])


# --- steps 4 and 5: a pipeline of stages, and persistent CTAs ---


def make_pipeline(tile: Tile, smem: Expr, barriers: Expr, cluster: Cluster = SINGLE_CTA) -> TmaPipeline:
    """Return the pipeline of the K tiles."""
    return TmaPipeline(
        smem, tile.stage_bytes, barriers, tile.stages, tile.stage_bytes, num_consumers=tile.warpgroups, cluster=cluster
    )


def emit_pipeline(w: Conv2d, tile: Tile, arguments: dict[str, Buffer], num_ctas: int | None = None) -> None:
    """A producer warp fills stages, and a consumer warpgroup multiplies them; by default, a CTA for each tile."""
    shape, mainloop = ImplicitGemmShape.from_workload(w), make_mainloop(w, tile)
    maps = declare_maps(mainloop, arguments)
    num_tiles = ceil_div(shape.m, tile.m) * (w.O // tile.n)
    tiles = TileScheduler.of_product((shape.m, shape.n), (tile.m, tile.n), 1, num_ctas or num_tiles)
    k_range = KRange(split=0, tiles_per_split=count_k_tiles(w), total=count_k_tiles(w))
    num_threads = WARPGROUP_SIZE + WARP_SIZE
    with thread_axis(tiles.num_ctas, "blockIdx.x") as cta, thread_axis(num_threads, "threadIdx.x") as index:
        thread, buffer_bytes = ThreadPosition(index), tile.stages * tile.stage_bytes
        smem = align_smem(buffer_bytes + 2 * tile.stages * BARRIER_BYTES)
        pipeline = make_pipeline(tile, smem, smem + to_uint32(buffer_bytes))
        init_pipeline(pipeline, thread)
        state = PipelineState("mainloop", tile.stages)
        accumulators = Accumulators.allocate(mainloop.num_accumulators, "float32")

        with if_(thread.warp < 4):  # consumer warpgroup
            descriptors = make_descriptors(mainloop)
            with tiles.work_tiles(cta) as work:
                mainloop.consume(accumulators, descriptors, k_range, pipeline, state, thread, thread.warpgroup)
                store_fragments(w, accumulators.list_sums(), tile, work.m, work.n, thread, arguments["Y"])
        with thread.elect_in_warp(4):  # producer
            k = make_tap_iterator(w)
            with tiles.work_tiles(cta) as work:
                mainloop.produce(work, k_range, maps, pipeline, state, k)


# --- steps 6 and 7: the epilogue, consumer warpgroups and clusters ---


def make_epilogue_tile(mainloop: WgmmaMainloop, tile: Tile) -> EpilogueTile:
    """Return the division of the accumulators into subtiles, as wide as the widest swizzle that divides the tile."""
    row_bytes = int(np.gcd(2 * tile.n, 128))
    return EpilogueTile(mainloop.atom, tile.m_atoms, tile.warpgroups, "float16", row_bytes, stages=2)


def emit_epilogue(w: Conv2d, tile: Tile, arguments: dict[str, Buffer]) -> None:
    """The persistent kernel with an epilogue: results pass through shared memory, and TMA stores them."""
    shape, mainloop, ops = ImplicitGemmShape.from_workload(w), make_mainloop(w, tile), EpilogueOps.from_workload(w)
    maps, subtiles = declare_maps(mainloop, arguments), make_epilogue_tile(mainloop, tile)
    y_map = declare_tensor_map("Y_map", arguments["Y"], subtiles.tensor_map(shape.m, shape.n, 1))
    k_range = KRange(split=0, tiles_per_split=count_k_tiles(w), total=count_k_tiles(w))
    num_warps = 4 * tile.warpgroups
    with (
        thread_axis(tile.ctas, "blockIdx.x") as cta,
        cluster_axis(tile) as rank,
        thread_axis((num_warps + tile.producer_warps) * WARP_SIZE, "threadIdx.x") as index,
    ):
        thread, cluster = ThreadPosition(index), Cluster(tile.cluster_m, 1, rank)
        tiles = TileScheduler.of_product((shape.m, shape.n), (tile.m, tile.n), 1, tile.ctas, cluster)
        smem, offsets = align_smem(smem_bytes(w, tile)), smem_offsets(w, tile)
        pipeline = make_pipeline(tile, smem, smem + to_uint32(offsets["barriers"]), cluster)
        init_pipeline(pipeline, thread)
        state, subtile_state = PipelineState("mainloop", tile.stages), PipelineState("epilogue", subtiles.stages)
        accumulators = Accumulators.allocate(mainloop.num_accumulators, "float32")
        arrays = smem + to_uint32(offsets["channels"])
        channels = ChannelArguments(ops.channel_args, arguments, tile.n, shape.n, True, arrays, thread.warpgroup)
        buffers = TmaPipeline(smem + to_uint32(offsets["subtiles"]), subtile_bytes(tile), 0, 0, 0, 0)
        epilogue = TmaEpilogue(subtiles, ops, channels, buffers, [y_map])

        with if_(thread.warp < num_warps):  # consumer warpgroups
            if tile.moves_registers:
                emit_ptx("setmaxnreg.inc.sync.aligned.u32", 232)
            descriptors = make_descriptors(mainloop)
            with tiles.work_tiles(cta) as work:
                epilogue.channels.prefetch(work, thread)
                mainloop.consume(accumulators, descriptors, k_range, pipeline, state, thread, thread.warpgroup)
                epilogue.store(accumulators.list_sums(), work, subtile_state, thread, thread.warpgroup)
            with if_(thread.is_warpgroup_leader):
                tma_store_wait(0)  # TMA reads shared memory until here
        if tile.moves_registers:
            with if_(thread.warp >= num_warps):  # the producer's warpgroup
                emit_ptx("setmaxnreg.dec.sync.aligned.u32", 40)
        with thread.elect_in_warp(num_warps):  # producer
            k = make_tap_iterator(w)
            with tiles.work_tiles(cta) as work:
                mainloop.produce(work, k_range, maps, pipeline, state, k)
        if cluster.size > 1:  # a CTA must not exit before the others stop writing to its shared memory
            emit_call(T.cuda.cluster_sync())


def cluster_axis(tile: Tile) -> AbstractContextManager[Expr]:
    """Open the loop over the CTAs of a cluster, if there are several."""
    return thread_axis(tile.cluster_m, "clusterCtaIdx.x") if tile.cluster_m > 1 else nullcontext(0)


def subtile_bytes(tile: Tile) -> int:
    """Return the bytes of a buffer for a subtile of the epilogue."""
    return round_up(64 * int(np.gcd(2 * tile.n, 128)), SWIZZLE_ALIGNMENT_BYTES)


def smem_offsets(w: Conv2d, tile: Tile) -> dict[str, int]:
    """Return the offsets of what follows the stages in shared memory, in bytes."""
    subtiles = round_up(tile.stages * tile.stage_bytes, SWIZZLE_ALIGNMENT_BYTES)
    channels = subtiles + 2 * tile.warpgroups * subtile_bytes(tile)
    barriers = channels + 4 * tile.n * tile.warpgroups * len(EpilogueOps.from_workload(w).channel_args)
    return {"subtiles": subtiles, "channels": channels, "barriers": barriers}


def smem_bytes(w: Conv2d, tile: Tile) -> int:
    """Return the bytes of shared memory of a CTA, without alignment."""
    return smem_offsets(w, tile)["barriers"] + 2 * tile.stages * BARRIER_BYTES


# --- the steps as schedules ---


def choose_tile(
    w: Conv2d, k: Knobs, max_stages: int = 4, *, warpgroups: int = 1, cluster_m: int = 1, has_epilogue: bool = True
) -> Tile:
    """Return the tile: 128 rows per warpgroup, up to 160 columns, and as many stages as leave room for its CTAs.

    Two CTAs share an SM if a tile has one warpgroup and few columns, so that one multiplies while the other stores.
    """
    n = next(width for width in range(160, 0, -16) if w.O % width == 0)
    ctas_per_sm = 2 if warpgroups == 1 and n <= 64 else 1
    ctas = k.choice("ctas", (2, 4, NUM_SMS, 2 * NUM_SMS), ctas_per_sm * NUM_SMS)
    for stages in range(max_stages, 0, -1):
        tile = Tile(warpgroups, 2, n, stages, ctas, cluster_m)
        nbytes = smem_bytes(w, tile) if has_epilogue else stages * (tile.stage_bytes + 2 * BARRIER_BYTES)
        if nbytes + SWIZZLE_ALIGNMENT_BYTES + CTA_RESERVED_BYTES <= SM_SHARED_BYTES // ctas_per_sm:
            return tile
    raise Error(f"{w} does not fit into shared memory")


def is_supported(w: Conv2d) -> bool:
    """Return whether the steps compute a convolution: whole K tiles, and columns that tiles divide."""
    return w.layout == "nhwc" and w.groups == 1 and w.C % BLOCK_K == 0 and w.O % 16 == 0


def is_supported_without_epilogue(w: Conv2d) -> bool:
    """Return whether a step without an epilogue computes a convolution."""
    return is_supported(w) and not w.epilogue


HOPPER: Mapping[str, Any] = {"dtypes": ("float16",), "device_kinds": ("cuda",), "exact_arch": 90}


@tc.schedule("conv2d", condition=is_supported_without_epilogue, **HOPPER)
def step2_wgmma(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Threads copy, and a warpgroup multiplies."""
    tile = choose_tile(w, k, max_stages=1)
    return build_schedule(w, lambda arguments: emit_gather(w, tile, arguments))


@tc.schedule("conv2d", condition=is_supported_without_epilogue, **HOPPER)
def step3_tma(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """TMA copies to one stage."""
    tile = choose_tile(w, k, max_stages=1)
    return build_schedule(w, lambda arguments: emit_tma(w, tile, arguments))


@tc.schedule("conv2d", condition=is_supported_without_epilogue, **HOPPER)
def step4_pipeline(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """A producer warp, a consumer warpgroup, and a pipeline of stages between them."""
    tile = choose_tile(w, k, has_epilogue=False)
    return build_schedule(w, lambda arguments: emit_pipeline(w, tile, arguments))


@tc.schedule("conv2d", condition=is_supported_without_epilogue, **HOPPER)
def step5_persistent(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """As many CTAs as run at a time, each with several tiles."""
    tile = choose_tile(w, k, has_epilogue=False)
    return build_schedule(w, lambda arguments: emit_pipeline(w, tile, arguments, tile.ctas))


@tc.schedule("conv2d", condition=is_supported, **HOPPER)
def step6_epilogue(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Results pass through shared memory, and TMA stores them."""
    tile = choose_tile(w, k)
    return build_schedule(w, lambda arguments: emit_epilogue(w, tile, arguments))


@tc.schedule("conv2d", condition=is_supported, **HOPPER)
def step7_cooperative(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Two consumer warpgroups share a tile of twice as many rows."""
    tile = choose_tile(w, k, warpgroups=2)
    return build_schedule(w, lambda arguments: emit_epilogue(w, tile, arguments))


@tc.schedule("conv2d", condition=is_supported, **HOPPER)
def step7_cluster(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Two CTAs of a cluster multicast the weights to each other."""
    tile = choose_tile(w, k, warpgroups=2, cluster_m=2)
    return build_schedule(w, lambda arguments: emit_epilogue(w, tile, arguments))


STEPS = {  # label of each step in the table of the page
    "step2_wgmma": "2: threads copy, wgmma multiplies",
    "step3_tma": "3: TMA, one stage",
    "step4_pipeline": "4: pipeline of stages",
    "step5_persistent": "5: persistent CTAs",
    "step6_epilogue": "6: epilogue with TMA stores",
    "step7_cooperative": "7: two consumer warpgroups",
    "step7_cluster": "7: and clusters of two CTAs",
}

if __name__ == "__main__":
    from kernels_measure import main

    sys.exit(main(STEPS))
