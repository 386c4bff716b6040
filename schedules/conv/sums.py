"""What all schedules of convolutions share: the block that sums, and its loops by role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.workloads import Conv
from tvmconv.workloads.layout import stored

from ..vocabulary import inline_consumers

T = TypeVar("T")

ADDING_THREADS = 256  # of a block that adds up partial sums
# Products are float32's, also of 16-bit operands, and so are sums; where TF32 will do, that is better than asked for.
DTYPES = ("float32", "float16", "bfloat16", "tf32")


class Loops(NamedTuple):
    """The loops of the sum by role.

    Attributes:
        outer: the batch, fused with the groups.
        channel: the output channels of a group; where each group has one (depthwise), the groups.
        space: the output's axes of space.
        depth: the input channels of a group.
        taps: the kernel's axes.
    """

    outer: LoopRV
    channel: LoopRV
    space: list[LoopRV]
    depth: LoopRV
    taps: list[LoopRV]


def loops(s: Schedule, w: Conv) -> Loops:
    """The loops of the sum, whatever its rank and groups."""
    n, g, o, *rest = s.get_loops(s.get_sblock("sum"))
    space, (depth, *taps) = rest[: w.rank], rest[w.rank :]
    if w.groups == w.O:
        s.reorder(o, g)
        return Loops(s.fuse(n, o), g, space, depth, taps)
    return Loops(s.fuse(n, g), o, space, depth, taps)


def tiled_channels(w: Conv) -> int:
    """The extent of `Loops.channel`."""
    return w.groups if w.groups == w.O else w.O // w.groups


def accumulate_in_registers(s: Schedule) -> SBlockRV:
    """Give the sum a local accumulator; returns the block that stores it, with the epilogue, to the output."""
    store = s.cache_write(s.get_sblock("sum"), 0, "local")
    inline_consumers(s, store)
    return store


def add_up(s: Schedule, total: SBlockRV) -> None:
    """Let a block add up partial sums in a step of its own, with the epilogue.

    Args:
        s: the schedule.
        total: the block, as `rfactor` leaves it: over (part, output).
    """
    part, *output = s.get_loops(total)
    store = s.cache_write(total, 0, "local")
    s.reorder(*output, part)
    block, thread = s.split(s.fuse(*output), [None, ADDING_THREADS])
    s.bind(block, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    s.reverse_compute_at(store, thread)
    inline_consumers(s, store)  # only now: `reverse_compute_at` would forget which sums are padding, and store them
    s.decompose_reduction(total, part)


def stage_operands(s: Schedule, block: SBlockRV, scope: str) -> list[SBlockRV]:
    """Copy input and weight, as a block sums them, to shared or local memory; returns the blocks that copy.

    The views of the operands are inlined only now: the padding's bounds check then sits in the copy, not in the sum.
    """
    copies = [s.cache_read(block, operand, scope) for operand in (0, 1)]
    for view in ("padded", "weight"):
        s.compute_inline(s.get_sblock(view))
    return copies


def in_memory_order(w: Conv, axes: Sequence[T]) -> list[T]:
    """Axes of `padded` (n, g, c, space) or `weight` (g, o, c, taps) as the operand lies in memory.

    A copy whose loops have that order reads neighbouring elements together.
    """
    *before, first = axes[: -w.rank - 1]
    return [*before, *stored(w.layout, (first, *axes[-w.rank - 1 :]))]
