"""Kernel of `hopper`: warp-specialized, persistent implicit GEMM, composed from the layers of `..gemm`.

Source: CUTLASS, `include/cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp` and
`sm90_gemm_tma_warpspecialized_pingpong.hpp`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import round_up
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    declare_tensor_map,
    emit_alternatives,
    emit_call,
    emit_ptx,
    if_,
    to_uint32,
)
from ..gemm.atoms import Major, ThreadPosition, WgmmaAtom, setmaxnreg
from ..gemm.channel_arguments import ChannelArguments
from ..gemm.channels_first_epilogue import ChannelsFirstEpilogue, ChannelsFirstOutput
from ..gemm.cluster_reduction import ClusterReduction
from ..gemm.cta import Cta, allocate_smem, open_cta
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.last_wave import SplitLastWave
from ..gemm.pipelines import BARRIER_BYTES, OrderedSequenceBarrier, PipelineState, TmaPipeline, fence_barrier_init
from ..gemm.problem import ConvProblem, Operand, make_fprop
from ..gemm.residue_classes import ResidueClasses
from ..gemm.residue_epilogue import ResidueEpilogue
from ..gemm.smem_layout import MAX_SWIZZLE_BYTES, SWIZZLE_ALIGNMENT_BYTES, MatrixDescriptor, SmemLayout
from ..gemm.tile_scheduler import SINGLE_CTA, Cluster, KRange, ResidueKRange, TileScheduler
from ..gemm.tma import prefetch_tensor_maps, tma_store_wait
from ..gemm.tma_epilogue import EpilogueTile, TmaEpilogue
from ..gemm.wgmma_mainloop import MnMajorTile, OperandTile, WgmmaMainloop
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from .tile_config import REALLOCATED_REGISTERS, HopperTileConfig


@dataclass(frozen=True)
class ChannelsFirstAccess:
    """Which arrays the kernel accesses as they are, channels first; all others are channels last.

    Attributes:
        input_box_pixels: Pixels of X per box of TMA, which divide those of an image; 0 if X is channels last.
        output: The output and residuals; None if these are channels last.
    """

    input_box_pixels: int = 0
    output: ChannelsFirstOutput | None = None


CHANNELS_LAST_ACCESS = ChannelsFirstAccess()


MakeProblem = Callable[[Conv, int, bool, bool], ConvProblem]  # `make_fprop`, or another row of the problem table


def make_mainloop(
    problem: ConvProblem, w: Conv, config: HopperTileConfig, access: ChannelsFirstAccess
) -> WgmmaMainloop:
    """Return the mainloop: the layout of a stage, and the copies that fill it."""
    atom = WgmmaAtom(config.block_n, problem.a.dtype, problem.b.dtype, problem.a.major, problem.b.major)
    row_bytes = int(config.swizzle_bytes)
    block_m, rows_per_atom, shares_taps = config.block_m, int(config.smem_rows_per_wgmma), config.taps_per_copy > 1
    num_atoms, boxes_per_tap, box_channels = (
        block_m // atom.m,
        config.block_k_bytes // row_bytes,
        row_bytes // atom.itemsize,
    )
    a_layout = SmemLayout(num_atoms * rows_per_atom, row_bytes, boxes_per_tap)
    a = OperandTile(
        problem.a,
        a_layout,
        0,
        box_channels,
        boxes_per_tap,
        copy_rows=atom.m + config.halo_width if shares_taps else block_m // config.cluster_n,
        copies=num_atoms if shares_taps else 1,
        rows_between_copies=atom.m,
    )
    if access.input_box_pixels:
        block_k, box_bytes = config.block_k(atom.itemsize), access.input_box_pixels * atom.itemsize
        a_layout = SmemLayout(block_k, box_bytes, block_m // access.input_box_pixels, problem.a.major)
        a = MnMajorTile(problem.a, a_layout, 0, block_k, a_layout.boxes, copy_rows=block_k)
    elif problem.a.major is Major.MN:
        a = make_mn_major_tile(problem.a, block_m, config.cluster_n, config, atom.itemsize)
    b_layout = SmemLayout(config.block_n, row_bytes, boxes_per_tap * config.taps_per_copy)
    b = OperandTile(
        problem.b, b_layout, a_layout.nbytes, box_channels, boxes_per_tap, config.block_n // config.cluster_m
    )
    if problem.b.major is Major.MN:
        b = make_mn_major_tile(
            problem.b, config.block_n, config.cluster_m, config, atom.itemsize, offset=a.layout.nbytes
        )
    return WgmmaMainloop(
        atom,
        config.wgmma_m_tiles,
        rows_per_atom,
        a=a,
        b=b,
        block_k=config.block_k(atom.itemsize),
        taps_per_copy=config.taps_per_copy,
        rows_per_tap=w.dilation[-1] if shares_taps else 0,
    )


def make_mn_major_tile(
    operand: Operand, rows: int, num_slices: int, config: HopperTileConfig, itemsize: int, offset: int = 0
) -> MnMajorTile:
    """Return the tile of an MN-major operand, in boxes as wide as a swizzle, shared by CTAs that load slices."""
    block_k, box_bytes = config.block_k(itemsize), math.gcd(rows * itemsize, MAX_SWIZZLE_BYTES)
    box_bytes = math.gcd(box_bytes, operand.contiguous_rows * itemsize)
    boxes, copy_rows = rows * itemsize // box_bytes, block_k // num_slices
    layout = SmemLayout(block_k * config.taps_per_copy, box_bytes, boxes, Major.MN)
    return MnMajorTile(operand, layout, offset, block_k, boxes, copy_rows, taps_per_copy=config.taps_per_copy)


def make_epilogue_tile(atom: WgmmaAtom, w: Conv, config: HopperTileConfig) -> EpilogueTile:
    """Return the division of a warpgroup's accumulators into subtiles, which TMA stores."""
    dtype = w.argument_dtypes[-1]
    row_bytes, stages = int(config.epilogue_row_bytes(get_itemsize(dtype))), int(config.epilogue_stages(w))
    return EpilogueTile(atom, config.wgmma_m_tiles, config.warpgroups_per_tile, dtype, row_bytes, stages)


