"""Kernel of `hopper`: warp-specialized, persistent implicit GEMM, composed from the layers of `..gemm`.

The plan chooses the layers. The kernel allocates what the warps share, and then they take their roles: a producer loads
operands, consumers multiply them and store work tiles, and further producers load a residual.

Source: CUTLASS, `include/cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp` and
`sm90_gemm_tma_warpspecialized_pingpong.hpp`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvmconv.workloads import Conv
from tvmconv.workloads.epilogue import STATS

from ....tir_builder import Buffer, Expr, declare_tensor_map, if_, to_uint32
from ..gemm.accumulators import Accumulators
from ..gemm.channel_arguments import ChannelArguments
from ..gemm.channel_stats import PartialStats, SubtileStats
from ..gemm.channels_first_epilogue import ChannelsFirstEpilogue
from ..gemm.cta import Cta, allocate_smem, broadcast_to_warp, open_cta
from ..gemm.filter_rows_epilogue import FilterArguments, FilterRowsEpilogue, FilterRowsEpilogueTile
from ..gemm.last_wave import NarrowLastWave, SplitLastWave
from ..gemm.pipelines import (
    BARRIER_BYTES,
    AsyncPipeline,
    OrderedSequenceBarrier,
    PipelineState,
    TmaPipeline,
    sync_cluster_relaxed,
)
from ..gemm.plane_gather import PendingArrivals, PlaneGather, produce_by_gather
from ..gemm.problem import make_fprop
from ..gemm.prologue import BarrierOwner, emit_prologue
from ..gemm.scatter_epilogue import ScatterEpilogue
from ..gemm.smem_layout import SWIZZLE_ALIGNMENT_BYTES, MatrixDescriptor
from ..gemm.tile_scheduler import KRange, ResidueKRange, SlicedKRange, TileScheduler
from ..gemm.tma_epilogue import TmaEpilogue
from ..gemm.tma_loaders import TapIterator
from ..gemm.wgmma_mainloop import MnMajorTile, OperandTile
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from .plan import CHANNELS_LAST_ACCESS, ChannelsFirstAccess, KernelPlan, MakeProblem
from .tile_config import DATA_PARALLEL, HopperTileConfig
from .tma_requirements import returns_stats

Epilogue = TmaEpilogue | ChannelsFirstEpilogue | FilterRowsEpilogue


def emit_kernel(
    w: Conv,
    config: HopperTileConfig,
    arguments: dict[str, Buffer],
    access: ChannelsFirstAccess = CHANNELS_LAST_ACCESS,
    make_problem: MakeProblem = make_fprop,
) -> None:
    """Emit the kernel.

    Args:
        w: The convolution, as TMA views it.
        config: The tile config.
        arguments: Argument buffers by name.
        access: Arrays that are channels first.
        make_problem: Function that returns the product of `w`.
    """
    plan = KernelPlan.choose(w, config, access, make_problem)
    maps, last_wave, stats = declare_tensor_maps(plan, arguments), make_last_wave(plan), make_stats(plan)
    narrow_plan = choose_narrow_plan(
        plan, functools.partial(KernelPlan.choose, w, access=access, make_problem=make_problem)
    )
    narrow_maps = declare_tensor_maps(narrow_plan, arguments, "narrow_") if narrow_plan else None
    split_k, cluster_shape = config.split_k, (config.cluster_m, config.cluster_n)
    with open_cta(
        plan.num_ctas, plan.roles.num_threads, split_k, splits_in_cluster=split_k > 1, cluster_shape=cluster_shape
    ) as cta:
        narrow = make_narrow_wave(plan, narrow_plan) if narrow_plan else None
        state = allocate_state(plan, cta, last_wave, narrow)
        plan = plan.keep_filters(state.smem)
        barrier_owners, first_loader = list_barrier_owners(plan, state), plan.roles.consumer_threads
        emit_prologue(cta.thread, barrier_owners, maps.list_prefetched(), first_loader, cta.cluster)
        plan = replace(plan, ops=plan.ops.bind_tensor_args(arguments, uses_registers=True))
        accumulators = plan.allocate_accumulators()
        epilogue = None if plan.reduction else make_epilogue(plan, state, maps.outputs, arguments, stats)

        with plan.roles.consumers(cta.thread):
            emit_consumer(plan, state, accumulators, epilogue)
            if narrow_plan and narrow_maps:
                assert isinstance(epilogue, TmaEpilogue)
                narrow_plan = replace(narrow_plan, ops=plan.ops)
                narrow_epilogue = make_narrow_epilogue(plan, narrow_plan, state, narrow_maps.outputs, arguments)
                emit_narrow_consumer(narrow_plan, state, epilogue, narrow_epilogue)

        def load_operands() -> None:
            emit_operand_loader(plan, state, maps.operands)
            if narrow_plan and narrow_maps:
                emit_narrow_loader(narrow_plan, state, narrow_maps.operands)

        loaders: list[Callable[[], None]] = [load_operands]
        if plan.gathers_input:
            loaders = [lambda: emit_gather_loader(plan, state, maps.operands, arguments["X"])]
        if plan.loads_residual and isinstance(epilogue, TmaEpilogue):
            loaders += make_residual_loaders(plan, state, epilogue)
        plan.roles.emit_producers(cta.thread, loaders)

        if plan.reduction:
            with state.tiles.work_tiles(cta.index) as tile:  # each CTA has one
                k_range = plan.consumer_k_range(cta.split, tile.residue, cta.thread)
                sums = plan.mainloop.sums(accumulators, k_range)
                plan.reduction.reduce_and_store(sums, tile, cta.split, cta.thread, state.smem, plan.ops, arguments)
        if cta.cluster.size > 1:  # a CTA must not exit before the others stop writing to its shared memory
            sync_cluster_relaxed()
    if last_wave:
        last_wave.emit_reduction(plan.shape, plan.ops, arguments)
    if stats:
        stats.emit_combination(arguments[STATS], uses_pdl=True)


@dataclass(frozen=True)
class TensorMaps:
    """Tensor maps of the kernel."""

    operands: Sequence[Expr]  # those of A and B, if TMA loads them, and of cached frames
    outputs: Sequence[Expr]  # those of the output and of a residual, if TMA accesses them

    def list_prefetched(self) -> list[Expr]:
        """Return all of them, those that are used first in front."""
        return [*self.operands, *reversed(self.outputs)]


def declare_tensor_maps(plan: KernelPlan, arguments: dict[str, Buffer], prefix: str = "") -> TensorMaps:
    """Declare the tensor maps as parameters of the kernel; `prefix` is that of their names."""

    def declare_operand(operand_tile: OperandTile) -> Expr:
        name = operand_tile.operand.tensor
        return declare_tensor_map(f"{prefix}{name}_map", arguments[name], operand_tile.tensor_map())

    shape, mainloop = plan.shape, plan.mainloop
    operands = [declare_operand(tile) for tile in ([] if plan.gathers_input else [mainloop.a]) + [mainloop.b]]
    if cache_map := mainloop.a.cache_map():
        operands.append(declare_tensor_map("cache_map", arguments[Conv.CACHE], cache_map))
    output_map = plan.epilogue_tile.tensor_map(shape.m, shape.n, shape.groups)
    outputs = [declare_tensor_map(f"{prefix}{name}_map", arguments[name], output_map) for name in plan.tma_outputs]
    return TensorMaps(operands, outputs)


def make_last_wave(plan: KernelPlan) -> SplitLastWave | None:
    """Return the tiles of the last wave if CTAs divide them; no CTAs form a cluster then."""
    config, shape = plan.config, plan.shape
    if not config.splits_last_wave:
        return None
    parts, total_k_tiles = int(config.last_wave_parts(shape)), int(config.total_k_tiles(shape))
    return SplitLastWave.with_workspace(plan.tiles(), parts, total_k_tiles)


def choose_narrow_plan(plan: KernelPlan, choose: Callable[[HopperTileConfig], KernelPlan]) -> KernelPlan | None:
    """Return the layers of the narrower tiles of the last wave, which have the stages of the others; None without."""
    config = plan.config
    if not config.narrows_last_wave:
        return None
    block_n = int(config.block_n // config.narrow_parts(plan.shape))
    narrow = choose(replace(config, block_n=block_n, decomposition=DATA_PARALLEL))
    return replace(narrow, epilogue_tile=replace(narrow.epilogue_tile, stages=plan.epilogue_tile.stages))


def make_narrow_wave(plan: KernelPlan, narrow_plan: KernelPlan) -> NarrowLastWave:
    """Return the narrower tiles of the last wave; no CTAs form a cluster then."""
    return NarrowLastWave(plan.tiles(), int(narrow_plan.config.block_n))


def make_stats(plan: KernelPlan) -> PartialStats | None:
    """Return the statistics of the output's channels if the workload has them."""
    shape, rows = plan.shape, plan.mainloop.m_atoms * plan.mainloop.atom.m
    return PartialStats.with_workspace(shape.m, shape.groups * shape.n, rows) if returns_stats(plan.w) else None


