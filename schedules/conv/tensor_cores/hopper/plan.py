"""Layers of a `hopper` kernel: what a workload and a tile config choose before the kernel allocates anything.

A plan has what CUTLASS's collective builders choose: the problem with its loaders, the mainloop with the layouts of a
stage, the subtiles of the epilogue, the roles of warps, the work tiles, and how partial sums are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from tvmconv.arithmetic import round_up
from tvmconv.target import WARPGROUP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Expr, Register, allocate, to_uint32
from ..gemm.accumulators import Accumulators
from ..gemm.atoms import Major, ThreadPosition, WgmmaAtom
from ..gemm.channels_first_epilogue import ChannelsFirstOutput
from ..gemm.cluster_reduction import ClusterReduction
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.epilogue_tile import EpilogueTile
from ..gemm.filter_rows_epilogue import FilterRowsEpilogueTile
from ..gemm.pipelines import BARRIER_BYTES, AsyncPipeline, TmaPipeline
from ..gemm.plane_gather import NUM_GATHER_THREADS, NUM_GATHER_WARPS
from ..gemm.problem import ConvProblem, Operand, make_fprop
from ..gemm.resident_filters import ResidentFilters
from ..gemm.smem_layout import MAX_SWIZZLE_BYTES, SWIZZLE_ALIGNMENT_BYTES, SmemLayout
from ..gemm.tap_columns import TapColumnReduction
from ..gemm.tile_reduction import TileReduction
from ..gemm.tile_scheduler import SINGLE_CTA, Cluster, KRange, ResidueKRange, SlicedKRange, TileScheduler
from ..gemm.tma_loaders import INTERLEAVED_FILTERS, ChannelsFirstPixels, FilterMatrix, InterleavedFilters
from ..gemm.warp_roles import WarpRoles
from ..gemm.wgmma_mainloop import MnMajorTile, OperandTile, WgmmaMainloop
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from .tile_config import FIRST, REALLOCATED_REGISTERS, HopperTileConfig
from .tma_requirements import pad_lines


@dataclass(frozen=True)
class ChannelsFirstAccess:
    """Which arrays the kernel accesses as they are, channels first; all others are channels last."""

    # Pixels of X per box of shared memory; 0 if X is channels last. If TMA copies boxes, they divide the pixels of an
    # image.
    input_box_pixels: int = 0
    input_pixels: int = 0  # pixels of an image of X, if the product has rows of zeros behind them; 0 if it has none
    output: ChannelsFirstOutput | None = None  # the output and residuals; None if these are channels last


CHANNELS_LAST_ACCESS = ChannelsFirstAccess()

MakeProblem = Callable[[Conv, int, bool, int], ConvProblem]  # `make_fprop`, or another row of the problem table


@dataclass(frozen=True)
class KernelPlan:
    """The layers of a kernel."""

    w: Conv  # the convolution, as TMA views it
    config: HopperTileConfig
    problem: ConvProblem  # the product: which tensors are its operands, and how TMA loads them
    mainloop: WgmmaMainloop  # the instruction, the layout of a stage, and the copies that fill it
    ops: EpilogueOps  # operations of the epilogue
    # Division of a warpgroup's accumulators into subtiles, which pass through shared memory.
    epilogue_tile: EpilogueTile
    channels_first_output: ChannelsFirstOutput | None  # the output, if it is channels first

    @classmethod
    def choose(
        cls,
        w: Conv,
        config: HopperTileConfig,
        access: ChannelsFirstAccess = CHANNELS_LAST_ACCESS,
        make_problem: MakeProblem = make_fprop,
    ) -> KernelPlan:
        """Choose the layers; see `emit_kernel` for the arguments."""
        line = w.output_size[-1]
        if config.pads_lines:
            w, config = pad_lines(w), replace(config, line=1, padded_line=1)
        rows_per_copy, shares_taps = config.block_m // config.cluster_n, config.taps_per_copy > 1
        problem = make_problem(w, rows_per_copy, shares_taps, access.input_box_pixels)
        if isinstance(loader := problem.a.loader, ChannelsFirstPixels) and access.input_pixels:
            problem = replace(problem, a=replace(problem.a, loader=replace(loader, pixels=access.input_pixels)))
        if is_interleaved := can_interleave_filters(w, config, problem, access):
            filters = InterleavedFilters(**vars(problem.b.loader))
            problem = replace(problem, b=replace(problem.b, loader=filters))
        mainloop, ops = make_mainloop(problem, config, w.dilation[-1]), EpilogueOps.from_workload(w)
        make_tile = FilterRowsEpilogueTile if problem.has_filter_rows else EpilogueTile
        epilogue_tile = make_epilogue_tile(mainloop.atom, w, config, problem.shape.frames, make_tile)
        epilogue_tile = replace(epilogue_tile, interleaved=is_interleaved)
        if line != w.output_size[-1]:
            epilogue_tile = replace(epilogue_tile, line=(line, w.output_size[-1]))
        return cls(w, config, problem, mainloop, ops, epilogue_tile, access.output)

    @property
    def shape(self) -> ImplicitGemmShape:
        """Extents of the product."""
        return self.problem.shape

    @cached_property
    def reduction(self) -> TileReduction | None:
        """The sum of the partial sums of a cluster, which also stores what TMA cannot store; None if there is none."""
        config, shape, mainloop = self.config, self.shape, self.mainloop
        if windows := self.problem.windows:
            num_threads = config.warpgroups * WARPGROUP_SIZE
            return TapColumnReduction(windows, mainloop.atom, mainloop.m_atoms, num_threads)
        if not config.uses_smem_reduction(self.w):
            return None
        num_threads = config.warpgroups * WARPGROUP_SIZE
        tile = mainloop.atom, mainloop.m_atoms, config.block_m, int(config.reduce_rows_per_cta)
        vector = math.gcd(shape.n, VECTOR_BYTES // ACCUMULATOR_BYTES)
        parts = config.split_k, num_threads, vector, self.problem.residues
        cluster_shape = config.cluster_m, config.cluster_n
        return ClusterReduction(
            shape, *tile, *parts, self.channels_first_output, config.k_slices, cluster_shape=cluster_shape
        )

    def allocate_accumulators(self) -> Accumulators:
        """Allocate the accumulators of a thread, and promoted sums if there are."""
        mainloop, count = self.mainloop, self.mainloop.num_accumulators
        promoted = allocate("sums", count, "float32") if mainloop.promotion_k_tiles else None
        dtypes = mainloop.atom.accumulator_dtype, self.ops.dtype
        return Accumulators.allocate(count, *dtypes, promoted, mainloop.promotion_buffers)

    @property
    def tma_outputs(self) -> list[str]:
        """Names of the output and of the residual if TMA stores and loads them; none if warps do."""
        if self.reduction or self.channels_first_output or self.shape.residues > 1:
            return []
        return [self.problem.c, *self.ops.residuals]

    @property
    def loads_residual(self) -> bool:
        """Whether TMA loads a residual."""
        return len(self.tma_outputs) > 1

    @property
    def roles(self) -> WarpRoles:
        """Roles of the warps; in ping-pong each warpgroup has a warp that loads the residual of its tiles."""
        config = self.config
        residual_warps = config.warpgroups // config.warpgroups_per_tile if self.loads_residual else 0
        registers = REALLOCATED_REGISTERS[config.warpgroups] if config.reallocates_registers else None
        return WarpRoles(config.warpgroups, residual_warps, registers, NUM_GATHER_WARPS if self.gathers_input else 1)

    @property
    def gathers_input(self) -> bool:
        """Whether threads copy operand A by cp.async instead of TMA."""
        return bool(self.config.gathers_input)

    @property
    def num_ctas(self) -> int:
        """CTAs that compute different tiles."""
        return int(self.config.num_ctas(self.w)) // self.config.split_k

    @property
    def has_exact_tiles(self) -> tuple[bool, bool]:
        """Whether the tiles of a cluster have no rows, and no columns, beyond the output."""
        config, shape, output = self.config, self.shape, self.channels_first_output
        rows, columns = config.block_m * config.cluster_m, config.block_n * config.cluster_n
        has_further_rows = output is not None and output.has_further_rows
        return shape.m % rows == 0 and not has_further_rows, shape.n % columns == 0

    def tiles(self, cluster: Cluster = SINGLE_CTA) -> TileScheduler:
        """Return the scheduler of all work tiles."""
        config, shape, residues = self.config, self.shape, self.problem.residues
        extents, block = (shape.m, shape.n), (config.block_m, config.block_n)
        classes = (residues.count, not residues.have_equal_taps) if residues else (shape.frames, False)
        return TileScheduler.of_product(
            extents, block, shape.groups, self.num_ctas, cluster, config.raster_order, *classes
        )

    def k_range(self, split: Expr, residue: Expr) -> KRange | ResidueKRange:
        """Return the K tiles of a CTA in a work tile.

        Args:
            split: Index of the CTA among those that split the reduction.
            residue: Residue class of the work tile.
        """
        config, shape, residues = self.config, self.shape, self.problem.residues
        if not residues or (residues.have_equal_taps and residues.have_taps):
            return KRange(split, int(config.k_tiles_per_cta(shape)), int(config.total_k_tiles(shape)))
        total = Register("total_k_tiles", value=residues.num_taps(residue) * int(config.k_tiles_per_tap(shape))).value
        return ResidueKRange(split, int(config.split_k), total, config.split_k > 1 or not residues.have_taps)

    def consumer_k_range(
        self, split: Expr, residue: Expr, thread: ThreadPosition
    ) -> KRange | ResidueKRange | SlicedKRange:
        """Return the K tiles that a warpgroup multiplies: all of the CTA, or those of its slice."""
        k_range, slices = self.k_range(split, residue), int(self.config.k_slices)
        if slices == 1:
            return k_range
        assert isinstance(k_range, KRange)
        return SlicedKRange(k_range, thread.warpgroup // self.config.warpgroups_per_tile, slices)

    def keep_filters(self, smem: Expr) -> KernelPlan:
        """Return the layers with the filters that a CTA keeps in shared memory, behind the stages; allocate registers.

        The barrier is the last one.
        """
        config, mainloop = self.config, self.mainloop
        if not config.keeps_filters:
            return self
        barrier = int(config.barrier_offset_bytes(self.w)) + (int(config.num_barriers(self.w)) - 1) * BARRIER_BYTES
        address = smem + to_uint32(int(config.stages * config.stage_bytes()))
        filters = ResidentFilters.allocate(
            address, smem + to_uint32(barrier), mainloop.b.layout.nbytes, int(config.total_k_tiles(self.shape))
        )
        return replace(self, mainloop=replace(mainloop, resident_filters=filters))

    def make_pipelines(self, smem: Expr, cluster: Cluster) -> tuple[TmaPipeline, TmaPipeline]:
        """Return the pipeline of the mainloop and that of the epilogue, whose stages follow one another."""
        config, a, b = self.config, self.mainloop.a, self.mainloop.b
        barriers = smem + to_uint32(int(config.barrier_offset_bytes(self.w)))
        a_box_bytes = a.copies * cluster.n * a.copy_rows * a.layout.row_bytes
        b_bytes = b.layout.nbytes
        if config.has_filter_rows:
            b_bytes = b.copies * cluster.m * b.copy_rows * b.layout.row_bytes * b.layout.boxes
        if config.keeps_filters:
            b_bytes = 0
        tx_bytes = a_box_bytes * a.layout.boxes + b_bytes
        stages = smem, int(config.stage_bytes()), barriers, config.stages
        consumers = config.warpgroups_per_tile, cluster
        pipeline = TmaPipeline(*stages, tx_bytes, *consumers)
        if self.gathers_input:
            num_producers = NUM_GATHER_THREADS + 1  # one of them also arrives for TMA
            pipeline = AsyncPipeline(
                *stages, b.layout.nbytes, *consumers, num_producers=num_producers, fenced_by="consumer"
            )
        epilogue_bytes = self.epilogue_tile.layout.nbytes
        epilogue_pipeline = TmaPipeline(
            smem + to_uint32(int(config.mainloop_smem_bytes())),
            round_up(epilogue_bytes, SWIZZLE_ALIGNMENT_BYTES),
            barriers,
            config.warpgroups * self.epilogue_tile.stages,
            epilogue_bytes,
            num_consumers=1,
            first_barrier=2 * config.stages,
        )
        return pipeline, epilogue_pipeline


def can_interleave_filters(
    w: Conv, config: HopperTileConfig, problem: ConvProblem, access: ChannelsFirstAccess
) -> bool:
    """Return whether TMA can reorder the filters so that a thread has words of 8-bit results, which TMA stores."""
    filters, columns = problem.b.loader, math.gcd(problem.shape.n, config.block_n // config.cluster_m)
    if type(filters) is not FilterMatrix or get_itemsize(w.argument_dtypes[-1]) > 1 or columns % INTERLEAVED_FILTERS:
        return False
    if (
        access.output
        or problem.residues
        or problem.windows
        or config.divides_last_wave
        or config.uses_smem_reduction(w)
    ):
        return False
    return math.prod(filters.kernel) == 1 or filters.channels % config.block_k(problem.shape.itemsize) == 0


def make_mainloop(problem: ConvProblem, config: HopperTileConfig, dilation: int) -> WgmmaMainloop:
    """Return the mainloop; `dilation` is the distance of taps along a line of pixels."""
    atom = WgmmaAtom(config.block_n, problem.a.dtype, problem.b.dtype, problem.a.major, problem.b.major)
    a = make_a_tile(problem.a, atom, config)
    b = make_b_tile(problem.b, atom, config, offset=0 if config.keeps_filters else a.layout.nbytes)
    return WgmmaMainloop(
        atom,
        config.wgmma_m_tiles,
        int(config.smem_rows_per_wgmma),
        a=a,
        b=b,
        block_k=config.block_k(atom.itemsize),
        taps_per_copy=config.taps_per_copy,
        rows_per_tap=dilation if config.taps_per_copy > 1 else 0,
        shares_columns=bool(config.has_filter_rows),
        promotion_k_tiles=int(config.promotion_k_tiles(atom.itemsize)),
        promotions_per_k_tile=int(config.promotions_per_k_tile(atom.itemsize)),
        promotion_buffers=int(config.promotion_buffers),
        promotion_steps=int(config.promotion_steps(atom.itemsize)),
        num_warpgroups=int(config.warpgroups_per_tile),
    )


def make_a_tile(operand: Operand, atom: WgmmaAtom, config: HopperTileConfig) -> OperandTile:
    """Return the tile of operand A; taps that share a copy have one copy with a halo for each instruction along M.

    With filter rows it has the filters of these taps.
    """
    if operand.major is Major.MN:
        return make_mn_major_tile(operand, config.block_m, config.cluster_n, atom.itemsize, config)
    num_atoms = config.block_m // atom.m
    row_bytes, boxes_per_tap, box_channels = divide_k_tile(atom, config)
    if config.has_filter_rows:
        layout = SmemLayout(config.block_m, row_bytes, boxes_per_tap * config.taps_per_copy)
        return OperandTile(operand, layout, 0, box_channels, boxes_per_tap, config.block_m // config.cluster_n)
    layout = SmemLayout(num_atoms * int(config.smem_rows_per_wgmma), row_bytes, boxes_per_tap)
    copies = {"copy_rows": config.block_m // config.cluster_n}
    if config.taps_per_copy > 1:
        copies = {"copy_rows": atom.m + config.halo_width, "copies": num_atoms, "rows_between_copies": atom.m}
    return OperandTile(operand, layout, 0, box_channels, boxes_per_tap, **copies)


def make_b_tile(operand: Operand, atom: WgmmaAtom, config: HopperTileConfig, offset: int) -> OperandTile:
    """Return the tile of operand B, which has all taps that share a copy of A, or the copy of filter rows' columns."""
    if operand.major is Major.MN:
        return make_mn_major_tile(operand, config.block_n, config.cluster_m, atom.itemsize, config, offset)
    row_bytes, boxes_per_tap, box_channels = divide_k_tile(atom, config)
    if config.has_filter_rows and config.taps_per_copy > 1:
        layout, rows = SmemLayout(int(config.b_stage_rows), row_bytes, boxes_per_tap), int(config.rows_per_column_copy)
        copies = rows, int(config.num_column_copies), rows
        return OperandTile(operand, layout, offset, box_channels, boxes_per_tap, *copies)
    layout = SmemLayout(config.block_n, row_bytes, boxes_per_tap * config.taps_per_copy)
    return OperandTile(operand, layout, offset, box_channels, boxes_per_tap, config.block_n // config.cluster_m)


def divide_k_tile(atom: WgmmaAtom, config: HopperTileConfig) -> tuple[int, int, int]:
    """Return the bytes of a row of a K-major tile, its boxes along the channels of a tap, and channels per box."""
    row_bytes = int(config.swizzle_bytes)
    return row_bytes, config.block_k_bytes // row_bytes, row_bytes // atom.itemsize


def make_mn_major_tile(
    operand: Operand, rows: int, num_slices: int, itemsize: int, config: HopperTileConfig, offset: int = 0
) -> MnMajorTile:
    """Return the tile of an MN-major operand, in boxes as wide as a swizzle, shared by CTAs that load slices."""
    block_k, box_bytes = config.block_k(itemsize), math.gcd(rows * itemsize, MAX_SWIZZLE_BYTES)
    box_bytes = math.gcd(box_bytes, operand.contiguous_rows * itemsize)
    boxes, copy_rows = rows * itemsize // box_bytes, block_k // num_slices
    layout = SmemLayout(block_k * config.taps_per_copy, box_bytes, boxes, Major.MN)
    return MnMajorTile(operand, layout, offset, block_k, boxes, copy_rows, taps_per_copy=config.taps_per_copy)


def make_epilogue_tile(
    atom: WgmmaAtom, w: Conv, config: HopperTileConfig, frames: int, make_tile: type[EpilogueTile] = EpilogueTile
) -> EpilogueTile:
    """Return the division of a warpgroup's accumulators into subtiles, which TMA stores."""
    dtype = w.argument_dtypes[-1]
    row_bytes, stages = int(config.epilogue_row_bytes(get_itemsize(dtype))), int(config.epilogue_stages(w))
    subtiles = atom, config.wgmma_m_tiles, config.warpgroups_per_tile, dtype, row_bytes, stages, frames
    stores = {"evicts_first": config.output_eviction == FIRST, "is_swizzled": not config.stores_wide_boxes}
    return make_tile(*subtiles, **stores)
