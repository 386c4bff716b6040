"""AutoTVM's direct convolution: four-way tiles of channels × rows × columns, its knobs, and some more.

The knobs tile_f, tile_y, tile_x, tile_rc, tile_ry, tile_rx, auto_unroll_max_step and unroll_explicit mean what they
mean in AutoTVM's template `conv2d_nchw.cuda`, so that its logs rebuild the kernels that they were measured on. With the
other knobs at their defaults the kernel is AutoTVM's: from `vthread` it differs in that the products read shared memory
without a copy in registers (NVIDIA's compiler makes that copy itself, with vector loads).

What the other knobs are for, each of them part of the fastest kernel of some layer (tuning_logs/nvidia-h200/):

* slices: threads share the sums of an output; see `blocked`. Small images with many channels.
* pipeline: load the next step's operands while this one computes. Nearly everywhere.
* fetch: neighbouring threads copy neighbouring elements.
* weight_layout: the weight's channels innermost in shared memory, so that a thread's channels are one vector load;
  weight_pad shifts its rows by some banks, for copies without bank conflicts.
"""

import functools

from tvm.s_tir import Schedule

from tvmconv.knobs import Columns, Knobs, nearest_factors
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d

from .bias import begin_with_bias
from .blocked import copy_in_steps, lay_out_weight, share_out, tile_output
from .plan import Axes, Axis, Plan
from .sums import DTYPES, in_memory_order, loops, stage_operands, tiled_channels
from .tiles import shrink_to_shared_memory

OUTPUT = {"f": (1, 8, 4), "y": (1, 2, 2), "x": (1, 16, 2)}  # virtual threads, threads, and the outputs of each
REDUCTION = {"rc": 4, "ry": 3, "rx": 3}


def usage(w: Conv2d, c: Columns) -> Usage:
    """What configs use of a device."""
    plan = Plan.of_columns(c, axes(w))
    f, y, x = (tile.size for tile in plan.output)
    rc, ry, rx = (tile.tap for tile in plan.reduction)
    rc = rc * plan.slices
    rows = (y - 1) * w.stride[0] + (ry - 1) * w.dilation[0] + 1
    columns = (x - 1) * w.stride[1] + (rx - 1) * w.dilation[1] + 1
    inputs = rc * rows * columns * (f if w.groups == w.O > 1 else 1)
    weights = rc * ry * rx * plan.weight_row(w, f)
    return plan.usage(w, (inputs, weights), outer=w.N * (w.groups if w.groups != w.O else 1))


def shares_inputs(w: Conv2d) -> bool:
    """Whether output channels have input channels in common, so that it pays to compute several of them together."""
    return w.groups == 1 or w.groups < w.C


@schedule("conv2d", dtypes=DTYPES, usage=usage, promising=shares_inputs)
def direct(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Output tiles are (block, virtual thread, thread, local); reduction tiles (step, tap)."""
    plan = Plan.ask(k, w, axes(w), slices=True)
    outer, channel, space, depth, taps = loops(s, w)
    sums = share_out(s, s.get_sblock("sum"), outer, [channel, *space], [depth, *taps], plan)
    copies = stage_operands(s, sums.products, "shared")
    products = str(s.get(sums.products).name_hint)
    lay_out_weight(s, w, copies[1], plan)
    orders = [functools.partial(in_memory_order, w)] * 2
    copy_in_steps(s, sums.products, copies, orders, tile_output(s, sums, plan), plan)
    return begin_with_bias(s, w, products, plan, group=1)


def axes(w: Conv2d) -> Axes:
    """The axes that are tiled, with default tiles that fit the workload and shared memory."""
    extents = {"f": tiled_channels(w), "y": w.P, "x": w.Q, "rc": w.C // w.groups, "ry": w.R, "rx": w.S}
    output = OUTPUT if shares_inputs(w) else {**OUTPUT, "f": (1, 4, 1)}  # each channel brings its own input
    names = {"f": "c", "y": "h", "x": "w", "rc": "rc", "ry": "rh", "rx": "rw"}
    fitting = {names[axis]: nearest_factors(extents[axis], factors) for axis, factors in output.items()}
    fitting |= {names[axis]: nearest_factors(extents[axis], (tap,), exact=True) for axis, tap in REDUCTION.items()}
    fitting = shrink_to_shared_memory(w, fitting)

    def axis(name: str, levels: tuple[str, ...]) -> Axis:
        # AutoTVM once confused the filter's rows and columns, so that old logs have factors that do not fit.
        default = dict(zip(levels, fitting[names[name]], strict=True))
        return Axis(f"tile_{name}", extents[name], default, lenient=name in REDUCTION)

    return Axes(
        tuple(axis(name, ("vthread", "thread", "local")) for name in OUTPUT),
        tuple(axis(name, ("tap",)) for name in REDUCTION),
    )
