"""Convolution as a matrix product, channels × pixels: the tiles of `direct` on the flattened output, tuned.

The rows and columns of the whole batch are one axis of pixels, as in `conflict_free`, so that a tile of a 14 × 14 or
7 × 7 image need not follow its rows, and several images share a block. The input is staged by filter tap, one value for
each tap and pixel. 1×1 filters, where that costs nothing, gain most; for larger ones `direct` reads less.

Where `conflict_free` fixes warps along the pixels, here everything is a knob, with the slices, the pipeline and the
weight's layout of `direct`. Measured: tuning_logs/nvidia-h200/.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d

from ..vocabulary import inline_producers
from . import plans, staged
from .conflict_free import flatten_pixels

SPATIAL = ("tile_f", "tile_p")
TAPS = ("tile_rc", "tile_ry", "tile_rx")


def usage(w: Conv2d, c: Columns) -> Usage:
    """What configs use of a device."""
    f, p, rc, ry, rx = (plans.tile(c, axis) for axis in (*SPATIAL, *TAPS))
    taps = rc * c["slices"] * ry * rx
    return plans.usage(c, SPATIAL, TAPS, (taps * p, taps * plans.weight_row(c, f)), outer=w.groups)


def is_pointwise(w: Conv2d) -> bool:
    """Whether the filter is 1×1."""
    return w.R == w.S == w.groups == 1


@schedule("conv2d", usage=usage, promising=is_pointwise)
def implicit_gemm(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Tiles of channels and pixels are (block, virtual thread, thread, local); reduction tiles (step, tap)."""
    channels, pixels, depth = w.O // w.groups, w.N * w.P * w.Q, w.C // w.groups
    extents = dict(zip((*SPATIAL, *TAPS), (channels, pixels, depth, w.R, w.S), strict=True))
    spatial = tuple(
        k.split(axis, extents[axis], 4, default, overhang=plans.searched_overhang(extents[axis]))
        for axis, default in zip(SPATIAL, ((-1, 1, 8, 4), (-1, 1, 32, 2)), strict=True)
    )
    taps = tuple(
        k.split(axis, extents[axis], 2, default, exact=True)
        for axis, default in zip(TAPS, ((-1, 8), (-1, 1), (-1, 3)), strict=True)
    )
    how = plans.ask_how(k, w, slices=min(channels, pixels) > 1)
    plans.demand(k, extents, SPATIAL, TAPS)
    plan = plans.Plan(spatial, taps, how)

    conv = flatten_pixels(s, w, channels_last=False)
    if w.groups == 1:  # the slices' blocks have their axes in this order, the pixels before the sums
        s.transform_block_layout(conv, lambda channel, rc, rh, rw, pixel: (channel, pixel, rc, rh, rw))
        channel, pixel, *sums_over = s.get_loops(conv)
        nest = staged.Loops(s.add_unit_loop(channel), [channel, pixel], sums_over)
    else:
        group, channel, *sums_over, pixel = s.get_loops(conv)
        nest = staged.Loops(group, [channel, pixel], sums_over)
    sums = staged.accumulate(s, conv, nest, plan)
    shared = [s.cache_read(sums.products, operand, "shared") for operand in (0, 1)]
    for copy in shared:
        inline_producers(s, copy)
    staged.stage(s, sums.products, shared, staged.tile_output(s, sums, nest, plan), plan)
