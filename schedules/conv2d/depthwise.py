"""AutoTVM's depthwise convolution: each channel has its own filter, so that there is little to share, and less to sum.

The knobs tile_f, tile_y, tile_x, auto_unroll_max_step and unroll_explicit mean what they mean in AutoTVM's template
`depthwise_conv2d_nchw.cuda`: four-way tiles of channels × rows × columns; a block stages the window of its whole tile,
and the filters, in shared memory once; threads copy their part to registers and sum.

The knob `stage` is new: with "registers", threads read what they need from global memory themselves. A 3×3 window is
read nine times at most, by neighbours, out of the L1 cache; there is no barrier to wait for.
"""

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d

from ..vocabulary import bind, bind_grid, cooperative_copy, own_loops, split_all
from . import plans
from .stages import accumulate_in_registers, convolution
from .tiles import WORD

SPATIAL = ("tile_f", "tile_y", "tile_x")


def usage(w: Conv2d, c: Columns) -> Usage:
    """What configs use of a device."""
    f, y, x = (plans.tile(c, axis) for axis in SPATIAL)
    window = ((y - 1) * w.stride[0] + (w.R - 1) * w.dilation[0] + 1) * (
        (x - 1) * w.stride[1] + (w.S - 1) * w.dilation[1] + 1
    )
    multiplier = w.O // w.groups
    inputs, weights = -(-f // multiplier) * window, f * w.R * w.S
    threads = np.prod([c[axis][:, 2] for axis in SPATIAL], axis=0)
    blocks = w.N * np.prod([c[axis][:, 0] for axis in SPATIAL], axis=0)
    return Usage(
        threads=threads,
        shared_bytes=np.where(c["stage"] == "shared", WORD * (inputs + weights), 0),
        accumulators=plans.accumulators(c, SPATIAL),
        blocks=blocks,
        staged_words=inputs + weights,
        overlap=inputs / (f * y * x),
        all_threads=blocks * threads,
    )


def has_filter_per_channel(w: Conv2d) -> bool:
    """Whether each group is one input channel."""
    return w.C == w.groups > 1


@schedule("conv2d", usage=usage, condition=has_filter_per_channel, promising=has_filter_per_channel)
def depthwise(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Output tiles are (block, virtual thread, thread, local)."""
    tile_f = k.split("tile_f", w.O, 4, (-1, 1, 1, 1))
    tile_y = k.split("tile_y", w.P, 4, (-1, 1, 8, 1), overhang=plans.searched_overhang(w.P))
    tile_x = k.split("tile_x", w.Q, 4, (-1, 1, 32, 1), overhang=plans.searched_overhang(w.Q))
    max_step = k.choice("auto_unroll_max_step", (0, 256, 1500), 0)
    explicit = bool(k.choice("unroll_explicit", (0, 1), 0))
    in_shared = k.choice("stage", ("shared", "registers"), "shared") == "shared"
    k.search_only(
        f"at least {plans.MIN_THREADS} threads",
        lambda c: np.prod([c[axis][:, 2] for axis in SPATIAL], axis=0) >= plans.MIN_THREADS,
    )
    multiplier = w.O // w.groups
    k.search_only(  # TVM would not find which inputs the tile reads
        "tiles of channels are multiples of those of one input channel, or divide them",
        lambda c: np.all(
            [(tile % multiplier == 0) | (multiplier % tile == 0) for tile in c["tile_f"][:, :0:-1].cumprod(axis=1).T],
            axis=0,
        ),
    )
    k.search_only("few enough accumulators", lambda c: plans.accumulators(c, SPATIAL) <= plans.MAX_ACCUMULATORS)

    conv = convolution(s, w)
    store = accumulate_in_registers(s, conv)
    scope = "shared" if in_shared else "local"
    copies = [s.cache_read(conv, operand, scope) for operand in (0, 1)]
    s.compute_inline(s.get_sblock("padded"))  # only now: its bounds check then sits in the copy

    n, group, output, y, x = s.get_loops(store)
    block, vthread, thread, point = split_all(s, (s.fuse(group, output), y, x), (tile_f, tile_y, tile_x))
    s.reorder(n, *block, *vthread, *thread, *point)
    bind_grid(s, s.fuse(n, block[0]), *block[1:])
    bind(s, "vthread", *vthread)
    bind(s, "threadIdx", *thread)
    s.compute_at(conv, thread[-1], preserve_unit_loops=True)
    for copy in copies:
        s.compute_at(copy, block[-1] if in_shared else thread[-1], preserve_unit_loops=True)
        if in_shared:
            cooperative_copy(s, copy, (tile_x[2], tile_y[2], tile_f[2]), interleaved=True)
    outermost = own_loops(s, conv)[0]
    s.decompose_reduction(conv, outermost)
    s.annotate(outermost, "pragma_auto_unroll_max_step", max_step)
    s.annotate(outermost, "pragma_unroll_explicit", explicit)
