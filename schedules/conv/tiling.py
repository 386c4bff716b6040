"""Tiles of channel, height and width: shared memory for the block, registers for the thread.

From `default`: a block computes a tile of channels × rows × columns, a thread a small tile of that one. The block's
threads together copy the input and the weight that one step of the reduction needs to shared memory, so that each
element is read from global memory once a block instead of once a thread; each thread then copies its own part to
registers and accumulates there. A value in registers is used for every output of the thread's tile it belongs to: more
arithmetic for each byte read, at every level. Measured: tuning_logs/nvidia-h200/d2l.md.
"""

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d

from ..vocabulary import bind, bind_grid, channels_innermost, cooperative_copy, own_loops, split_tiles
from .sums import DTYPES, accumulate_in_registers, in_memory_order, loops, stage_operands
from .tiles import Tiles, ask_tiles

OUTPUT = {"c": {"thread": 4, "local": 8}, "h": {"thread": 2, "local": 2}, "w": {"thread": 16, "local": 4}}
REDUCTION = {  # a step of the block is staged in shared memory, a substep of it in registers
    "rc": {"substep": 1, "tap": 1},
    "rh": {"substep": 1, "tap": 1},
    "rw": {"substep": 1, "tap": 3},
}


@schedule("conv2d", dtypes=DTYPES)
def tiling(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Output tiles are (block, thread, local); reduction tiles are (step, substep, tap)."""
    compute_tiles(s, w, ask_tiles(k, w, OUTPUT, REDUCTION))


def compute_tiles(s: Schedule, w: Conv2d, tiles: Tiles) -> None:
    """Cut output and reduction into tiles, and stage the operands of each step and substep."""
    conv = s.get_sblock("sum")
    store = accumulate_in_registers(s)
    shared = stage_operands(s, conv, "shared")
    local = [s.cache_read(conv, operand, "local") for operand in (0, 1)]

    outer, channel, space, depth, taps = loops(s, w)
    block, thread, point = split_tiles(s, (channel, *space), tiles.output)
    step, substep, tap = split_tiles(s, (depth, *taps), tiles.reduction)
    threads = channels_innermost(thread)
    s.reorder(outer, *block, *threads, *step, *substep, *tap, *point)
    bind_grid(s, s.fuse(outer, block[0]), *block[1:])
    bind(s, "threadIdx", *thread)

    s.reverse_compute_at(store, threads[-1])
    stage(s, w, tiles, (shared, step), (local, substep))
    s.decompose_reduction(conv, step[0])


Copies = tuple[list[SBlockRV], list[LoopRV]]  # of both operands, and the loops in which they are made


def stage(s: Schedule, w: Conv2d, tiles: Tiles, shared: Copies, local: Copies) -> None:
    """Copy the operands to shared memory at each step, all threads together, and to registers at each substep."""
    copies, substep = local
    for copy in copies:  # consumers before producers
        s.compute_at(copy, substep[-1], preserve_unit_loops=True)
    copies, step = shared
    z, y, x = (tile.thread for tile in tiles.output)
    for copy in copies:
        s.compute_at(copy, step[-1], preserve_unit_loops=True)
        cooperative_copy(s, in_memory_order(w, own_loops(s, copy)), (x, y, z), interleaved=False)
