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

from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs, find_nearest_factors
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv2d

from .axis_tiles import shrink_to_shared_memory
from .bias_init import initialize_with_bias
from .block_tiling import pipeline_operand_copies, set_weight_layout, split_reduction, tile_output
from .direct_config import DirectTileConfig, TiledAxes, TiledAxis
from .reduction import DTYPES, cache_operands, get_conv_loops, get_tiled_channels, sort_axes_by_memory

OUTPUT_FACTORS = {"f": (1, 8, 4), "y": (1, 2, 2), "x": (1, 16, 2)}  # virtual threads, threads, and the outputs of each
REDUCTION_FACTORS = {"rc": 4, "ry": 3, "rx": 3}


def compute_usage(w: Conv2d, columns: Columns) -> ResourceUsage:
    """What configs use of a device."""
    config = DirectTileConfig.from_columns(columns, make_tiled_axes(w))
    f, y, x = (tile.size for tile in config.output)
    rc, ry, rx = (tile.tap for tile in config.reduction)
    rc = rc * config.sliced_k
    num_input_rows = (y - 1) * w.stride[0] + (ry - 1) * w.dilation[0] + 1
    num_input_columns = (x - 1) * w.stride[1] + (rx - 1) * w.dilation[1] + 1
    input_elements = rc * num_input_rows * num_input_columns * (f if w.groups == w.O > 1 else 1)
    weight_elements = rc * ry * rx * config.weight_row_elements(w, f)
    return config.compute_usage(
        w, (input_elements, weight_elements), num_outer_blocks=w.N * (w.groups if w.groups != w.O else 1)
    )


def has_shared_inputs(w: Conv2d) -> bool:
    """Whether output channels have input channels in common, so that it pays to compute several of them together."""
    return w.groups == 1 or w.groups < w.C


@schedule("conv2d", dtypes=DTYPES, usage=compute_usage, search_if=has_shared_inputs)
def direct(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Output tiles are (block, virtual thread, thread, local); reduction tiles (step, tap)."""
    config = DirectTileConfig.declare_knobs(k, w, make_tiled_axes(w), allow_sliced_k=True)
    outer, channel, space, depth, taps = get_conv_loops(s, w)
    blocks = split_reduction(s, s.get_sblock("sum"), outer, [channel, *space], [depth, *taps], config)
    operand_copies = cache_operands(s, blocks.multiply_block, "shared")
    products = str(s.get(blocks.multiply_block).name_hint)
    set_weight_layout(s, w, operand_copies[1], config)
    orders = [functools.partial(sort_axes_by_memory, w)] * 2
    pipeline_operand_copies(s, blocks.multiply_block, operand_copies, orders, tile_output(s, blocks, config), config)
    return initialize_with_bias(s, w, products, config, group_axis=1)


def make_tiled_axes(w: Conv2d) -> TiledAxes:
    """The axes that are tiled, with default tiles that fit the workload and shared memory."""
    extents = {"f": get_tiled_channels(w), "y": w.P, "x": w.Q, "rc": w.C // w.groups, "ry": w.R, "rx": w.S}
    output = (
        OUTPUT_FACTORS if has_shared_inputs(w) else {**OUTPUT_FACTORS, "f": (1, 4, 1)}
    )  # each channel brings its own input
    axis_names = {"f": "c", "y": "h", "x": "w", "rc": "rc", "ry": "rh", "rx": "rw"}
    fitting_factors = {
        axis_names[make_axis]: find_nearest_factors(extents[make_axis], factors)
        for make_axis, factors in output.items()
    }
    fitting_factors |= {
        axis_names[make_axis]: find_nearest_factors(extents[make_axis], (tap,), exact_divisors=True)
        for make_axis, tap in REDUCTION_FACTORS.items()
    }
    fitting_factors = shrink_to_shared_memory(w, fitting_factors)

    def make_axis(axis_name: str, levels: tuple[str, ...]) -> TiledAxis:
        # AutoTVM once confused the filter's rows and columns, so that old logs have factors that do not fit.
        default = dict(zip(levels, fitting_factors[axis_names[axis_name]], strict=True))
        return TiledAxis(
            f"tile_{axis_name}", extents[axis_name], default, allow_mismatch=axis_name in REDUCTION_FACTORS
        )

    return TiledAxes(
        tuple(make_axis(name, ("vthread", "thread", "local")) for name in OUTPUT_FACTORS),
        tuple(make_axis(name, ("tap",)) for name in REDUCTION_FACTORS),
    )
