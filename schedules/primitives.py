"""The scheduling steps that every schedule speaks: binding to the grid, cooperative copies, unrolling."""

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
from tvmconv.gpu_specs import MAX_BLOCKS_YZ
from tvmconv.space import Tile


def bind_grid(s: Schedule, z: LoopRV, y: LoopRV, x: LoopRV) -> LoopRV:
    """Bind three adjacent loops, outermost first, to the axes of the grid.

    Where y or z has more iterations than a grid may have blocks along these axes, the three loops are fused into one,
    which is bound to `blockIdx.x`: the loops that were passed no longer exist then.

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
    """Bind loops, the innermost to x, to the axes of `vthread` or `threadIdx`."""
    for loop, axis in zip(reversed(loops), "xyz", strict=False):
        s.bind(loop, f"{thread_tag}.{axis}")


def order_channels_innermost(thread_loops: Sequence[LoopRV]) -> list[LoopRV]:
    """The nesting order of thread loops (channels first, then the axes of the image), whatever they are bound to.

    TVM leaves out the barrier between two accesses to shared memory with one index if that has the innermost thread's
    number in it (ThreadSync, `FindConflict`). The input's index never has the channels', so that threads that differ
    in them and share an input are seen to need it.
    """
    channel_loop, *image_loops = thread_loops
    return [*image_loops, channel_loop]


def split_all(s: Schedule, loops: Sequence[LoopRV], inner_factors: Sequence[Sequence[int]]) -> list[list[LoopRV]]:
    """Split each loop by its inner factors, and return the pieces regrouped by level: all outermost loops, and so on.

    The outermost factor is left to TVM, which rounds up, so that a tile that does not divide its loop overhangs.
    """
    split_loops = [s.split(loop, [None, *factors]) for loop, factors in zip(loops, inner_factors, strict=True)]
    return [list(level) for level in zip(*split_loops, strict=True)]


def split_tiles(s: Schedule, loops: Sequence[LoopRV], tiles: Sequence[Tile]) -> list[list[LoopRV]]:
    """Split each loop by its tile; see `split_all`."""
    return split_all(s, loops, [list(tile.factors.values())[1:] for tile in tiles])


def block_loops(s: Schedule, block: SBlockRV) -> list[LoopRV]:
    """The loops that `compute_at` made for a block's own axes: one each, the innermost ones."""
    return s.get_loops(block)[-len(s.get(block).iter_vars) :]


def cooperative_copy(s: Schedule, loops: Sequence[LoopRV], threads: tuple[int, int, int], *, coalesced: bool) -> LoopRV:
    """Share a copy to shared memory, in the order of these loops, among all threads (x, y, z) of the block.

    Interleaved, neighbouring threads copy neighbouring elements: coalesced global reads, stores to distinct banks.
    Otherwise each thread copies one contiguous run.

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
    """Say which arguments, by their names, lie in constant memory or are read through a texture."""
    s.annotate(s.get_sblock("root"), MEMORY_SCOPES, scopes)


def mark_constant_args(s: Schedule, *arguments: str) -> None:
    """Say which arguments stay as they are from launch to launch: what steps make of these alone is made once."""
    s.annotate(s.get_sblock("root"), CONSTANT_ARGS, list(arguments))


def keep_allocated_sizes(s: Schedule) -> None:
    """Say that arrays have the sizes that they are to have: TVM need not find out how much of them is used."""
    s.annotate(s.get_sblock("root"), KEEP_ALLOCATED_SIZES, True)


def disable_buffer_reuse(s: Schedule) -> None:
    """Say that no array may take another's place in memory.

    TVM lets one do so that comes up behind the last statement that has the other: it does not see what TMA reads, and
    not that what is prepared once is read again.
    """
    s.annotate(s.get_sblock("root"), DISABLE_BUFFER_REUSE, True)


def hoist_guards(s: Schedule) -> None:
    """Test once, outside the loops, what only a thread's place decides, such as whether it idles.

    TVM writes the test around each innermost statement. NVIDIA's compiler then makes every instruction conditional, and
    on sm_90 reads constants and addresses anew at each, by loads of the thread's own.
    """
    s.annotate(s.get_sblock("root"), HOIST_GUARDS, True)


def get_loop_extent(s: Schedule, loop: LoopRV) -> int:
    """A loop's extent."""
    return int(s.get(loop).extent)


def inline_producers(s: Schedule, block: SBlockRV) -> None:
    """Inline everything that a block reads, so that it computes from the function's arguments alone."""
    while producers := s.get_producers(block):
        s.compute_inline(producers[0])


def inline_consumers(s: Schedule, block: SBlockRV) -> None:
    """Inline everything that only passes a block's output on, so that it writes the function's output itself."""
    while consumers := s.get_consumers(block):
        s.reverse_compute_inline(consumers[0])


def unroll(s: Schedule, loop: LoopRV, max_statements: int) -> None:
    """Mark this loop and those inside it with `#pragma unroll`, up to `max_statements` statements."""
    s.annotate(loop, "pragma_auto_unroll_max_step", max_statements)
    s.annotate(loop, "pragma_unroll_explicit", False)
