"""What all schedules of convolutions share: the block that sums, and its loops by role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.workloads import Conv
from tvmconv.workloads.layout import to_storage_order

from ..primitives import inline_consumers

T = TypeVar("T")

REDUCTION_THREADS = 256  # of a block that adds up partial sums
# Products are float32's, also of 16-bit operands, and so are sums; where TF32 will do, that is better than asked for.
DTYPES = ("float32", "float16", "bfloat16", "tf32")


class ConvLoops(NamedTuple):
    """The loops of the sum by role.

    Attributes:
        outer: the batch, fused with the groups.
        channel: the output channels of a group; where each group has one (depthwise), the groups.
        spatial: the output's axes of space.
        channel_in: the input channels of a group.
        taps: the kernel's axes.
    """

    outer: LoopRV
    channel: LoopRV
    spatial: list[LoopRV]
    channel_in: LoopRV
    taps: list[LoopRV]


def get_conv_loops(s: Schedule, w: Conv) -> ConvLoops:
    """The loops of the sum, whatever its rank and groups."""
    n, g, o, *rest = s.get_loops(s.get_sblock("sum"))
    space, (depth, *taps) = rest[: w.spatial_ndim], rest[w.spatial_ndim :]
    if w.groups == w.O:
        s.reorder(o, g)
        return ConvLoops(s.fuse(n, o), g, space, depth, taps)
    return ConvLoops(s.fuse(n, g), o, space, depth, taps)


def get_tiled_channels(w: Conv) -> int:
    """The extent of `ConvLoops.channel`."""
    return w.groups if w.groups == w.O else w.O // w.groups


def has_filter_per_channel(w: Conv) -> bool:
    """Whether each group is one input channel."""
    return w.C == w.groups > 1


def accumulate_in_registers(s: Schedule) -> SBlockRV:
    """Give the sum a local accumulator; returns the block that stores it, with the epilogue, to the output."""
    store = s.cache_write(s.get_sblock("sum"), 0, "local")
    inline_consumers(s, store)
    return store


def reduce_partials(s: Schedule, reduction_block: SBlockRV) -> None:
    """Let a block add up partial sums in a step of its own, with the epilogue.

    Args:
        s: the schedule.
        reduction_block: the block, as `rfactor` leaves it: over (part, output).
    """
    part_loop, *output_loops = s.get_loops(reduction_block)
    store = s.cache_write(reduction_block, 0, "local")
    s.reorder(*output_loops, part_loop)
    block, thread = s.split(s.fuse(*output_loops), [None, REDUCTION_THREADS])
    s.bind(block, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    s.reverse_compute_at(store, thread)
    inline_consumers(s, store)  # only now: `reverse_compute_at` would forget which sums are padding, and store them
    s.decompose_reduction(reduction_block, part_loop)


def cache_operands(s: Schedule, block: SBlockRV, scope: str) -> list[SBlockRV]:
    """Copy input and weight, as a block sums them, to shared or local memory; returns the blocks that copy.

    The views of the operands are inlined only now: the padding's bounds check then sits in the copy, not in the sum.
    """
    copies = [s.cache_read(block, operand, scope) for operand in (0, 1)]
    for view_name in ("padded", "weight"):
        s.compute_inline(s.get_sblock(view_name))
    return copies


def sort_axes_by_memory(w: Conv, axes: Sequence[T]) -> list[T]:
    """Axes of `padded` (n, g, c, space) or `weight` (g, o, c, taps) as the operand lies in memory.

    A copy whose loops have that order reads neighbouring elements together.
    """
    *outer_axes, first_axis = axes[: -w.spatial_ndim - 1]
    return [*outer_axes, *to_storage_order(w.layout, (first_axis, *axes[-w.spatial_ndim - 1 :]))]
