"""Convolution as a matrix product, channels × pixels: the tiles of `direct` on the flattened output, tuned.

The rows and columns of the whole batch are one axis of pixels, as in `conflict_free`, so that a tile of a 14 × 14 or
7 × 7 image need not follow its rows, and several images share a block. The input is staged by filter tap, one value for
each tap and pixel. 1×1 filters, where that costs nothing, gain most; for larger ones `direct` reads less.

Tiles that overhang are filled up with zeros on their way into shared memory, but where sums are shared.

Where `conflict_free` fixes warps along the pixels, here everything is a knob, with the slices, the pipeline and the
weight's layout of `direct`. One more is `split_k`: blocks that share the sums of a tile, each over its part of the
input channels, for small images, whose tiles alone are too few to fill a GPU. They write partial sums to scratch
memory, and a second step adds them up and applies the epilogue. Measured: tuning_logs/nvidia-h200/.
"""

import functools
import math

from tvm.ir import Expr
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx import IndexMap

from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv

from ..vocabulary import inline_producers
from .bias import begin_with_bias
from .blocked import Order, Sums, copy_in_steps, lay_out_weight, share_out, tile_output
from .conflict_free import flatten_pixels
from .plan import Axes, Axis, Plan
from .sums import DTYPES, add_up, in_memory_order

FEW_PIXELS = 256  # up to which blocks are scarce: measured on the 14 × 14 and 7 × 7 images of ResNet-50
KERNEL_KNOBS = ("tile_rz", "tile_ry", "tile_rx")  # of depth, height and width, as far as there are


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    plan = Plan.of_columns(c, axes(w))
    f, p = (tile.size for tile in plan.output)
    taps = plan.taps * plan.slices
    return plan.usage(w, (taps * p, taps * plan.weight_row(w, f)), outer=w.groups)


def is_promising(w: Conv) -> bool:
    """Whether the filter is 1×1, the images so small that splitting the sums pays, or no other schedule is for them."""
    is_small = w.N * math.prod(w.out) <= FEW_PIXELS
    return w.rank != 2 or (w.groups == 1 and (is_small or set(w.kernel) == {1}))


@schedule("conv1d", "conv2d", "conv3d", dtypes=DTYPES, usage=usage, promising=is_promising)
def implicit_gemm(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Tiles of channels and pixels are (block, virtual thread, thread, local); reduction tiles (step, tap)."""
    f, p = (axis.extent for axis in axes(w).output)
    plan = Plan.ask(k, w, axes(w), slices=min(f, p) > 1, split_k=w.groups == 1)
    products = flatten_pixels(s, w)
    axes_of_sum = len(s.get_loops(products))
    s.transform_block_layout(products, IndexMap.from_func(sums_last, ndim=axes_of_sum, index_dtype="int32"))
    if plan.split_k > 1:
        products = split_over_blocks(s, products, plan.split_k)
    outer, channel, pixel, *reduction = s.get_loops(products)
    sums = share_out(s, products, outer, [channel, pixel], reduction, plan, to_output=plan.split_k == 1)
    if plan.slices == plan.split_k == 1 and not all(tile.divides for tile in plan.output):
        sums = pad_with_zeros(s, sums, plan)
    copies = [s.cache_read(sums.products, operand, "shared") for operand in (0, 1)]
    for copy in copies:
        inline_producers(s, copy)
    name = str(s.get(sums.products).name_hint)
    lay_out_weight(s, w, copies[1], plan)
    orders: list[Order] = [
        list,
        functools.partial(in_memory_order, w),
    ]  # the input has an element for each tap and pixel
    copy_in_steps(s, sums.products, copies, orders, tile_output(s, sums, plan), plan)
    return s if plan.split_k > 1 else begin_with_bias(s, w, name, plan, group=0)


def pad_with_zeros(s: Schedule, sums: Sums, plan: Plan) -> Sums:
    """Fill up the operands of overhanging tiles with zeros, on their way into shared memory: products need no tests."""
    (store,) = s.get_consumers(sums.products)
    s.pad_einsum(sums.products, [1, *(tile.size for tile in plan.output), *(1 for _ in sums.reduction)])
    s.reverse_compute_inline(store)
    outer, channel, pixel, *reduction = s.get_loops(sums.products)
    return Sums(sums.products, None, outer, [channel, pixel], reduction)


def split_over_blocks(s: Schedule, total: SBlockRV, parts: int) -> SBlockRV:
    """Split a reduction into parts that are summed to scratch memory, and add these up in a step of its own.

    Args:
        s: the schedule.
        total: the block that sums over (group, channel, pixel; input channel, filter taps).
        parts: how many.

    Returns:
        The block of the partial sums, over (part and group, channel, pixel; input channel, filter taps).
    """
    group, channel, pixel, depth, *taps = s.get_loops(total)
    part, rest = s.split(depth, [parts, None])
    s.reorder(part, group, channel, pixel, rest, *taps)
    partial = s.rfactor(part, 0)

    add_up(s, total)
    part, group, *_ = s.get_loops(partial)
    s.fuse(part, group)
    return partial


def sums_last(group: Expr, channel: Expr, *others: Expr) -> list[Expr]:
    """The sum's axes with the pixels before the reduction: the slices' blocks then have theirs in this order."""
    *reduction, pixel = others
    return [group, channel, pixel, *reduction]


def axes(w: Conv) -> Axes:
    """The axes that are tiled: output channels of a group, pixels of the whole batch; input channels and taps."""
    output = (
        Axis("tile_f", w.O // w.groups, {"thread": 8, "local": 4}),
        Axis("tile_p", w.N * math.prod(w.out), {"thread": 32, "local": 2}),
    )
    preferred = [*(1,) * (w.rank - 1), 3]  # a run of taps along the last axis
    knobs = zip(KERNEL_KNOBS[-w.rank :], w.kernel, preferred, strict=True)
    depth = Axis("tile_rc", w.C // w.groups, {"tap": 8})
    return Axes(output, (depth, *(Axis(knob, size, {"tap": tap}) for knob, size, tap in knobs)))
