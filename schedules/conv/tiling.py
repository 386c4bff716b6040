"""Tiles of channel, height and width: shared memory for the block, registers for the thread.

It differs from `default` in that a block computes a tile of channels × rows × columns, and a thread a small tile of it.
For each step of the reduction, the threads of a block together copy the input and the weight to shared memory, so that
each element is read from global memory once per block instead of once per thread. Each thread then copies its part to
registers and accumulates there. A value in registers is used for all outputs of the thread's tile to which it
contributes, so that every level does more arithmetic per byte. Measured: tuning_logs/nvidia-h200/d2l/d2l.md.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Conv2d
from tvmconv.workloads.features import ALL_FEATURES

from ..primitives import bind, bind_grid, block_loops, cooperative_copy, order_channels_innermost, split_tiles
from .axis_tiles import AxisTiles, declare_tile_knobs
from .reduction import DTYPES, accumulate_in_registers, cache_operands, get_conv_loops, sort_axes_by_memory

OUTPUT_FACTORS = {"c": {"thread": 4, "local": 8}, "h": {"thread": 2, "local": 2}, "w": {"thread": 16, "local": 4}}
REDUCTION_FACTORS = {  # a step is staged in shared memory, a substep in registers
    "rc": {"substep": 1, "tap": 1},
    "rh": {"substep": 1, "tap": 1},
    "rw": {"substep": 1, "tap": 3},
}


@schedule("conv2d", dtypes=DTYPES, features=ALL_FEATURES)
def tiling(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Tile outputs as (block, thread, local) and reductions as (step, substep, tap)."""
    tile_convolution(s, w, declare_tile_knobs(k, w, OUTPUT_FACTORS, REDUCTION_FACTORS))


def tile_convolution(s: Schedule, w: Conv2d, tiles: AxisTiles) -> None:
    """Tile the output, with or without virtual threads, and the reduction, and stage the operands of both levels.

    All threads copy the operands to shared memory at each step; each thread copies its part to registers at each
    substep.
    """
    conv = s.get_sblock("sum")
    store = accumulate_in_registers(s)
    shared = cache_operands(s, conv, "shared")
    local = [s.cache_read(conv, operand, "local") for operand in (0, 1)]

    outer_loop, channel, space, depth, taps = get_conv_loops(s, w)
    block, *vthread, thread, point = split_tiles(s, (channel, *space), tiles.output)
    step_loops, substep_loops, tap_loops = split_tiles(s, (depth, *taps), tiles.reduction)
    vthread_loops = [loop for loops in vthread for loop in loops]
    threads = order_channels_innermost(thread)
    s.reorder(outer_loop, *block, *vthread_loops, *threads, *step_loops, *substep_loops, *tap_loops, *point)
    bind_grid(s, s.fuse(outer_loop, block[0]), *block[1:])
    if vthread_loops and any(tile.vthread > 1 for tile in tiles.output):
        bind(s, "vthread", *vthread_loops)
    bind(s, "threadIdx", *thread)

    s.reverse_compute_at(store, threads[-1])
    for copy in local:  # consumers before producers
        s.compute_at(copy, substep_loops[-1], preserve_unit_loops=True)
    z, y, x = (tile.thread for tile in tiles.output)
    for copy in shared:
        s.compute_at(copy, step_loops[-1], preserve_unit_loops=True)
        cooperative_copy(s, sort_axes_by_memory(w, block_loops(s, copy)), (x, y, z), coalesced=False)
    s.decompose_reduction(conv, step_loops[0])