@dataclass(frozen=True)
class CtaState:
    """What the warps of a CTA share, whatever their roles."""

    cta: Cta  # position in the grid
    tiles: TileScheduler  # work tiles
    smem: Expr  # address of the dynamic shared memory
    pipeline: TmaPipeline  # stages of the operands
    epilogue_pipeline: TmaPipeline  # stages of the epilogue, whose barriers are used with a residual
    stage: PipelineState  # stage of the operands that a thread fills or reads next
    epilogue_stage: PipelineState  # stage of the epilogue that a thread fills or reads next
    # Turns of the warpgroups in ping-pong; None if all warpgroups share a work tile.
    order: OrderedSequenceBarrier | None
    # Tiles of the last wave, if CTAs divide their k-tiles or their channels; they follow `tiles` then.
    last_wave: SplitLastWave | None
    narrow: NarrowLastWave | None


def allocate_state(
    plan: KernelPlan, cta: Cta, last_wave: SplitLastWave | None, narrow: NarrowLastWave | None
) -> CtaState:
    """Allocate shared memory, and the registers that say where a thread is in the pipelines."""
    w, config = plan.w, plan.config
    smem = broadcast_to_warp(allocate_smem(int(config.dynamic_smem_bytes(w)), SWIZZLE_ALIGNMENT_BYTES))
    pipeline, epilogue_pipeline = plan.make_pipelines(smem, cta.cluster)
    stage = PipelineState("mainloop", config.stages)
    epilogue_stage = PipelineState("epilogue", plan.epilogue_tile.stages)
    order = None
    if config.is_pingpong:
        warpgroups = int(config.warpgroups)
        first_barrier = int(config.num_barriers(w)) - (warpgroups + int(config.keeps_filters))
        barriers = pipeline.barriers + to_uint32(first_barrier * BARRIER_BYTES)
        order = OrderedSequenceBarrier(barriers, cta.thread, warpgroups)
    divided = last_wave or narrow
    tiles = divided.whole_waves if divided else plan.tiles(cta.cluster)
    return CtaState(cta, tiles, smem, pipeline, epilogue_pipeline, stage, epilogue_stage, order, last_wave, narrow)