def make_reduction(mainloop: WgmmaMainloop, problem: ConvProblem, config: HopperTileConfig) -> ClusterReduction:
    """Return the reduction of partial sums, which also stores what TMA cannot store."""
    shape = problem.shape
    num_threads, rows_per_cta = config.warpgroups * WARPGROUP_SIZE, int(config.reduce_rows_per_cta)
    tile = mainloop.atom, mainloop.m_atoms, config.block_m, rows_per_cta
    vector = math.gcd(shape.n, VECTOR_BYTES // ACCUMULATOR_BYTES)
    return ClusterReduction(shape, *tile, config.split_k, num_threads, vector, problem.residues)


@dataclass(frozen=True)
class WarpRoles:
    """What the warps of a CTA do: consumer warpgroups come first, then a warp for operands, then those for a residual.

    Attributes:
        consumer_warpgroups: Warpgroups that multiply and store.
        residual_warps: Warps that load a residual: one for each work tile that is computed at a time.
        registers: Registers per thread of producers and of consumers, which are moved between whole warpgroups; None
            leaves all threads the same number.
    """

    consumer_warpgroups: int
    residual_warps: int
    registers: tuple[int, int] | None

    @property
    def consumer_threads(self) -> int:
        """Number of consumer threads."""
        return self.consumer_warpgroups * WARPGROUP_SIZE

    @property
    def producer_warp(self) -> int:
        """Warp that loads operands."""
        return self.consumer_threads // WARP_SIZE

    @property
    def num_threads(self) -> int:
        """Threads per CTA."""
        num_threads = self.consumer_threads + WARP_SIZE * (1 + self.residual_warps)
        return round_up(num_threads, WARPGROUP_SIZE) if self.registers else num_threads

    @contextmanager
    def consumers(self, thread: ThreadPosition) -> Iterator[None]:
        """Open the branch of the consumer warpgroups."""
        with if_(thread.warp < self.producer_warp):
            if self.registers:
                setmaxnreg("inc", self.registers[1])
            yield

    def emit_producers(self, thread: ThreadPosition, loaders: Sequence[Callable[[], None]]) -> None:
        """Emit what the first thread of each producer warp runs."""
        branches = [(thread.is_first_of_warp(self.producer_warp + i), loader) for i, loader in enumerate(loaders)]
        if not self.registers:
            for branch in branches:
                emit_alternatives([branch])
            return
        with if_(thread.warp >= self.producer_warp):
            setmaxnreg("dec", self.registers[0])
            emit_alternatives(branches)


def make_warp_roles(config: HopperTileConfig, loads_residual: bool) -> WarpRoles:
    """Return the roles of warps."""
    residual_warps = config.warpgroups // config.warpgroups_per_tile if loads_residual else 0
    registers = REALLOCATED_REGISTERS[config.warpgroups] if config.reallocates_registers else None
    return WarpRoles(config.warpgroups, residual_warps, registers)


@dataclass(frozen=True)
class CtaState:
    """What the warps of a CTA share, whatever their roles.

    Attributes:
        cta: Position in the grid.
        tiles: Work tiles.
        k_ranges: Function that returns the K tiles of a work tile of a residue class.
        pipeline: Stages of the operands.
        state: Stage that a thread fills or reads next.
        epilogue_state: Stage of the epilogue that a thread fills or reads next.
        order: Turns of two warpgroups in ping-pong; None if all warpgroups share a work tile.
        last_wave: Tiles of the last wave, if CTAs divide them; they follow `tiles` then.
    """

    cta: Cta
    tiles: TileScheduler
    k_ranges: Callable[[Expr], KRange | ResidueKRange]
    pipeline: TmaPipeline
    state: PipelineState
    epilogue_state: PipelineState
    order: OrderedSequenceBarrier | None
    last_wave: SplitLastWave | None = None


Epilogue = TmaEpilogue | ChannelsFirstEpilogue


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
        access: Arrays that are channels first. The config does not split the reduction if the output is one of them.
        make_problem: Function that returns the product of `w`.
    """
    rows_per_copy, shares_taps = config.block_m // config.cluster_n, config.taps_per_copy > 1
    problem = make_problem(w, rows_per_copy, shares_taps, access.input_box_pixels > 0)
    ops = EpilogueOps.from_workload(w)
    shape, mainloop = problem.shape, make_mainloop(problem, w, config, access)
    stores_accumulators = access.output is None and not config.uses_smem_reduction(w)
    stores_by_tma = stores_accumulators and shape.residues == 1
    residuals = ops.residuals if stores_by_tma else []
    operand_maps = (declare_operand_map(mainloop.a, arguments), declare_operand_map(mainloop.b, arguments))
    epilogue_tile = make_epilogue_tile(mainloop.atom, w, config)
    output_map = epilogue_tile.tensor_map(shape.m, shape.n, shape.groups)
    output_names = [problem.c, *residuals] if stores_by_tma else []
    output_maps = [declare_tensor_map(f"{name}_map", arguments[name], output_map) for name in output_names]
    roles, num_ctas = make_warp_roles(config, bool(residuals)), int(config.num_ctas(w)) // config.split_k
    last_wave = make_last_wave(problem, config, num_ctas)

    split_k, cluster_shape = int(config.split_k), (config.cluster_m, config.cluster_n)
    with open_cta(
        num_ctas, roles.num_threads, split_k, splits_in_cluster=split_k > 1, cluster_shape=cluster_shape
    ) as cta:
        thread, smem = cta.thread, allocate_smem(int(config.dynamic_smem_bytes(w)), SWIZZLE_ALIGNMENT_BYTES)
        pipeline, epilogue_pipeline = make_pipelines(mainloop, epilogue_tile, w, config, smem, cta.cluster)
        shared = make_cta_state(cta, problem, w, config, num_ctas, pipeline, epilogue_tile, last_wave)
        pipelines = [pipeline, epilogue_pipeline] if residuals else [pipeline]
        emit_prologue(pipelines, shared.order, (*operand_maps, *output_maps[::-1]), thread, roles.consumer_threads)
        accumulators = allocate("accumulators", mainloop.num_accumulators, "float32")
        epilogue: Epilogue | None = None
        if stores_accumulators or access.output:
            channels = make_channel_arguments(ops, shape, w, config, arguments, smem, thread)
            layers = epilogue_tile, ops, channels, epilogue_pipeline
            if access.output:
                epilogue = make_channels_first_epilogue(*layers, access.output, shape, config, arguments)
            elif problem.residues and shape.residues > 1:
                epilogue = make_residue_epilogue(*layers, problem.residues, shape, config, arguments)
            else:
                epilogue = TmaEpilogue(epilogue_tile, ops, channels, output_maps, epilogue_pipeline)

        with roles.consumers(thread):
            emit_consumer(shared, mainloop, accumulators, epilogue)
        loaders = [lambda: emit_operand_loader(shared, mainloop, operand_maps, problem, config)]
        if isinstance(epilogue, TmaEpilogue) and stores_by_tma:
            loaders += make_residual_loaders(shared, roles, epilogue)
        roles.emit_producers(thread, loaders)
        if not epilogue:
            reduction, tile = make_reduction(mainloop, problem, config), shared.tiles.tile_at(cta.index)
            sums = select_sums(accumulators, mainloop.num_accumulators, shared.k_ranges(tile.residue))
            reduction.reduce_and_store(sums, tile, cta.split, thread, smem, ops, arguments)
        elif cta.cluster.size > 1:  # a CTA must not exit before the others stop writing to its shared memory
            emit_call(T.cuda.cluster_sync())
    if last_wave:
        last_wave.emit_reduction(shape, ops, arguments)


def emit_consumer(shared: CtaState, mainloop: WgmmaMainloop, accumulators: Buffer, epilogue: Epilogue | None) -> None:
    """Multiply and store work tiles; run by all threads of a consumer warpgroup.

    In ping-pong, warpgroup i computes every second work tile from the i-th on, and skips the stages of the others. The
    sums of a part of the last wave go to the workspace.
    """
    thread, state, order = shared.cta.thread, shared.state, shared.order
    descriptors = MatrixDescriptor("a", mainloop.a.layout), MatrixDescriptor("b", mainloop.b.layout)
    first, step, warpgroup = (thread.warpgroup, order.num_warpgroups, 0) if order else (0, 1, thread.warpgroup)
    if order:
        with if_(thread.warpgroup > 0):
            state.skip(shared.k_ranges(shared.tiles.tile_at(shared.cta.index).residue).count)
    with shared.tiles.work_tiles(shared.cta.index, first, step) as tile:
        if epilogue:
            epilogue.channels.prefetch(tile, thread)
        k_range = shared.k_ranges(tile.residue)
        sums = select_sums(accumulators, mainloop.num_accumulators, k_range)
        with if_(k_range.count > 0 if k_range.may_be_empty else True):
            mainloop.consume(accumulators, descriptors, k_range, shared.pipeline, state, thread, warpgroup, order)
        if order and k_range.may_be_empty:
            with if_(k_range.count == 0):
                order.wait()
                order.arrive()
        if order:
            state.skip(shared.k_ranges(tile.next_residue).count)
        if epilogue:
            epilogue.store(sums, tile, shared.epilogue_state, thread, warpgroup)
    if last_wave := shared.last_wave:
        turn = shared.tiles.tiles_per_cta % order.num_warpgroups if order else None
        atom, m_atoms, cta_idx = mainloop.atom, mainloop.m_atoms, shared.cta.index
        with if_(True if turn is None else thread.warpgroup == turn), last_wave.open_part(cta_idx) as (_, k_range):
            mainloop.consume(accumulators, descriptors, k_range, shared.pipeline, state, thread, warpgroup, order)
            last_wave.store_partial_sums(accumulators, atom, m_atoms, cta_idx, thread, warpgroup)
    if isinstance(epilogue, TmaEpilogue) and not isinstance(epilogue, ResidueEpilogue):
        with if_(thread.is_warpgroup_leader):  # TMA reads shared memory until here
            tma_store_wait(0)


def select_sums(accumulators: Buffer, count: int, k_range: KRange | ResidueKRange) -> Sequence[Expr]:
    """Return the sums of a work tile, which are zeros if it has no K tiles.

    Zeros are not stored to accumulators: ptxas would let each wgmma wait for the one before (warning C7510).
    """
    sums = [accumulators[i] for i in range(count)]
    return [T.Select(k_range.count > 0, each, T.float32(0)) for each in sums] if k_range.may_be_empty else sums


def emit_operand_loader(
    shared: CtaState,
    mainloop: WgmmaMainloop,
    operand_maps: tuple[Expr, Expr],
    problem: ConvProblem,
    config: HopperTileConfig,
) -> None:
    """Load the operands of all work tiles; run by one thread."""
    k = problem.iterate_taps(int(config.k_tiles_per_tap(problem.shape)), mainloop.block_k, int(config.split_k))
    with shared.tiles.work_tiles(shared.cta.index) as tile:
        mainloop.produce(tile, shared.k_ranges(tile.residue), operand_maps, shared.pipeline, shared.state, k)
    if shared.last_wave:
        with shared.last_wave.open_part(shared.cta.index) as (tile, k_range):
            mainloop.produce(tile, k_range, operand_maps, shared.pipeline, shared.state, k)


def make_residual_loaders(shared: CtaState, roles: WarpRoles, epilogue: TmaEpilogue) -> list[Callable[[], None]]:
    """Return what loads the residual of work tiles; in ping-pong each warpgroup has a thread that loads its tiles."""

    def emit_loader(first: int) -> None:
        with shared.tiles.work_tiles(shared.cta.index, first, roles.residual_warps) as tile:
            epilogue.load_residual(tile, shared.epilogue_state, first_warpgroup=first)

    return [functools.partial(emit_loader, i) for i in range(roles.residual_warps)]


def make_pipelines(
    mainloop: WgmmaMainloop,
    epilogue_tile: EpilogueTile,
    w: Conv,
    config: HopperTileConfig,
    smem: Expr,
    cluster: Cluster,
) -> tuple[TmaPipeline, TmaPipeline]:
    """Return the pipeline of the mainloop, and that of the epilogue, whose barriers are used with a residual."""
    barriers, a, b = smem + to_uint32(int(config.barrier_offset_bytes(w))), mainloop.a, mainloop.b
    a_box_bytes = a.copies * cluster.n * a.copy_rows * a.layout.row_bytes
    tx_bytes = a_box_bytes * a.layout.boxes + b.layout.nbytes
    stage_bytes = a.layout.nbytes + b.layout.nbytes
    pipeline = TmaPipeline(smem, stage_bytes, barriers, config.stages, tx_bytes, config.warpgroups_per_tile, cluster)
    epilogue_bytes = epilogue_tile.layout.nbytes
    epilogue_pipeline = TmaPipeline(
        smem + to_uint32(int(config.mainloop_smem_bytes())),
        round_up(epilogue_bytes, SWIZZLE_ALIGNMENT_BYTES),
        barriers,
        config.warpgroups * epilogue_tile.stages,
        epilogue_bytes,
        num_consumers=1,
        first_barrier=2 * config.stages,
    )
    return pipeline, epilogue_pipeline


def make_cta_state(
    cta: Cta,
    problem: ConvProblem,
    w: Conv,
    config: HopperTileConfig,
    num_ctas: int,
    pipeline: TmaPipeline,
    epilogue_tile: EpilogueTile,
    last_wave: SplitLastWave | None,
) -> CtaState:
    """Return what the warps share: their tiles, the pipeline, and where they are in it."""
    shape, residues = problem.shape, problem.residues
    tiles = last_wave.whole_waves if last_wave else make_tiles(problem, config, num_ctas, cta.cluster)
    tiles_per_tap = int(config.k_tiles_per_tap(shape))
    all_k_tiles = KRange(cta.split, int(config.k_tiles_per_cta(shape)), int(config.total_k_tiles(shape)))

    def k_range_of(residue: Expr) -> KRange | ResidueKRange:
        if not residues or (residues.have_equal_taps and residues.have_taps):
            return all_k_tiles
        may_be_empty = config.split_k > 1 or not residues.have_taps
        total = Register("total_k_tiles", value=residues.num_taps(residue) * tiles_per_tap).value
        return ResidueKRange(cta.split, int(config.split_k), total, may_be_empty)

    state, epilogue_state = PipelineState("mainloop", config.stages), PipelineState("epilogue", epilogue_tile.stages)
    order = None
    if config.is_pingpong:
        first_barrier = int(config.num_barriers(w)) - OrderedSequenceBarrier.num_warpgroups
        order = OrderedSequenceBarrier(pipeline.barriers + to_uint32(first_barrier * BARRIER_BYTES), cta.thread)
    return CtaState(cta, tiles, k_range_of, pipeline, state, epilogue_state, order, last_wave)


def make_tiles(
    problem: ConvProblem, config: HopperTileConfig, num_ctas: int, cluster: Cluster = SINGLE_CTA
) -> TileScheduler:
    """Return the scheduler of all work tiles."""
    shape, residues = problem.shape, problem.residues
    extents, block = (shape.m, shape.n), (config.block_m, config.block_n)
    classes = (residues.count, not residues.have_equal_taps) if residues else ()
    return TileScheduler.of_product(extents, block, shape.groups, num_ctas, cluster, config.raster_order, *classes)


def make_last_wave(problem: ConvProblem, config: HopperTileConfig, num_ctas: int) -> SplitLastWave | None:
    """Return the tiles of the last wave if CTAs divide them; no CTAs form a cluster then."""
    if not config.splits_last_wave:
        return None
    shape = problem.shape
    parts, total_k_tiles = int(config.last_wave_parts(shape)), int(config.total_k_tiles(shape))
    return SplitLastWave.with_workspace(make_tiles(problem, config, num_ctas), parts, total_k_tiles)


def make_channels_first_epilogue(
    epilogue_tile: EpilogueTile,
    ops: EpilogueOps,
    channels: ChannelArguments,
    pipeline: TmaPipeline,
    output: ChannelsFirstOutput,
    shape: ImplicitGemmShape,
    config: HopperTileConfig,
    arguments: dict[str, Buffer],
) -> ChannelsFirstEpilogue:
    """Return the epilogue of a channels-first output, which uses the buffers of the epilogue's pipeline."""
    is_exact = (
        shape.m % (config.block_m * config.cluster_m) == 0,
        shape.n % (config.block_n * config.cluster_n) == 0,
    )
    smem = pipeline.buffers, pipeline.stage_bytes
    return ChannelsFirstEpilogue(epilogue_tile, output, ops, channels, arguments, *smem, is_exact)


def make_residue_epilogue(
    epilogue_tile: EpilogueTile,
    ops: EpilogueOps,
    channels: ChannelArguments,
    pipeline: TmaPipeline,
    residues: ResidueClasses,
    shape: ImplicitGemmShape,
    config: HopperTileConfig,
    arguments: dict[str, Buffer],
) -> ResidueEpilogue:
    """Return the epilogue of a strided dgrad, which uses the buffers of the epilogue's pipeline."""
    arrays = [arguments[name] for name in ("Y", *ops.residuals)]
    is_exact = shape.n % (config.block_n * config.cluster_n) == 0
    columns = shape.n, shape.groups * shape.n
    return ResidueEpilogue(epilogue_tile, ops, channels, arrays, pipeline, residues, columns, is_exact)


def make_channel_arguments(
    ops: EpilogueOps,
    shape: ImplicitGemmShape,
    w: Conv,
    config: HopperTileConfig,
    arguments: dict[str, Buffer],
    smem: Expr,
    thread: ThreadPosition,
) -> ChannelArguments:
    """Return the per-channel arguments, of which each warpgroup has a copy behind the epilogue's stages."""
    address = smem + to_uint32(int(config.mainloop_smem_bytes() + config.epilogue_smem_bytes(w)))
    is_exact = shape.n % config.block_n == 0 and config.cluster_n == 1
    return ChannelArguments(ops.channel_args, arguments, config.block_n, shape.n, is_exact, address, thread.warpgroup)


def declare_operand_map(tile: OperandTile, arguments: dict[str, Buffer]) -> Expr:
    """Declare the tensor map of an operand."""
    return declare_tensor_map(f"{tile.operand.tensor}_map", arguments[tile.operand.tensor], tile.tensor_map())


def emit_prologue(
    pipelines: list[TmaPipeline],
    order: OrderedSequenceBarrier | None,
    tensor_maps: Sequence[Expr],
    thread: ThreadPosition,
    prefetching_thread: int,
) -> None:
    """Initialize the barriers and wait for the results of the previous launch."""
    with if_(thread.thread == prefetching_thread):  # the producer prefetches during the initialization
        prefetch_tensor_maps(tensor_maps)
    with if_(thread.thread == 0):
        for pipeline in pipelines:
            pipeline.init_barriers()
        if order:
            order.init_barriers()
        fence_barrier_init()
    emit_call(T.cuda.cluster_sync() if pipelines[0].cluster.size > 1 else T.cuda.cta_sync())
    emit_ptx("griddepcontrol.wait")
    emit_ptx("griddepcontrol.launch_dependents")
