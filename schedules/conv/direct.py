"""AutoTVM's direct convolution: four-way tiles of channels × rows × columns, its knobs, and some more.

The knobs tile_f, tile_y, tile_x, tile_rc, tile_ry, tile_rx, auto_unroll_max_step and unroll_explicit have the meaning
of AutoTVM's template `conv2d_nchw.cuda`, so that its logs rebuild the measured kernels. With the other knobs at their
defaults the kernel is AutoTVM's. It differs from `vthread` in that the products read shared memory without a copy in
registers; NVIDIA's compiler makes that copy itself, with vector loads.

Each of the other knobs is part of the fastest kernel of some layer (tuning_logs/nvidia-h200/):

* sliced_k: threads share the reduction of an output, for small images with many channels; see `block_tiling`.
* pipeline: the next k-tile's operands are loaded while this one is computed; useful for nearly all layers.
* copy_order: neighbouring threads copy neighbouring elements.
* weight_layout: output channels are innermost in the weight's shared memory, so that a thread's channels are one vector
  load. weight_pad shifts its rows by some banks, for copies without bank conflicts.
"""

import functools

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv2d
from tvmconv.workloads.features import ALL_FEATURES

from .axis_tiles import fit_default_factors, list_extents
from .bias_init import initialize_with_bias
from .block_tiling import pipeline_operand_copies, set_weight_layout, split_reduction, tile_output
from .direct_config import DirectTileConfig, TiledAxes, TiledAxis
from .reduction import DTYPES, cache_operands, get_conv_loops, sort_axes_by_memory

OUTPUT_FACTORS = {"c": (1, 8, 4), "h": (1, 2, 2), "w": (1, 16, 2)}  # virtual threads, threads, outputs per thread
REDUCTION_FACTORS = {"rc": (4,), "rh": (3,), "rw": (3,)}
KNOB_NAMES = {"c": "tile_f", "h": "tile_y", "w": "tile_x", "rc": "tile_rc", "rh": "tile_ry", "rw": "tile_rx"}


def compute_usage(w: Conv2d, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
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
    """Return whether output channels share input channels, so that computing several together saves loads."""
    return w.groups == 1 or w.groups < w.C


@schedule("conv2d", dtypes=DTYPES, usage=compute_usage, search_if=has_shared_inputs, features=ALL_FEATURES)
def direct(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Tile outputs as (block, virtual thread, thread, local) and reductions as (step, tap)."""
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
    """Return the tiled axes, with default tiles that fit the workload and shared memory."""
    # In a depthwise convolution each channel needs its own input.
    output = OUTPUT_FACTORS if has_shared_inputs(w) else {**OUTPUT_FACTORS, "c": (1, 4, 1)}
    extents, factors = list_extents(w), fit_default_factors(w, {**output, **REDUCTION_FACTORS})

    def make_axis(axis: str, levels: tuple[str, ...]) -> TiledAxis:
        # Older versions of AutoTVM swapped the filter's rows and columns, so their logs contain mismatched factors.
        default = dict(zip(levels, factors[axis], strict=True))
        return TiledAxis(KNOB_NAMES[axis], extents[axis], default, allow_mismatch=axis in REDUCTION_FACTORS)

    return TiledAxes(
        tuple(make_axis(axis, ("vthread", "thread", "local")) for axis in OUTPUT_FACTORS),
        tuple(make_axis(axis, ("tap",)) for axis in REDUCTION_FACTORS),
    )