def list_barrier_owners(plan: KernelPlan, state: CtaState) -> list[BarrierOwner]:
    """Return what has barriers, in the order in which they are initialized."""
    owners: list[BarrierOwner] = [state.pipeline]
    if plan.loads_residual:
        owners.append(state.epilogue_pipeline)
    if state.order:
        owners.append(state.order)
    if plan.mainloop.resident_filters:
        owners.append(plan.mainloop.resident_filters)
    return owners


def make_epilogue(
    plan: KernelPlan,
    state: CtaState,
    output_maps: Sequence[Expr],
    arguments: dict[str, Buffer],
    stats: PartialStats | None,
) -> Epilogue:
    """Return the epilogue of accumulators that hold whole sums, with the per-channel arguments behind its stages."""
    w, config, shape, ops, thread = plan.w, plan.config, plan.shape, plan.ops, state.cta.thread
    address = state.smem + to_uint32(int(config.mainloop_smem_bytes() + config.epilogue_smem_bytes(w)))
    is_exact = shape.n % config.block_n == 0 and config.cluster_n == 1
    width = 4 if plan.epilogue_tile.interleaved else 2
    channels = ChannelArguments(
        ops.channel_args, arguments, config.block_n, shape.n, is_exact, address, thread.warpgroup, width
    )
    layers = plan.epilogue_tile, ops, channels, state.epilogue_pipeline
    if plan.problem.has_filter_rows:
        assert isinstance(plan.epilogue_tile, FilterRowsEpilogueTile)
        warpgroup = 0 if config.is_pingpong else thread.warpgroup
        filters = FilterArguments(
            ops.channel_args, arguments, plan.epilogue_tile, shape.m, plan.has_exact_tiles[0], warpgroup
        )
        return FilterRowsEpilogue(plan.epilogue_tile, ops, filters, state.epilogue_pipeline, output_maps)
    if plan.channels_first_output:
        return ChannelsFirstEpilogue(*layers, arguments, plan.channels_first_output, plan.has_exact_tiles)
    if plan.problem.residues and shape.residues > 1:
        return ScatterEpilogue(*layers, arguments, plan.problem.residues, shape, plan.has_exact_tiles[1])
    subtile_stats = SubtileStats(stats, plan.epilogue_tile, shape.n, is_exact) if stats else None
    return TmaEpilogue(*layers, output_maps, subtile_stats)


