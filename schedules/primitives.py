"""Schedule primitives that the schedules share: grid binding, cooperative copies, unrolling, annotations."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.annotations import (
    CONSTANT_ARGS,
    DISABLE_BUFFER_REUSE,
    HOIST_GUARDS,
    KEEP_ALLOCATED_SIZES,
    MEMORY_SCOPES,
    MemoryScope,
)
from tvmconv.space import Tile
from tvmconv.target import MAX_BLOCKS_YZ


def bind_grid(s: Schedule, z: LoopRV, y: LoopRV, x: LoopRV) -> LoopRV:
    """Bind three adjacent loops, outermost first, to the axes of the grid.

    If the extent of y or z exceeds the grid limit of its axis, the three loops are fused into one, which is bound to
    `blockIdx.x`. The loop variables that were passed are then no longer valid.

    Returns:
        The innermost loop of the grid, inside which blocks can be computed.
    """
    if max(get_loop_extent(s, z), get_loop_extent(s, y)) > MAX_BLOCKS_YZ:
        x = s.fuse(z, y, x)
        s.bind(x, "blockIdx.x")
    else:
        bind(s, "blockIdx", z, y, x)
    return x


def bind(s: Schedule, thread_tag: str, z: LoopRV, y: LoopRV, x: LoopRV) -> None:
    """Bind three loops to the z, y and x axes of `blockIdx`, `vthread` or `threadIdx`."""
    for loop, axis in ((z, "z"), (y, "y"), (x, "x")):
        s.bind(loop, f"{thread_tag}.{axis}")


def bind_innermost(s: Schedule, thread_tag: str, loops: Sequence[LoopRV]) -> None:
    """Bind loops to the axes of `vthread` or `threadIdx`, the innermost loop to x."""
    for loop, axis in zip(reversed(loops), "xyz", strict=False):
        s.bind(loop, f"{thread_tag}.{axis}")


def order_channels_innermost(thread_loops: Sequence[LoopRV]) -> list[LoopRV]:
    """Return thread loops in nesting order: first the loops over the image, then the channel loop.

    TVM omits the barrier between two shared-memory accesses with equal indices if the index contains the innermost
    thread variable (ThreadSync, `FindConflict`). The input's index never contains the channel's thread variable, so TVM
    keeps the barrier for threads that share an input.
    """
    channel_loop, *image_loops = thread_loops
    return [*image_loops, channel_loop]


def split_all(s: Schedule, loops: Sequence[LoopRV], inner_factors: Sequence[Sequence[int]]) -> list[list[LoopRV]]:
    """Split each loop by its inner factors and return the resulting loops grouped by level, outermost level first.

    TVM computes the outermost factor and rounds it up, so a tile that does not divide its loop overhangs.
    """
    split_loops = [s.split(loop, [None, *factors]) for loop, factors in zip(loops, inner_factors, strict=True)]
    return [list(level) for level in zip(*split_loops, strict=True)]


def split_tiles(s: Schedule, loops: Sequence[LoopRV], tiles: Sequence[Tile]) -> list[list[LoopRV]]:
    """Split each loop by its tile; see `split_all`."""
    return split_all(s, loops, [list(tile.factors.values())[1:] for tile in tiles])


def block_loops(s: Schedule, block: SBlockRV) -> list[LoopRV]:
    """Return the innermost loops, which `compute_at` created for a block's own axes, one per axis."""
    return s.get_loops(block)[-len(s.get(block).iter_vars) :]


def cooperative_copy(s: Schedule, loops: Sequence[LoopRV], threads: tuple[int, int, int], *, coalesced: bool) -> LoopRV:
    """Distribute a copy to shared memory among all threads (x, y, z) of the block, in the order of the given loops.

    Args:
        s: The schedule.
        loops: Loops of the copy, outermost first.
        threads: Number of threads along x, y and z.
        coalesced: Whether neighbouring threads copy neighbouring elements, which coalesces global reads and spreads
            stores over the banks. Otherwise each thread copies one contiguous run.

    Returns:
        The loop over the elements of one thread.
    """
    x, y, z = threads
    s.reorder(*loops)
    fused = s.fuse(*loops)
    if coalesced:
        elements_per_thread, thread_z, thread_y, thread_x = s.split(fused, [None, z, y, x])
    else:
        thread_z, thread_y, thread_x, elements_per_thread = s.split(fused, [z, y, x, None])
    bind(s, "threadIdx", thread_z, thread_y, thread_x)
    return elements_per_thread


def set_memory_scope(s: Schedule, **scopes: MemoryScope) -> None:
    """Set the memory scope of arguments by their names, such as constant memory or texture."""
    s.annotate(s.get_sblock("root"), MEMORY_SCOPES, scopes)


def mark_constant_args(s: Schedule, *arguments: str) -> None:
    """Mark arguments that do not change between launches; kernels that depend on these alone run once."""
    s.annotate(s.get_sblock("root"), CONSTANT_ARGS, list(arguments))


def keep_allocated_sizes(s: Schedule) -> None:
    """Keep the sizes of allocated arrays, so that TVM does not compute which parts are used."""
    s.annotate(s.get_sblock("root"), KEEP_ALLOCATED_SIZES, True)


def disable_buffer_reuse(s: Schedule) -> None:
    """Keep TVM from placing two arrays in the same memory.

    TVM reuses an array's memory after the last statement that names it. It does not see what TMA reads, nor that
    prepacked weights are read again by later launches.
    """
    s.annotate(s.get_sblock("root"), DISABLE_BUFFER_REUSE, True)


def hoist_guards(s: Schedule) -> None:
    """Evaluate conditions that depend on thread indices alone once, outside the loops.

    TVM puts such a condition around each innermost statement. NVIDIA's compiler then predicates every instruction, and
    on sm_90 reloads constants and addresses at each of them.
    """
    s.annotate(s.get_sblock("root"), HOIST_GUARDS, True)


def get_loop_extent(s: Schedule, loop: LoopRV) -> int:
    """Return a loop's extent."""
    return int(s.get(loop).extent)


def inline_producers(s: Schedule, block: SBlockRV) -> None:
    """Inline all producers of a block, so that it computes from the function's arguments alone."""
    while producers := s.get_producers(block):
        s.compute_inline(producers[0])


def inline_consumers(s: Schedule, block: SBlockRV) -> None:
    """Inline all consumers of a block that only pass on its output, so that it writes the function's output itself."""
    while consumers := s.get_consumers(block):
        s.reverse_compute_inline(consumers[0])


def unroll(s: Schedule, loop: LoopRV, max_statements: int) -> None:
    """Mark a loop and its inner loops with `#pragma unroll`, for up to `max_statements` statements."""
    s.annotate(loop, "pragma_auto_unroll_max_step", max_statements)
    s.annotate(loop, "pragma_unroll_explicit", False)
