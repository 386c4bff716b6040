"""Tiles computed from shared memory by a block, in slices and with a pipeline if wanted: `direct` and `implicit_gemm`.

A block computes a tile of the output; one step of the reduction at a time, its threads copy what the step needs to
shared memory and multiply it out. Around that, two ways to keep more of the GPU busy:

* Slices: several threads share the sums of one output, each taking a slice of the input channels of every step; at the
  end they meet in shared memory. More warps for the same tile, which small images lack.
* A pipeline: what the next step needs is on its way while this one computes, held in registers or copied
  asynchronously (cp.async of sm_80 and later; synchronously elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.gpu import BANK_BYTES, BANKS
from tvmconv.knobs import Tile
from tvmconv.workloads import Conv

from ..vocabulary import (
    bind_grid,
    bind_innermost,
    channels_innermost,
    inline_consumers,
    own_loops,
    split_tiles,
    unroll,
)
from .plan import PIPELINES, VECTOR, Plan
from .tiles import element_bytes

MAX_COPIES = 64  # of a thread in one step, unrolled

Order = Callable[[list[LoopRV]], list[LoopRV]]


class Nest(NamedTuple):
    """The loops of the block that multiplies, inside its threads: over the steps, and over the taps of a step."""

    step: list[LoopRV]
    tap: list[LoopRV]


class Sums(NamedTuple):
    """The blocks of a convolution and the loops of the first that tiles are cut from.

    Attributes:
        products: the block that multiplies.
        total: with slices, the block that adds up what they have; else None.
        outer: a loop that is not tiled: images, groups.
        output: loops over the output, channels first.
        reduction: loops over the reduction, input channels first.
    """

    products: SBlockRV
    total: SBlockRV | None
    outer: LoopRV
    output: list[LoopRV]
    reduction: list[LoopRV]


def share_out(
    s: Schedule,
    block: SBlockRV,
    outer: LoopRV,
    output: list[LoopRV],
    reduction: list[LoopRV],
    plan: Plan,
    *,
    to_output: bool = True,
) -> Sums:
    """Let a block sum in registers, each output's sum shared among `plan.slices` threads.

    Args:
        s: the schedule.
        block: the block.
        outer: the loop of it that is not tiled.
        output: its loops over the output, channels first.
        reduction: its loops over the reduction, input channels first.
        plan: how.
        to_output: whether what it sums is stored with the epilogue, and not as it is for a later step.
    """
    if plan.slices == 1:
        _store(s, block, to_output)
        return Sums(block, None, outer, output, reduction)
    depth, *others = reduction
    step, piece, tap = s.split(depth, [None, plan.slices, plan.reduction[0].tap])
    s.reorder(piece, outer, *output, step, tap, *others)
    partial = s.rfactor(piece, 0)
    s.set_scope(s.cache_write(partial, 0, "local"), 0, "shared")
    _store(s, block, to_output)
    return Sums(partial, block, outer, output, reduction)


def _store(s: Schedule, block: SBlockRV, to_output: bool) -> None:
    """Let a block sum in registers and store its sums: to the output, or to scratch memory."""
    store = s.cache_write(block, 0, "local")
    if to_output:
        inline_consumers(s, store)


def tile_output(s: Schedule, sums: Sums, plan: Plan) -> Nest:
    """Cut the output into blocks, virtual threads, threads and locals; returns the loops around the products."""
    if sums.total is not None:
        return _tile_in_slices(s, sums.products, sums.total, plan)
    store = s.get_consumers(sums.products)[0]
    block, vthread, thread, point = split_tiles(s, sums.output, plan.output)
    step, tap = split_tiles(s, sums.reduction, plan.reduction)
    threads = channels_innermost(thread)
    s.reorder(sums.outer, *block, *vthread, *threads, *step, *tap, *point)
    bind_blocks(s, sums.outer, block)
    bind_innermost(s, "vthread", vthread)
    bind_innermost(s, "threadIdx", thread)
    s.reverse_compute_at(store, threads[-1])
    return Nest(step, tap)


def _tile_in_slices(s: Schedule, partial: SBlockRV, total: SBlockRV, plan: Plan) -> Nest:
    """After the last step, the threads of a block together add up the partial sums of its tile."""
    meet, store = s.get_consumers(partial)[0], s.get_consumers(total)[0]
    axes = len(plan.output)
    piece, outer, *spatial = s.get_loops(total)[: 2 + axes]  # loops of extent 1 may follow
    tiles = [
        Tile(tile.extent, {"block": tile.block, "vthread": tile.vthread, "inner": tile.thread * tile.local})
        for tile in plan.output
    ]
    block, vthread, inner = split_tiles(s, spatial, tiles)
    s.reorder(outer, *block, *vthread, *inner, piece)
    bind_blocks(s, outer, block)
    _each, *thread = s.split(s.fuse(*inner), [None, *reversed(plan.threads)])
    bind_innermost(s, "threadIdx", thread)
    s.reverse_compute_at(store, thread[-1])

    # A loop bound to virtual threads counts as threads where shared memory is sized: bound only now, `meet` covers the
    # tile of one of them.
    s.compute_at(meet, vthread[-1], preserve_unit_loops=True)
    bind_innermost(s, "vthread", vthread)
    piece, *own = own_loops(s, meet)
    tiles = [Tile(tile.size // tile.vthread, {"thread": tile.thread, "local": tile.local}) for tile in plan.output]
    thread, point = split_tiles(s, own[-axes:], tiles)
    s.reorder(*own[:-axes], *thread[1:], piece, thread[0], *point)
    thread[0] = s.fuse(piece, thread[0])
    bind_innermost(s, "threadIdx", thread)

    s.compute_at(partial, channels_innermost(thread)[-1], preserve_unit_loops=True)
    own = own_loops(s, partial)
    output, (step_rc, tap_rc, *others) = own[: -len(plan.reduction) - 1], own[-len(plan.reduction) - 1 :]
    steps, taps = split_tiles(s, others, plan.reduction[1:]) if others else ([], [])
    nest = Nest([step_rc, *steps], [tap_rc, *taps])
    s.reorder(*nest.step, *nest.tap, *output)
    return nest


def copy_in_steps(
    s: Schedule, products: SBlockRV, copies: Sequence[SBlockRV], orders: Sequence[Order], nest: Nest, plan: Plan
) -> None:
    """Copy the operands to shared memory step by step, pipelined if wanted, and unroll the products of a step.

    Args:
        s: the schedule.
        products: the block that multiplies.
        copies: those of its operands.
        orders: of each copy, from its own axes to the order in which the operand lies in memory.
        nest: the loops around the products.
        plan: how.
    """
    step = nest.step[-1] if plan.pipeline == "none" else s.fuse(*nest.step)
    for copy, order in zip(copies, orders, strict=True):
        s.compute_at(copy, step, preserve_unit_loops=True)
        each = copy_together(s, order(own_loops(s, copy)), plan)
        if plan.fetch != "blocked":
            unroll(s, each, MAX_COPIES)
        if plan.pipeline == "registers":
            s.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)
    s.decompose_reduction(products, nest.step[0] if plan.pipeline == "none" else step)
    if plan.pipeline == "registers":  # load both operands, store both, multiply: the loads run ahead by one step
        s.annotate(step, "software_pipeline_stage", [0, 0, 0, 0, 1])
        s.annotate(step, "software_pipeline_order", [0, 3, 1, 4, 2])
    elif plan.pipeline != "none":
        s.annotate(step, "software_pipeline_stage", [0, 0, PIPELINES[plan.pipeline] - 1])
        s.annotate(step, "software_pipeline_order", [0, 1, 2])
        s.annotate(step, "software_pipeline_async_stages", [0])
    s.annotate(nest.tap[0], "pragma_auto_unroll_max_step", plan.max_step)
    s.annotate(nest.tap[0], "pragma_unroll_explicit", bool(plan.explicit))


def lay_out_weight(s: Schedule, w: Conv, copy: SBlockRV, plan: Plan) -> None:
    """Let the copy of a weight, (group, output channel, input channel, taps), lie in shared memory as the plan says."""
    if plan.weight_layout == "ihwo":
        s.transform_layout(copy, ("write", 0), lambda g, o, *inner: (g, *inner, o))
        if plan.pad:
            word = BANK_BYTES // element_bytes(w)  # elements
            s.storage_align(copy, 0, axis=-2, factor=BANKS * word, offset=plan.pad * word)


def copy_together(s: Schedule, loops: Sequence[LoopRV], plan: Plan) -> LoopRV:
    """Share a copy, in the order of these loops, among all threads; returns the loop over the elements of one."""
    s.reorder(*loops)
    fused = s.fuse(*loops)
    outermost_first = tuple(reversed(plan.threads))
    if plan.fetch == "interleaved":
        each, *thread = s.split(fused, [None, *outermost_first])
    elif plan.fetch == "vectors":
        each, *thread, vector = s.split(fused, [None, *outermost_first, VECTOR])
        s.vectorize(vector)
    else:
        *thread, each = s.split(fused, [*outermost_first, None])
    bind_innermost(s, "threadIdx", thread)
    return each


def bind_blocks(s: Schedule, outer: LoopRV, block: Sequence[LoopRV]) -> None:
    """Bind the outermost loop and those of two or three axes to the grid."""
    z, y, x = (outer, *block) if len(block) == 2 else (s.fuse(outer, block[0]), *block[1:])
    bind_grid(s, z, y, x)