def make_narrow_epilogue(
    plan: KernelPlan,
    narrow_plan: KernelPlan,
    state: CtaState,
    output_maps: Sequence[Expr],
    arguments: dict[str, Buffer],
) -> TmaEpilogue:
    """Return the epilogue of narrower tiles, in the shared memory that a warpgroup has for others."""
    w, config, ops, thread = plan.w, plan.config, plan.ops, state.cta.thread
    block_n = int(narrow_plan.config.block_n)
    # Each warpgroup's arguments are where those of the wider tiles are, which the other one may still read.
    unused_bytes = len(ops.channel_args) * int(config.block_n - block_n) * ACCUMULATOR_BYTES
    offset = int(config.mainloop_smem_bytes() + config.epilogue_smem_bytes(w)) + thread.warpgroup * unused_bytes
    address, is_exact = state.smem + to_uint32(offset), plan.shape.n % block_n == 0
    channels = ChannelArguments(
        ops.channel_args, arguments, block_n, plan.shape.n, is_exact, address, thread.warpgroup, 2
    )
    return TmaEpilogue(narrow_plan.epilogue_tile, ops, channels, state.epilogue_pipeline, output_maps)


def make_narrow_pipeline(narrow_plan: KernelPlan, state: CtaState) -> TmaPipeline:
    """Return the stages of the operands, with the bytes that narrower tiles have in them."""
    a, b = narrow_plan.mainloop.a, narrow_plan.mainloop.b
    tx_bytes = a.copies * a.copy_rows * a.layout.row_bytes * a.layout.boxes + b.layout.nbytes
    return replace(state.pipeline, tx_bytes=tx_bytes)


def emit_narrow_consumer(
    narrow_plan: KernelPlan, state: CtaState, epilogue: TmaEpilogue, narrow_epilogue: TmaEpilogue
) -> None:
    """Multiply and store the narrower tile of a CTA; run by all threads of a consumer warpgroup."""
    mainloop, cta, thread, order, narrow = narrow_plan.mainloop, state.cta, state.cta.thread, state.order, state.narrow
    assert narrow
    turn = state.tiles.tiles_per_cta % order.num_warpgroups if order else None
    pipeline, warpgroup = make_narrow_pipeline(narrow_plan, state), 0 if order else thread.warpgroup
    with if_(True if turn is None else thread.warpgroup == turn), narrow.open_tile(cta.index) as tile:
        narrow_epilogue.channels.prefetch(tile, thread)
        k_range, accumulators = narrow_plan.k_range(cta.split, 0), narrow_plan.allocate_accumulators()
        descriptors = MatrixDescriptor("narrow_a", mainloop.a.layout), MatrixDescriptor("narrow_b", mainloop.b.layout)
        mainloop.consume(accumulators, descriptors, k_range, pipeline, state.stage, thread, warpgroup, order)
        epilogue.finish(thread)  # the subtiles of the other tiles have another size
        narrow_epilogue.store(mainloop.sums(accumulators, k_range), tile, state.epilogue_stage, thread, warpgroup)
        narrow_epilogue.finish(thread)


def emit_narrow_loader(narrow_plan: KernelPlan, state: CtaState, operand_maps: Sequence[Expr]) -> None:
    """Load the operands of the narrower tile of a CTA; run by one thread."""
    assert state.narrow
    with state.narrow.open_tile(state.cta.index) as tile:
        k_range = narrow_plan.k_range(state.cta.split, 0)
        pipeline = make_narrow_pipeline(narrow_plan, state)
        narrow_plan.mainloop.produce(tile, k_range, operand_maps, pipeline, state.stage, make_tap_iterator(narrow_plan))


