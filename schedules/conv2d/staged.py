"""What `direct` and `implicit_gemm` share: tiles computed from shared memory, in slices and with a pipeline if wanted.

A block computes a tile of the output; one step of the reduction at a time, its threads copy what the step needs to
shared memory and multiply it out. Around that, two ways to keep more of the GPU busy:

* Slices: several threads share the sums of one output, each taking a slice of the input channels of every step; at the
  end they meet in shared memory. More warps for the same tile, which small images lack.
* A pipeline: what the next step needs is on its way while this one computes, held in registers or copied
  asynchronously (cp.async of sm_80 and later; synchronously elsewhere).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from ..vocabulary import (
    bind_grid,
    bind_innermost,
    channels_innermost,
    inline_consumers,
    own_loops,
    split_all,
    unroll,
)
from .plans import BANKS, PIPELINES, Plan

MAX_COPIES = 64  # of a thread in one step, unrolled


class Nest(NamedTuple):
    """The loops of the block that multiplies, inside its threads: over the steps, and over the taps of a step."""

    step: list[LoopRV]
    tap: list[LoopRV]


class Loops(NamedTuple):
    """The loops of an unscheduled convolution; `spatial` and `reduction` are those that tiles are cut from."""

    outer: LoopRV
    spatial: list[LoopRV]
    reduction: list[LoopRV]


class Sums(NamedTuple):
    """The blocks of a convolution: what multiplies, and with slices what adds up, else None."""

    products: SBlockRV
    total: SBlockRV | None


def accumulate(s: Schedule, conv: SBlockRV, loops: Loops, plan: Plan) -> Sums:
    """Let the convolution accumulate in registers, each output's sum shared among `plan.how.slices` threads."""
    if plan.how.slices == 1:
        inline_consumers(s, s.cache_write(conv, 0, "local"))
        return Sums(conv, None)
    rc, *others = loops.reduction
    step, piece, tap = s.split(rc, [None, plan.how.slices, plan.reduction[0][1]])
    s.reorder(piece, loops.outer, *loops.spatial, step, tap, *others)
    partial = s.rfactor(piece, 0)
    s.set_scope(s.cache_write(partial, 0, "local"), 0, "shared")
    inline_consumers(s, s.cache_write(conv, 0, "local"))
    return Sums(partial, conv)


def tile_output(s: Schedule, sums: Sums, loops: Loops, plan: Plan) -> Nest:
    """Cut the output into blocks, virtual threads, threads and locals."""
    if sums.total is not None:
        return _tile_in_slices(s, sums.products, sums.total, plan)
    conv = sums.products
    store = s.get_consumers(conv)[0]
    block, vthread, thread, point = split_all(s, loops.spatial, plan.spatial)
    step, tap = split_all(s, loops.reduction, plan.reduction)
    threads = channels_innermost(thread)
    s.reorder(loops.outer, *block, *vthread, *threads, *step, *tap, *point)
    bind_blocks(s, loops.outer, block)
    bind_innermost(s, "vthread", vthread)
    bind_innermost(s, "threadIdx", thread)
    s.reverse_compute_at(store, threads[-1])
    return Nest(step, tap)


def _tile_in_slices(s: Schedule, partial: SBlockRV, total: SBlockRV, plan: Plan) -> Nest:
    """After the last step, the threads of a block together add up the partial sums of its tile."""
    meet, store = s.get_consumers(partial)[0], s.get_consumers(total)[0]
    axes = len(plan.spatial)
    piece, outer, *spatial = s.get_loops(total)[: 2 + axes]  # loops of extent 1 may follow
    tiles = [(blocks, virtual, threads * local) for blocks, virtual, threads, local in plan.spatial]
    block, vthread, inner = split_all(s, spatial, tiles)
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
    thread, point = split_all(s, own[-axes:], [factors[2:] for factors in plan.spatial])
    s.reorder(*own[:-axes], *thread[1:], piece, thread[0], *point)
    thread[0] = s.fuse(piece, thread[0])
    bind_innermost(s, "threadIdx", thread)

    s.compute_at(partial, channels_innermost(thread)[-1], preserve_unit_loops=True)
    own = own_loops(s, partial)
    output, (step_rc, tap_rc, *others) = own[: -len(plan.reduction) - 1], own[-len(plan.reduction) - 1 :]
    steps, taps = split_all(s, others, plan.reduction[1:]) if others else ([], [])
    nest = Nest([step_rc, *steps], [tap_rc, *taps])
    s.reorder(*nest.step, *nest.tap, *output)
    return nest


def stage(s: Schedule, conv: SBlockRV, shared: Sequence[SBlockRV], nest: Nest, plan: Plan) -> None:
    """Copy the operands to shared memory step by step, pipelined if wanted, and unroll the products of a step.

    Args:
        s: the schedule.
        conv: the block that multiplies.
        shared: the copies of input and weight.
        nest: the loops around it.
        plan: how.
    """
    if plan.how.transposed:
        s.transform_layout(shared[1], ("write", 0), lambda o, i, h, w: (i, h, w, o))
        if plan.how.pad:
            s.storage_align(shared[1], 0, axis=-2, factor=BANKS, offset=plan.how.pad)
    step = nest.step[-1] if plan.how.pipeline == "none" else s.fuse(*nest.step)
    for copy in shared:
        s.compute_at(copy, step, preserve_unit_loops=True)
        each = copy_together(s, copy, plan)
        if plan.how.interleaved:
            unroll(s, each, MAX_COPIES)
        if plan.how.pipeline == "registers":
            s.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)
    s.decompose_reduction(conv, nest.step[0] if plan.how.pipeline == "none" else step)
    if plan.how.pipeline == "registers":  # load both operands, store both, multiply: the loads run ahead by one step
        s.annotate(step, "software_pipeline_stage", [0, 0, 0, 0, 1])
        s.annotate(step, "software_pipeline_order", [0, 3, 1, 4, 2])
    elif plan.how.pipeline != "none":
        s.annotate(step, "software_pipeline_stage", [0, 0, PIPELINES[plan.how.pipeline] - 1])
        s.annotate(step, "software_pipeline_order", [0, 1, 2])
        s.annotate(step, "software_pipeline_async_stages", [0])
    s.annotate(nest.tap[0], "pragma_auto_unroll_max_step", plan.how.max_step)
    s.annotate(nest.tap[0], "pragma_unroll_explicit", plan.how.explicit)


def copy_together(s: Schedule, block: SBlockRV, plan: Plan) -> LoopRV:
    """Share a copy to shared memory among all threads of the block; returns the loop over the elements of one."""
    fused = s.fuse(*own_loops(s, block))
    outermost_first = tuple(reversed(plan.threads))
    if plan.how.interleaved:
        each, *thread = s.split(fused, [None, *outermost_first])
    else:
        *thread, each = s.split(fused, [*outermost_first, None])
    bind_innermost(s, "threadIdx", thread)
    return each


def bind_blocks(s: Schedule, outer: LoopRV, block: Sequence[LoopRV]) -> None:
    """Bind the outermost loop and those of two or three axes to the grid."""
    z, y, x = (outer, *block) if len(block) == 2 else (s.fuse(outer, block[0]), *block[1:])
    bind_grid(s, z, y, x)
