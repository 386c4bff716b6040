"""AutoTVM's depthwise convolution: each channel has its own filter, so that there is little to share, and less to sum.

The knobs tile_f, tile_y, tile_x, auto_unroll_max_step and unroll_explicit mean what they mean in AutoTVM's template
`depthwise_conv2d_nchw.cuda`: four-way tiles of channels × rows × columns; a block stages the window of its whole tile,
and the filters, in shared memory once; threads copy their part to registers and sum. A volume's planes have blocks of
their own; a signal is one row.

The knob `stage` is new: with "registers", threads read what they need from global memory themselves. A 3×3 window is
read nine times at most, by neighbours, out of the L1 cache; there is no barrier to wait for.
"""

import math
from typing import Any

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import MAX_THREADS_Z, STATIC_SHARED_BYTES
from tvmconv.knobs import Columns, Knobs, Tile
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv

from ..vocabulary import bind, bind_grid, cooperative_copy, own_loops, split_tiles
from .plan import MAX_ACCUMULATORS, MIN_THREADS, OUTPUT_LEVELS, searched_overhang
from .planes import RANK, Planes
from .sums import DTYPES, accumulate_in_registers, has_filter_per_channel, in_memory_order, stage_operands
from .tiles import element_bytes

THREADS = ((8, 32), (8, 16), (8, 8), (4, 8))  # along rows and columns
THREADS_OF_A_ROW = ((1, 256), (1, 128), (1, 64), (1, 32))


def tiles(w: Conv, c: Columns) -> list[Tile]:
    """The tiles of channels, rows and columns of many configs."""
    _, rows, columns = Planes.of(w).out
    extents = {"tile_f": w.O, "tile_y": rows, "tile_x": columns}
    return [Tile.of_column(extent, OUTPUT_LEVELS, c[knob]) for knob, extent in extents.items()]


def accumulators(tiled: list[Tile]) -> np.ndarray:
    """Sums of a thread."""
    return math.prod(tile.local * tile.vthread for tile in tiled)


def _staged(w: Conv, f: Any, y: Any, x: Any) -> tuple[Any, Any]:
    """Elements of the input and of the weight that a tile of so many channels, rows and columns needs."""
    sizes = Planes.of(w)
    window = [
        (outputs - 1) * step + (taps - 1) * dilation + 1
        for outputs, step, taps, dilation in zip((1, y, x), sizes.steps, sizes.taps, sizes.dilations, strict=True)
    ]
    return ceil_div(f, w.O // w.groups) * math.prod(window), f * sizes.all_taps


def _threads(w: Conv) -> tuple[int, int]:
    """The default threads along rows and columns: those whose window fits, which a dilation makes wide."""
    of_a_plane = THREADS if w.rank > 1 else THREADS_OF_A_ROW
    fitting = (each for each in of_a_plane if element_bytes(w) * sum(_staged(w, 1, *each)) <= STATIC_SHARED_BYTES)
    return next(fitting, of_a_plane[0])


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    tiled = tiles(w, c)
    f, y, x = (tile.size for tile in tiled)
    inputs, weights = _staged(w, f, y, x)
    threads = math.prod(tile.thread for tile in tiled)
    blocks = Planes.of(w).count * math.prod(tile.block for tile in tiled)
    return Usage(
        threads=threads,
        shared_bytes=np.where(c["stage"] == "shared", element_bytes(w) * (inputs + weights), 0),
        accumulators=accumulators(tiled),
        blocks=blocks,
        staged_words=inputs + weights,
        overlap=inputs / (f * y * x),
        all_threads=blocks * threads,
    )


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=usage,
    condition=has_filter_per_channel,
    promising=has_filter_per_channel,
)
def depthwise(s: Schedule, w: Conv, k: Knobs) -> None:
    """Output tiles are (block, virtual thread, thread, local)."""
    tile_f = k.tile("tile_f", w.O, OUTPUT_LEVELS)
    tile_y, tile_x = (
        k.tile(knob, extent, OUTPUT_LEVELS, {"thread": threads}, overhang=searched_overhang(extent))
        for knob, extent, threads in zip(("tile_y", "tile_x"), Planes.of(w).out[1:], _threads(w), strict=True)
    )
    max_step = k.choice("auto_unroll_max_step", (0, 256, 1500), 0)
    explicit = bool(k.choice("unroll_explicit", (0, 1), 0))
    in_shared = k.choice("stage", ("shared", "registers"), "shared") == "shared"
    fewest = min(MIN_THREADS, math.prod((tile_f.extent, tile_y.extent, tile_x.extent)))
    k.search_only(f"at least {fewest} threads", lambda c: math.prod(tile.thread for tile in tiles(w, c)) >= fewest)
    k.search_only(f"at most {MAX_THREADS_Z} threads along the channels", lambda c: c["tile_f"][:, 2] <= MAX_THREADS_Z)
    multiplier = w.O // w.groups
    k.search_only(  # TVM would not find which inputs the tile reads
        "tiles of channels are multiples of those of one input channel, or divide them",
        lambda c: np.all(
            [(tile % multiplier == 0) | (multiplier % tile == 0) for tile in c["tile_f"][:, :0:-1].cumprod(axis=1).T],
            axis=0,
        ),
    )
    k.search_only("few enough accumulators", lambda c: accumulators(tiles(w, c)) <= MAX_ACCUMULATORS)

    conv = s.get_sblock("sum")
    store = accumulate_in_registers(s)
    copies = stage_operands(s, conv, "shared" if in_shared else "local")

    n, group, output, *space = s.get_loops(store)
    space = [*(s.add_unit_loop(space[0]) for _ in range(RANK - w.rank)), *space]
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
            cooperative_copy(s, in_memory_order(w, own_loops(s, copy)), threads, interleaved=True)
    outermost = own_loops(s, conv)[0]
    s.decompose_reduction(conv, outermost)
    s.annotate(outermost, "pragma_auto_unroll_max_step", max_step)
    s.annotate(outermost, "pragma_unroll_explicit", explicit)
