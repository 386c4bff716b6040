"""Tiles of channel, height and width: shared memory for the block, registers for the thread.

From `default`: a block computes a tile of channels × rows × columns, a thread a small tile of that one. The block's
threads together copy the input and the weight that one step of the reduction needs to shared memory, so that each
element is read from global memory once a block instead of once a thread; each thread then copies its own part to
registers and accumulates there. A value in registers is used for every output of the thread's tile it belongs to: more
arithmetic for each byte read, at every level. Measured: tuning_logs/nvidia-h200/d2l.md.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d

from ..vocabulary import bind, bind_grid, channels_innermost, cooperative_copy, split_all
from .stages import accumulate_in_registers, axes, convolution
from .tiles import Tiles, declare_tiles

OUTPUT = {"c": (4, 8), "h": (2, 2), "w": (16, 4)}  # threads, and the outputs of each
REDUCTION = {"rc": (1, 1), "rh": (1, 1), "rw": (1, 3)}  # steps in registers, and taps of each


@schedule("conv2d")
def tiling(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Output tiles are (block, thread, local); reduction tiles are (outer, middle, inner)."""
    output, reduction = declare_tiles(w, k, OUTPUT, REDUCTION)
    tile_and_stage(s, w, output, reduction)


def tile_and_stage(s: Schedule, w: Conv2d, output: Tiles, reduction: Tiles) -> None:
    """Cut the output into blocks, virtual threads, threads and locals, and stage the operands through the hierarchy.

    Args:
        s: the schedule.
        w: the workload.
        output: for channel, height, width: factors (block, [virtual thread,] thread, local).
        reduction: for input channel, filter height, filter width: factors (outer, middle, inner). The outer loops step
            through shared memory, the middle ones through registers.
    """
    conv = convolution(s, w)
    store = accumulate_in_registers(s, conv)
    shared = [s.cache_read(conv, operand, "shared") for operand in (0, 1)]
    s.compute_inline(s.get_sblock("padded"))  # only now: its bounds check then sits in the copy to shared memory
    local = [s.cache_read(conv, operand, "local") for operand in (0, 1)]

    output = tuple(tile if len(tile) == 4 else (tile[0], 1, *tile[1:]) for tile in output)
    outer, channel, height, width, rc, rh, rw = axes(s, w, conv)
    block, vthread, thread, point = split_all(s, (channel, height, width), output)
    step, substep, tap = split_all(s, (rc, rh, rw), reduction)
    threads = channels_innermost(thread)
    s.reorder(outer, *block, *vthread, *threads, *step, *substep, *tap, *point)
    bind_grid(s, s.fuse(outer, block[0]), *block[1:])
    if any(virtual > 1 for _, virtual, _, _ in output):
        bind(s, "vthread", *vthread)
    bind(s, "threadIdx", *thread)

    s.reverse_compute_at(store, threads[-1])
    for copy in local:  # consumers before producers
        s.compute_at(copy, substep[-1], preserve_unit_loops=True)
    threads_c, threads_h, threads_w = (threads for _, _, threads, _ in output)
    for copy in shared:
        s.compute_at(copy, step[-1], preserve_unit_loops=True)
        cooperative_copy(s, copy, (threads_w, threads_h, threads_c), interleaved=False)
    s.decompose_reduction(conv, step[0])
