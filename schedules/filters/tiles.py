"""What the filter schedules share: tiles of the output, and the copy of what a tile reads.

A block computes a tile of the output, a thread one place of it: one sample of a signal, or one pixel of an image with
its channels one after another. Tuples of sizes have one number for each axis that the mask slides along: of samples,
or of rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.gpu import CONSTANT_BYTES, MAX_THREADS, STATIC_SHARED_BYTES
from tvmconv.knobs import Knobs
from tvmconv.workloads.filters import Filter

from ..vocabulary import (
    bind_grid,
    bind_innermost,
    hoist_guards,
    inline_consumers,
    inline_producers,
    own_loops,
    place,
    split_all,
    unroll,
)

Sizes = tuple[int, ...]

BLOCK = {1: (256,), 2: (8, 32)}  # threads by the number of axes, in whole warps along a row
MAX_UNROLLED = 512  # taps; a mask of 17x17 has 289
MAX_STEPS = 16  # of a copy, unrolled


def mask_is_constant(w: Filter) -> bool:
    """Whether the mask fits constant memory."""
    return math.prod(w.mask_shape) * _itemsize(w) <= CONSTANT_BYTES


def halo_is_shared(w: Filter) -> bool:
    """Whether the mask fits constant memory, and a tile of the default size with its halo shared memory."""
    return mask_is_constant(w) and _bytes_with_halo(w, BLOCK[len(w.mask_shape)]) <= STATIC_SHARED_BYTES


def ask_block(k: Knobs, w: Filter, default: Sequence[int] | None = None) -> Sizes:
    """Threads of a block, from knobs: powers of two, along each axis fewer than twice the signal with its ghost cells.

    An axis of one place has one thread: several would share what they stage, and TVM leave out the barrier that they
    then need (`tvmconv.compiler.barriers`).

    Args:
        k: gets the knobs `threads_x` and, for an image, `threads_y`.
        w: the workload.
        default: preferred numbers of threads, powers of two; by default `BLOCK`.
    """
    names = thread_knobs(w)
    threads = []
    for name, extent, preferred in zip(names, w.padded_shape, default or BLOCK[len(names)], strict=False):
        options = [2**i for i in range(MAX_THREADS.bit_length()) if 2**i < 2 * extent]
        threads.append(int(k.choice(name, options, default=min(preferred, options[-1]))))
    k.condition(
        f"a block has at most {MAX_THREADS} threads",
        lambda c: np.prod([c[name] for name in names], axis=0) <= MAX_THREADS,
    )
    return tuple(threads)


def ask_tile(k: Knobs, w: Filter) -> Sizes:
    """Threads of a block, from knobs, where they compute a tile that is in shared memory with its halo."""
    threads = ask_block(k, w)
    k.condition(
        f"a tile with its halo has at most {STATIC_SHARED_BYTES} bytes",
        lambda c: _bytes_with_halo(w, [c[name] for name in thread_knobs(w)]) <= STATIC_SHARED_BYTES,
    )
    return threads


def thread_knobs(w: Filter) -> tuple[str, ...]:
    """The knobs that `ask_block` asks, one for each axis that the mask slides along."""
    return ("threads_y", "threads_x")[-len(w.mask_shape) :]


def _bytes_with_halo(w: Filter, tile: Sequence[Any]) -> Any:
    """What a tile of the output reads at a time; the tile's sizes are numbers or columns of them."""
    seen = [size + taps - 1 for size, taps in zip(tile, w.mask_shape, strict=True)]
    return np.prod(seen, axis=0) * _itemsize(w)


def _itemsize(w: Filter) -> int:
    return np.dtype(w.storage).itemsize


def read_global(s: Schedule, w: Filter, threads: Sequence[int]) -> None:
    """Let each thread compute an output from global memory, with a bounds check at each tap."""
    sums = accumulate(s, w)
    inline_producers(s, sums)
    compute_tiles(s, sums, threads, threads)


def read_shared(s: Schedule, w: Filter, tile: Sequence[int], threads: Sequence[int]) -> None:
    """Let each thread compute an output from shared memory, where the block first copies its tile with the halo.

    The copy has zeros where the signal ends. The mask is in constant memory.

    Args:
        s: the schedule.
        w: the workload.
        tile: sizes of a tile of the output, at most `threads`.
        threads: threads of a block; those outside the tile only copy.
    """
    sums = accumulate(s, w)
    copy = s.cache_read(sums, 0, "shared")
    s.compute_inline(s.get_sblock("padded"))  # only now: its bounds check then sits in the copy to shared memory
    compute_tiles(s, sums, tile, threads, copy)
    place(s, K="constant")


def accumulate(s: Schedule, w: Filter) -> SBlockRV:
    """Let the sum be accumulated in a register; it is stored once, with its epilogue. Returns the block that sums."""
    sums = s.get_sblock("sum")
    inline_consumers(s, s.cache_write(sums, 0, "local"))
    return sums


def compute_tiles(
    s: Schedule, sums: SBlockRV, tile: Sequence[int], threads: Sequence[int], copy: SBlockRV | None = None
) -> None:
    """Let each block compute a tile of the output, a place a thread, with the taps unrolled.

    Args:
        s: the schedule.
        sums: the block that sums.
        tile: sizes of a tile of the output, at most `threads`.
        threads: threads of a block; those outside the tile idle.
        copy: the block that copies to shared memory what a tile reads, if there is one: a channel at a time, in strides
            of the threads. Its last axes are those of the output.
    """
    axes = len(tile)
    store = s.get_consumers(sums)[0]
    loops = s.get_loops(sums)
    places, channels, taps = loops[:axes], loops[axes:-axes], loops[-axes:]
    outputs = len(places + channels)
    blocks, inner = split_all(s, places, [[size] for size in tile])
    s.reorder(*blocks, *channels, *inner, *taps)
    _bind_blocks(s, blocks)
    step = (*blocks, *channels)[-1]
    s.reverse_compute_at(store, step, preserve_unit_loops=True)
    if copy is not None:
        s.compute_at(copy, step, preserve_unit_loops=True)
        unroll(s, _bind_strided(s, own_loops(s, copy)[-outputs:][:axes], threads), MAX_STEPS)
    for nest in (inner, own_loops(s, store)[:axes]):  # only now: where threads idle, the copy would cover their places
        _bind_strided(s, nest, threads)
    s.decompose_reduction(sums, taps[0])
    unroll(s, taps[0], MAX_UNROLLED)
    hoist_guards(s)


def _bind_strided(s: Schedule, loops: Sequence[LoopRV], threads: Sequence[int]) -> LoopRV:
    """Bind adjacent loops to threads, which step along each of them by the number of threads there.

    Neighbouring threads have neighbouring elements in each step. Returns the outermost loop over the steps.
    """
    steps, inner = split_all(s, loops, [[count] for count in threads])
    s.reorder(*steps, *inner)
    bind_innermost(s, "threadIdx", inner)
    return steps[0]


def _bind_blocks(s: Schedule, blocks: Sequence[LoopRV]) -> None:
    if len(blocks) == 1:
        s.bind(blocks[0], "blockIdx.x")
    else:
        bind_grid(s, s.add_unit_loop(blocks[0]), *blocks)
