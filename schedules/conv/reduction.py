"""Common steps of convolution schedules: the reduction block, its loops by role, accumulators and operand copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import EIGHT_BIT_DTYPES
from tvmconv.workloads.layout import to_storage_order

from ..primitives import inline_consumers

T = TypeVar("T")

REDUCTION_THREADS = 256  # threads per block of a split-K reduction
# Products and sums are computed in float32, which is more precise than TF32 requires, and those of integers in int32.
FLOAT_DTYPES = ("float32", "float16", "bfloat16", "tf32")
DTYPES = (*FLOAT_DTYPES, *EIGHT_BIT_DTYPES)


class ConvLoops(NamedTuple):
    """Loops of the reduction block by role."""

    outer: LoopRV  # the batch, fused with the groups
    channel: LoopRV  # output channels of a group; the groups if each has one output channel (depthwise)
    spatial: list[LoopRV]  # spatial axes of the output
    channel_in: LoopRV  # input channels of a group
    taps: list[LoopRV]  # axes of the filter


def get_conv_loops(s: Schedule, w: Conv) -> ConvLoops:
    """Return the loops of the reduction block by role, for any number of spatial axes and groups."""
    n, g, o, *rest = s.get_loops(s.get_sblock("sum"))
    space, (depth, *taps) = rest[: w.spatial_ndim], rest[w.spatial_ndim :]
    if w.groups == w.O:
        s.reorder(o, g)
        return ConvLoops(s.fuse(n, o), g, space, depth, taps)
    return ConvLoops(s.fuse(n, g), o, space, depth, taps)


def get_tiled_channels(w: Conv) -> int:
    """Return the extent of `ConvLoops.channel`."""
    return w.groups if w.groups == w.O else w.O // w.groups


def has_filter_per_channel(w: Conv) -> bool:
    """Whether each group is one input channel."""
    return w.C == w.groups > 1


def accumulate_in_registers(s: Schedule) -> SBlockRV:
    """Accumulate in registers, and return the block that stores the sums to the output with the epilogue."""
    store = s.cache_write(s.get_sblock("sum"), 0, "local")
    inline_consumers(s, store)
    return store


def split_k_over_blocks(s: Schedule, reduction_block: SBlockRV, depth_axis: int, num_parts: int) -> SBlockRV:
    """Split a reduction into partial sums in a workspace, and add these up in a separate kernel.

    Args:
        s: The schedule.
        reduction_block: The block, whose loops over the output come first.
        depth_axis: Position of the loop of which each part has a share.
        num_parts: Number of parts.

    Returns:
        The block of the partial sums, whose first loop is over the parts.
    """
    loops = list(s.get_loops(reduction_block))
    part_loop, loops[depth_axis] = s.split(loops[depth_axis], [num_parts, None])
    s.reorder(part_loop, *loops)
    partial = s.rfactor(part_loop, 0)
    reduce_partials(s, reduction_block)
    return partial


def reduce_partials(s: Schedule, reduction_block: SBlockRV) -> None:
    """Add up partial sums in a separate kernel that also applies the epilogue.

    The block is the one that `rfactor` leaves, over (part, output).
    """
    part_loop, *output_loops = s.get_loops(reduction_block)
    store = s.cache_write(reduction_block, 0, "local")
    s.reorder(*output_loops, part_loop)
    block, thread = s.split(s.fuse(*output_loops), [None, REDUCTION_THREADS])
    s.bind(block, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    s.reverse_compute_at(store, thread)
    inline_consumers(s, store)  # must follow `reverse_compute_at`, which would otherwise store padded sums
    s.decompose_reduction(reduction_block, part_loop)


def cache_operands(s: Schedule, block: SBlockRV, scope: str) -> list[SBlockRV]:
    """Copy the input and the weight of a block to shared or local memory, and return the copy blocks.

    The operands' views are inlined after that, so that the padding's bounds check is in the copy, not in the reduction.
    """
    copies = [s.cache_read(block, operand, scope) for operand in (0, 1)]
    for view_name in ("padded", "weight"):
        s.compute_inline(s.get_sblock(view_name))
    return copies


def sort_axes_by_memory(w: Conv, axes: Sequence[T]) -> list[T]:
    """Return the axes of `padded` (n, g, c, space) or `weight` (g, o, c, taps) in the operand's memory order.

    A copy whose loops have that order reads contiguous elements.
    """
    *outer_axes, first_axis = axes[: -w.spatial_ndim - 1]
    return [*outer_axes, *to_storage_order(w.input_layout, (first_axis, *axes[-w.spatial_ndim - 1 :]))]
