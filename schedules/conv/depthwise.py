"""AutoTVM's depthwise convolution: each channel has its own filter, so that there is little data reuse.

The knobs tile_f, tile_y, tile_x, auto_unroll_max_step and unroll_explicit have the meaning of AutoTVM's template
`depthwise_conv2d_nchw.cuda`: four-way tiles of channels × rows × columns. A block stages the input window of its whole
tile and the filters in shared memory once; threads copy their part to registers and accumulate. Each plane of a volume
has its own blocks; a signal is a single row.

The knob `operand_scope` is new: with "registers", threads read their operands directly from global memory. A 3×3 window
is read at most nine times, by neighbours, from the L1 cache, and no barrier is needed.
"""

import math
from typing import Any

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs, Tile
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import MAX_THREADS_Z, STATIC_SHARED_BYTES
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ..primitives import bind, bind_grid, block_loops, cooperative_copy, split_tiles
from .direct_config import MAX_ACCUMULATORS, MIN_THREADS, OUTPUT_LEVELS, select_max_overhang
from .plane_shape import PLANE_NDIM, PlaneShape
from .reduction import DTYPES, accumulate_in_registers, cache_operands, has_filter_per_channel, sort_axes_by_memory

DEFAULT_THREAD_SHAPES = ((8, 32), (8, 16), (8, 8), (4, 8))  # threads along rows and columns
DEFAULT_ROW_THREAD_SHAPES = ((1, 256), (1, 128), (1, 64), (1, 32))


def _count_staged_elements(w: Conv, num_channels: Any, num_rows: Any, num_columns: Any) -> tuple[Any, Any]:
    """Return the elements of the input and of the weight that a tile of channels, rows and columns needs."""
    plane_shape = PlaneShape.from_workload(w)
    window = [
        (outputs - 1) * stride + (taps - 1) * dilation + 1
        for outputs, stride, taps, dilation in zip(
            (1, num_rows, num_columns), plane_shape.strides, plane_shape.kernel_size, plane_shape.dilations, strict=True
        )
    ]
    return ceil_div(num_channels, w.O // w.groups) * math.prod(window), num_channels * plane_shape.num_taps


def _select_default_threads(w: Conv) -> tuple[int, int]:
    """Return the default threads along rows and columns, whose input window fits into shared memory."""
    thread_shapes = DEFAULT_THREAD_SHAPES if w.spatial_ndim > 1 else DEFAULT_ROW_THREAD_SHAPES
    allowed_shapes = (
        thread_shape
        for thread_shape in thread_shapes
        if get_itemsize(w.storage) * sum(_count_staged_elements(w, 1, *thread_shape)) <= STATIC_SHARED_BYTES
    )
    return next(allowed_shapes, thread_shapes[0])


def compute_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    _, num_rows, num_columns = PlaneShape.from_workload(w).output_size
    extents = {"tile_f": w.O, "tile_y": num_rows, "tile_x": num_columns}
    axis_tiles = [Tile.from_column(extent, OUTPUT_LEVELS, columns[knob]) for knob, extent in extents.items()]
    f, y, x = (tile.size for tile in axis_tiles)
    inputs, weights = _count_staged_elements(w, f, y, x)
    threads = math.prod(tile.thread for tile in axis_tiles)
    blocks = PlaneShape.from_workload(w).num_output_planes * math.prod(tile.block for tile in axis_tiles)
    return ResourceUsage(
        threads=threads,
        shared_bytes=np.where(columns["operand_scope"] == "shared", get_itemsize(w.storage) * (inputs + weights), 0),
        accumulators=math.prod(tile.local * tile.vthread for tile in axis_tiles),
        blocks=blocks,
        staged_elements=inputs + weights,
        input_read_ratio=inputs / (f * y * x),
        all_threads=blocks * threads,
    )


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=compute_usage,
    condition=has_filter_per_channel,
    search_if=has_filter_per_channel,
)
def depthwise(s: Schedule, w: Conv, k: Knobs) -> None:
    """Tile outputs as (block, virtual thread, thread, local)."""
    tile_f = k.tile("tile_f", w.O, OUTPUT_LEVELS)
    tile_y, tile_x = (
        k.tile(knob, extent, OUTPUT_LEVELS, {"thread": threads}, overhang=select_max_overhang(extent))
        for knob, extent, threads in zip(
            ("tile_y", "tile_x"), PlaneShape.from_workload(w).output_size[1:], _select_default_threads(w), strict=True
        )
    )
    max_unrolled_statements = k.choice("auto_unroll_max_step", (0, 256, 1500), 0)
    unrolls_explicitly = bool(k.choice("unroll_explicit", (0, 1), 0))
    in_shared = k.choice("operand_scope", ("shared", "registers"), "shared") == "shared"
    min_threads = min(MIN_THREADS, math.prod((tile_f.extent, tile_y.extent, tile_x.extent)))
    k.prune(f"at least {min_threads} threads", lambda c: compute_usage(w, c).threads >= min_threads)
    k.prune(f"at most {MAX_THREADS_Z} threads along the channels", lambda c: c["tile_f"][:, 2] <= MAX_THREADS_Z)
    multiplier = w.O // w.groups
    k.prune(  # otherwise TVM cannot determine which inputs a tile reads
        "channel tiles are multiples or divisors of the output channels per input channel",
        lambda c: np.all(
            [(tile % multiplier == 0) | (multiplier % tile == 0) for tile in c["tile_f"][:, :0:-1].cumprod(axis=1).T],
            axis=0,
        ),
    )
    k.prune(
        f"at most {MAX_ACCUMULATORS} accumulators per thread",
        lambda c: compute_usage(w, c).accumulators <= MAX_ACCUMULATORS,
    )

    conv = s.get_sblock("sum")
    store = accumulate_in_registers(s)
    copies = cache_operands(s, conv, "shared" if in_shared else "local")

    n, group, output, *space = s.get_loops(store)
    space = [*(s.add_unit_loop(space[0]) for _ in range(PLANE_NDIM - w.spatial_ndim)), *space]
    z, y, x = space
    block, vthread, thread, point = split_tiles(s, (s.fuse(group, output), y, x), (tile_f, tile_y, tile_x))
    s.reorder(n, z, *block, *vthread, *thread, *point)
    innermost_block = bind_grid(s, s.fuse(n, z, block[0]), *block[1:])
    bind(s, "vthread", *vthread)
    bind(s, "threadIdx", *thread)
    s.compute_at(conv, thread[-1], preserve_unit_loops=True)
    for copy in copies:
        s.compute_at(copy, innermost_block if in_shared else thread[-1], preserve_unit_loops=True)
        if in_shared:
            threads = (tile_x.thread, tile_y.thread, tile_f.thread)
            cooperative_copy(s, sort_axes_by_memory(w, block_loops(s, copy)), threads, coalesced=True)
    outermost = block_loops(s, conv)[0]
    s.decompose_reduction(conv, outermost)
    s.annotate(outermost, "pragma_auto_unroll_max_step", max_unrolled_statements)
    s.annotate(outermost, "pragma_unroll_explicit", unrolls_explicitly)
