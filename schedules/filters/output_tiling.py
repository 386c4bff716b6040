"""Common steps of the filter schedules: tiles of the output, and copies of their inputs.

A block computes a tile of the output, and a thread one position of it: a sample of a signal, or a pixel of an image
with its channels one after another. Tuples of sizes have one number for each axis along which the mask slides: samples,
or rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.space import Knobs
from tvmconv.target import CONSTANT_BYTES, MAX_THREADS_PER_BLOCK, STATIC_SHARED_BYTES
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.filters import Filter

from ..primitives import (
    bind_grid,
    bind_innermost,
    block_loops,
    hoist_guards,
    inline_consumers,
    inline_producers,
    set_memory_scope,
    split_all,
    unroll,
)

AxisSizes = tuple[int, ...]

DEFAULT_BLOCK = {1: (256,), 2: (8, 32)}  # threads by the number of axes, in whole warps along a row
MAX_UNROLLED_TAPS = 512  # a mask of 17x17 has 289 taps
MAX_UNROLLED_COPIES = 16  # copies per thread


def can_place_mask_in_constant_memory(w: Filter) -> bool:
    """Whether the mask fits constant memory."""
    return math.prod(w.mask_shape) * get_itemsize(w.storage) <= CONSTANT_BYTES


def can_stage_halo(w: Filter) -> bool:
    """Whether the mask fits constant memory, and a default tile with its halo fits shared memory."""
    return (
        can_place_mask_in_constant_memory(w)
        and _compute_tile_bytes(w, DEFAULT_BLOCK[len(w.mask_shape)]) <= STATIC_SHARED_BYTES
    )


def declare_block_knobs(k: Knobs, w: Filter, default: Sequence[int] | None = None) -> AxisSizes:
    """Declare the threads of a block as knobs, and return them.

    The options are powers of two, less than twice the padded signal along each axis. An axis with one position has one
    thread: several threads would share what they stage, and TVM would omit the barrier that they need
    (`tvmconv.compiler.barriers`). The default consists of powers of two.
    """
    knob_names = list_thread_knobs(w)
    threads = []
    for name, extent, preferred in zip(
        knob_names, w.padded_shape, default or DEFAULT_BLOCK[len(knob_names)], strict=False
    ):
        options = [2**i for i in range(MAX_THREADS_PER_BLOCK.bit_length()) if 2**i < 2 * extent]
        threads.append(int(k.choice(name, options, default=min(preferred, options[-1]))))
    k.require(
        f"a block has at most {MAX_THREADS_PER_BLOCK} threads",
        lambda c: np.prod([c[name] for name in knob_names], axis=0) <= MAX_THREADS_PER_BLOCK,
    )
    return tuple(threads)


def declare_tile_knobs(k: Knobs, w: Filter) -> AxisSizes:
    """Declare the threads of a block whose tile is in shared memory with its halo, and return them."""
    threads = declare_block_knobs(k, w)
    k.require(
        f"a tile with its halo has at most {STATIC_SHARED_BYTES} bytes",
        lambda c: _compute_tile_bytes(w, [c[name] for name in list_thread_knobs(w)]) <= STATIC_SHARED_BYTES,
    )
    return threads


def list_thread_knobs(w: Filter) -> tuple[str, ...]:
    """Return the names of the knobs that `declare_block_knobs` declares, one for each axis."""
    return ("threads_y", "threads_x")[-len(w.mask_shape) :]


def _compute_tile_bytes(w: Filter, tile: Sequence[Any]) -> Any:
    """Return the bytes of the inputs of an output tile; its sizes are numbers or columns."""
    input_sizes = [size + taps - 1 for size, taps in zip(tile, w.mask_shape, strict=True)]
    return np.prod(input_sizes, axis=0) * get_itemsize(w.storage)


def schedule_from_global_memory(s: Schedule, threads: Sequence[int]) -> None:
    """Let each thread compute an output from global memory, with a bounds check at each tap."""
    sum_block = cache_accumulator(s)
    inline_producers(s, sum_block)
    tile_output(s, sum_block, threads, threads)


def schedule_from_shared_memory(s: Schedule, tile: Sequence[int], threads: Sequence[int]) -> None:
    """Let each thread compute an output from shared memory, to which the block first copies its tile with the halo.

    The copy contains zeros past the ends of the signal. The mask is in constant memory. The threads outside the tile
    only copy.
    """
    sum_block = cache_accumulator(s)
    copy = s.cache_read(sum_block, 0, "shared")
    s.compute_inline(s.get_sblock("padded"))  # after `cache_read`, so that the copy contains the bounds check
    tile_output(s, sum_block, tile, threads, copy)
    set_memory_scope(s, K="constant")


def cache_accumulator(s: Schedule) -> SBlockRV:
    """Accumulate the sum in a register and store it once, with its epilogue; return the reduction block."""
    sum_block = s.get_sblock("sum")
    inline_consumers(s, s.cache_write(sum_block, 0, "local"))
    return sum_block


def tile_output(
    s: Schedule, sum_block: SBlockRV, tile: Sequence[int], threads: Sequence[int], copy: SBlockRV | None = None
) -> None:
    """Let each block compute a tile of the output, one position per thread, with unrolled taps.

    The tile is at most as large as the block, whose other threads idle. `copy` is a block that copies a tile's inputs
    to shared memory, one channel at a time; its last axes are those of the output.
    """
    num_axes = len(tile)
    store = s.get_consumers(sum_block)[0]
    loops = s.get_loops(sum_block)
    spatial_loops, channels, taps = loops[:num_axes], loops[num_axes:-num_axes], loops[-num_axes:]
    num_output_loops = len(spatial_loops + channels)
    blocks, inner_loops = split_all(s, spatial_loops, [[size] for size in tile])
    s.reorder(*blocks, *channels, *inner_loops, *taps)
    _bind_blocks(s, blocks)
    channel_loop = (*blocks, *channels)[-1]
    s.reverse_compute_at(store, channel_loop, preserve_unit_loops=True)
    if copy is not None:
        s.compute_at(copy, channel_loop, preserve_unit_loops=True)
        unroll(s, _bind_strided(s, block_loops(s, copy)[-num_output_loops:][:num_axes], threads), MAX_UNROLLED_COPIES)
    # The copy is placed before these loops are bound: otherwise it would not cover the halo of idle threads.
    for loop_nest in (inner_loops, block_loops(s, store)[:num_axes]):
        _bind_strided(s, loop_nest, threads)
    s.decompose_reduction(sum_block, taps[0])
    unroll(s, taps[0], MAX_UNROLLED_TAPS)
    hoist_guards(s)


def _bind_strided(s: Schedule, loops: Sequence[LoopRV], threads: Sequence[int]) -> LoopRV:
    """Bind adjacent loops to threads, which step along each loop by the number of threads, and return the outermost
    step loop.

    Neighbouring threads process neighbouring elements in each step.
    """
    step_loops, thread_loops = split_all(s, loops, [[count] for count in threads])
    s.reorder(*step_loops, *thread_loops)
    bind_innermost(s, "threadIdx", thread_loops)
    return step_loops[0]


def _bind_blocks(s: Schedule, blocks: Sequence[LoopRV]) -> None:
    if len(blocks) == 1:
        s.bind(blocks[0], "blockIdx.x")
    else:
        bind_grid(s, s.add_unit_loop(blocks[0]), *blocks)
