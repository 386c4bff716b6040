"""AutoTVM's direct convolution: four-way tiles of channels × rows × columns, its knobs, and some more.

The knobs tile_f, tile_y, tile_x, tile_rc, tile_ry, tile_rx, auto_unroll_max_step and unroll_explicit mean what they
mean in AutoTVM's template `conv2d_nchw.cuda`, so that its logs rebuild the kernels that they were measured on. With the
other knobs at their defaults the kernel is AutoTVM's: from `vthread` it differs in that the products read shared memory
without a copy in registers (NVIDIA's compiler makes that copy itself, with vector loads).

What the other knobs are for, each of them part of the fastest kernel of some layer (tuning_logs/nvidia-h200/):

* slices: threads share the sums of an output; see `staged`. Small images with many channels.
* pipeline: load the next step's operands while this one computes. Nearly everywhere.
* fetch: neighbouring threads copy neighbouring elements.
* weight_layout: the weight's channels innermost in shared memory, so that a thread's channels are one vector load;
  weight_pad shifts its rows by some banks, for copies without bank conflicts.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Columns, Knobs, nearest_factors
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d

from . import plans, staged
from .stages import axes, convolution, tiled_channels
from .tiles import shrink_to_shared_memory

OUTPUT = {"f": (1, 8, 4), "y": (1, 2, 2), "x": (1, 16, 2)}  # virtual threads, threads, and the outputs of each
REDUCTION = {"rc": 4, "ry": 3, "rx": 3}

SPATIAL = ("tile_f", "tile_y", "tile_x")
TAPS = ("tile_rc", "tile_ry", "tile_rx")


def usage(w: Conv2d, c: Columns) -> Usage:
    """What configs use of a device."""
    f, y, x, rc, ry, rx = (plans.tile(c, axis) for axis in (*SPATIAL, *TAPS))
    rc = rc * c["slices"]
    rows = (y - 1) * w.stride[0] + (ry - 1) * w.dilation[0] + 1
    columns = (x - 1) * w.stride[1] + (rx - 1) * w.dilation[1] + 1
    inputs = rc * rows * columns * (f if w.groups == w.O > 1 else 1)
    weights = rc * ry * rx * plans.weight_row(c, f)
    return plans.usage(c, SPATIAL, TAPS, (inputs, weights), outer=w.N * (w.groups if w.groups != w.O else 1))


def shares_inputs(w: Conv2d) -> bool:
    """Whether output channels have input channels in common, so that it pays to compute several of them together."""
    return w.groups == 1 or w.groups < w.C


@schedule("conv2d", usage=usage, promising=shares_inputs)
def direct(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Output tiles are (block, virtual thread, thread, local); reduction tiles (step, tap)."""
    channels = w.C // w.groups
    extents = {"f": tiled_channels(w), "y": w.P, "x": w.Q, "rc": channels, "ry": w.R, "rx": w.S}
    output, reduction = default_tiles(w, extents)
    spatial = tuple(
        k.split(f"tile_{axis}", extents[axis], 4, (-1, *factors), overhang=plans.searched_overhang(extents[axis]))
        for axis, factors in output.items()
    )
    taps = tuple(  # AutoTVM once confused the filter's rows and columns, so that old logs have factors that do not fit
        k.split(f"tile_{axis}", extents[axis], 2, (-1, tap), exact=True, lenient=True)
        for axis, tap in reduction.items()
    )
    how = plans.ask_how(k, w, slices=True)
    plans.demand(k, {f"tile_{axis}": extent for axis, extent in extents.items()}, SPATIAL, TAPS)
    plan = plans.Plan(spatial, taps, how)

    conv = convolution(s, w)
    outer, *loops = axes(s, w, conv)
    nest = staged.Loops(outer, loops[:3], loops[3:])
    sums = staged.accumulate(s, conv, nest, plan)
    shared = [s.cache_read(sums.products, operand, "shared") for operand in (0, 1)]
    s.compute_inline(s.get_sblock("padded"))  # only now: its bounds check then sits in the copy to shared memory
    staged.stage(s, sums.products, shared, staged.tile_output(s, sums, nest, plan), plan)


def default_tiles(w: Conv2d, extents: dict[str, int]) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """The inner factors of `OUTPUT` and `REDUCTION` that fit the workload and shared memory."""
    output = OUTPUT if shares_inputs(w) else {**OUTPUT, "f": (1, 4, 1)}  # each channel brings its own input
    names = {"f": "c", "y": "h", "x": "w", "rc": "rc", "ry": "rh", "rx": "rw"}
    fitting = {names[axis]: nearest_factors(extents[axis], factors) for axis, factors in output.items()}
    fitting |= {names[axis]: nearest_factors(extents[axis], (tap,), exact=True) for axis, tap in REDUCTION.items()}
    fitting = shrink_to_shared_memory(w, fitting)
    return {axis: fitting[names[axis]] for axis in OUTPUT}, {axis: fitting[names[axis]][0] for axis in REDUCTION}