def emit_consumer(plan: KernelPlan, state: CtaState, accumulators: Accumulators, epilogue: Epilogue | None) -> None:
    """Multiply and store work tiles; run by all threads of a consumer warpgroup.

    In ping-pong, warpgroup i of n computes every n-th work tile from the i-th on, and skips the stages of the others.
    The sums of a part of the last wave go to the workspace.
    """
    mainloop, cta, thread, order = plan.mainloop, state.cta, state.cta.thread, state.order
    descriptors = MatrixDescriptor("a", mainloop.a.layout), MatrixDescriptor("b", mainloop.b.layout)
    first, step, warpgroup = (thread.warpgroup, order.num_warpgroups, 0) if order else (0, 1, thread.warpgroup)
    zeros_epilogue = epilogue if isinstance(epilogue, ScatterEpilogue) and epilogue.stores_zeros else None

    if plan.config.k_slices > 1:
        warpgroup = thread.warpgroup % plan.config.warpgroups_per_tile
        state.stage.skip(thread.warpgroup // plan.config.warpgroups_per_tile)

    def multiply(k_range: KRange | ResidueKRange | SlicedKRange) -> None:
        mainloop.consume(accumulators, descriptors, k_range, state.pipeline, state.stage, thread, warpgroup, order)

    if mainloop.resident_filters:
        mainloop.resident_filters.consumer_wait()
    if order:
        with if_(thread.warpgroup > 0):
            count = plan.k_range(cta.split, state.tiles.tile_at(cta.index).residue).count
            state.stage.skip(count if order.num_warpgroups == 2 else count * thread.warpgroup)
    with state.tiles.work_tiles(cta.index, first, step) as tile:
        if epilogue:
            epilogue.channels.prefetch(tile, thread)
        k_range = plan.consumer_k_range(cta.split, tile.residue, thread)
        if zeros_epilogue:
            with if_(k_range.count == 0):  # before this warpgroup's turn, while the other one multiplies
                zeros_epilogue.store_zeros(tile, thread, warpgroup)
        multiply(k_range)
        if order:
            state.stage.skip(plan.k_range(cta.split, tile.next_residue).count * (order.num_warpgroups - 1))
        if zeros_epilogue:
            with if_(k_range.count > 0):
                zeros_epilogue.store(accumulators.list_sums(), tile, state.epilogue_stage, thread, warpgroup)
        elif epilogue:
            epilogue.store(mainloop.sums(accumulators, k_range), tile, state.epilogue_stage, thread, warpgroup)
    if last_wave := state.last_wave:
        turn = state.tiles.tiles_per_cta % order.num_warpgroups if order else None
        with if_(True if turn is None else thread.warpgroup == turn), last_wave.open_part(cta.index) as (_, k_range):
            multiply(k_range)
            sums = accumulators.list_sums()
            last_wave.store_partial_sums(sums, mainloop.atom, mainloop.m_atoms, cta.index, thread, warpgroup)
    if epilogue:
        epilogue.finish(thread)


def emit_operand_loader(plan: KernelPlan, state: CtaState, operand_maps: Sequence[Expr]) -> None:
    """Load the operands of all work tiles; run by one thread."""
    mainloop, cta, k = plan.mainloop, state.cta, make_tap_iterator(plan)
    if mainloop.resident_filters:
        _, filter_map = operand_maps
        mainloop.load_resident_filters(state.tiles.tile_at(cta.index), filter_map, k)
    with state.tiles.work_tiles(cta.index) as tile:
        mainloop.produce(tile, plan.k_range(cta.split, tile.residue), operand_maps, state.pipeline, state.stage, k)
    if state.last_wave:
        with state.last_wave.open_part(cta.index) as (tile, k_range):
            mainloop.produce(tile, k_range, operand_maps, state.pipeline, state.stage, k)


def emit_gather_loader(plan: KernelPlan, state: CtaState, operand_maps: Sequence[Expr], source: Buffer) -> None:
    """Load the operands of all work tiles, X by cp.async; run by all threads that load."""
    mainloop, cta, pipeline = plan.mainloop, state.cta, state.pipeline
    assert isinstance(pipeline, AsyncPipeline)
    assert isinstance(mainloop.a, MnMajorTile)
    gather = PlaneGather(plan.w, mainloop.a, source, cta.thread.thread - plan.roles.consumer_threads)
    arrivals, k, (filter_map,) = PendingArrivals(pipeline, 2), make_tap_iterator(plan), operand_maps
    with state.tiles.work_tiles(cta.index) as tile:  # a warpgroup releases a stage when it has seen the next one full
        k_range = plan.k_range(cta.split, tile.residue)
        produce_by_gather(gather, mainloop, tile, k_range, filter_map, pipeline, state.stage, arrivals, k)
    arrivals.drain()


def make_tap_iterator(plan: KernelPlan) -> TapIterator:
    """Return the iterator over the K tiles of a work tile."""
    tiles_per_tap = int(plan.config.k_tiles_per_tap(plan.shape))
    return plan.problem.iterate_taps(tiles_per_tap, plan.mainloop.block_k, int(plan.config.split_k))


def make_residual_loaders(plan: KernelPlan, state: CtaState, epilogue: TmaEpilogue) -> list[Callable[[], None]]:
    """Return what loads the residual of work tiles; in ping-pong each warpgroup has a thread that loads its tiles."""
    residual_warps = plan.roles.residual_warps

    def emit_loader(first: int) -> None:
        with state.tiles.work_tiles(state.cta.index, first, residual_warps) as tile:
            epilogue.load_residual(tile, state.epilogue_stage, first_warpgroup=first)

    return [functools.partial(emit_loader, i) for i in range(residual_warps)]
