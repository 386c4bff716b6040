"""Outputs and inputs in registers, vector loads, the mask in constant memory: as near the memory's limit as it gets.

A thread computes a strip of outputs, some rows of a few vectors side by side, and keeps their sums in registers. Of
each input row it loads the window that the strip sees, in aligned vectors: its own and the halo beside them, which its
neighbours in the warp load as well, so that all but one load is served by the L1 cache. Rows are image rows with their
channels interleaved; a tap to the right is `channels` elements further on. Nothing is staged in shared memory, and no
thread waits for another.

From `constant`, of a signal: per output one load instruction in place of one a tap, hence enough loads in flight to
keep the memory busy. A vector of four samples takes three vector loads for a mask of up to nine taps. A signal whose
length no vector divides has its last elements loaded and stored one by one.

Of an image: a thread walks down the input rows that its strip sees; each is loaded once and added to every output row
whose mask covers it: an input comes from the L1 cache once a thread and neighbouring column instead of once a tap.
Large masks would make the text too long; they are walked through row by row in a loop, which loads more and computes as
much. Rows that no vector divides take narrower ones, down to single elements.

Tensor expressions cannot say this: the sums of several output rows take up an input row while it is in registers, so
that the loop over input rows is the outer one, and which output row and which row of the mask meet depends on it. It is
written as TIR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.filters_te import finished

from ..vocabulary import place
from .tiles import mask_is_constant

VECTORS = (1, 2, 4)  # floats of a load
MAX_PRODUCTS = 2600  # in a kernel's text: NVRTC takes 3 s for them, and four times that for twice as many
MAX_HELD = 160  # sums and window of a thread, in registers
THREADS = (64, 4)  # of a block, across and down, by default
MANY_BLOCKS = 256  # as many as large GPUs have multiprocessors, or more


def fits(w: Filter) -> bool:
    """Whether a strip of one vector keeps to the limits, and the mask has room in constant memory."""
    least = {"vector": VECTORS[-1], "vectors": 1, "rows": 1, "once": 0}
    return mask_is_constant(w) and _products(w, least) <= MAX_PRODUCTS and _held(w, least) <= MAX_HELD


def usage(w: Filter, c: Columns) -> Usage:
    """What configs use of a device; `loads` are vector loads an output."""
    rows, down = (c.get(name, np.ones_like(c["vector"])) for name in ("rows", "threads_y"))
    outputs = rows * c["vector"] * c["vectors"]
    height, width, channels = w.image
    blocks = ceil_div(height, rows * down) * ceil_div(width * channels, c["vector"] * c["vectors"] * c["threads_x"])
    lines = np.where(c.get("once", 1) == 1, rows + w.mask[0] - 1, rows * w.mask[0])
    loads = lines * _window(w, c) / c["vector"] / outputs
    threads = c["threads_x"] * down
    return Usage(threads, np.zeros_like(threads), outputs, blocks, held=_held(w, c), loads=loads)


@schedule("filter1d", "filter2d", usage=usage, condition=fits, promising=fits)
def register(s: Schedule, w: Filter, k: Knobs) -> Schedule:
    """A thread computes a few vectors of neighbouring outputs; in an image, of a few rows."""
    return program(w, ask(w, k))


@dataclass(frozen=True)
class Strip:
    """The strip of a thread, and how threads make up a block.

    Attributes:
        vector: elements of a vector.
        vectors: vectors side by side.
        rows: output rows.
        threads: threads of a block along a row, and rows of threads.
        once: whether each input row is loaded once, with all rows of the mask unrolled; else it is loaded for each row
            of the mask that it meets, in a loop.
    """

    vector: int
    vectors: int
    rows: int
    threads: tuple[int, int]
    once: bool


def ask(w: Filter, k: Knobs) -> Strip:
    """The strip of a thread, from knobs; the defaults suit the mask."""
    height, width, channels = w.image
    widths = tuple(v for v in VECTORS if height == 1 or width * channels % v == 0)
    rows, once = _default(w, widths[-1])
    vector = k.choice("vector", widths, default=widths[-1])
    vectors = k.choice("vectors", (1, 2, 4), default=1)
    across, down = k.choice("threads_x", (32, 64, 128, 256), default=128 if height == 1 else THREADS[0]), 1
    if height > 1:
        rows = k.choice("rows", (1, 2, 4, 8, 16, 32), default=rows)
        down = k.choice("threads_y", (1, 2, 4, 8), default=THREADS[1])
    if w.mask[0] > 1:
        once = bool(k.choice("once", (1, 0), default=int(once)))
    k.condition(f"at most {MAX_PRODUCTS} products of a thread are unrolled", lambda c: _products(w, c) <= MAX_PRODUCTS)
    k.condition(f"a thread holds at most {MAX_HELD} sums and inputs", lambda c: _held(w, c) <= MAX_HELD)
    return Strip(vector, vectors, rows, (across, down), once)


def _default(w: Filter, vector: int) -> tuple[int, bool]:
    """Output rows of a strip, and whether it loads each input row once: the first such pair that the limits allow.

    More rows share more loads, and leave fewer threads to hide their latency: 2 for masks of 3 rows, 4 for 5 rows are
    the fastest on an H200 (tuning_logs/nvidia-h200/). Small images take fewer, for enough blocks to occupy a GPU.
    """
    (height, width, channels), mask_rows = w.image, w.mask[0]
    most = 1 if height == 1 else 2 if mask_rows <= 3 else 4 if mask_rows <= 5 else 8
    blocks_across = ceil_div(width * channels, vector * THREADS[0])
    while most > 1 and blocks_across * ceil_div(height, most * THREADS[1]) < MANY_BLOCKS:
        most //= 2
    ways = [(most, True), (ceil_div(most, 2), True), *((rows, False) for rows in (8, 4, 2, 1) if rows <= most)]
    for rows, once in ways:
        columns = {"vector": vector, "vectors": 1, "rows": rows, "once": int(once)}
        if _products(w, columns) <= MAX_PRODUCTS and _held(w, columns) <= MAX_HELD:
            break
    return rows, once


def program(w: Filter, strip: Strip) -> Schedule:
    """The filter with these strips, as a scheduled function of X, K and Y; the mask is in constant memory."""
    (height, width, channels), (mask_rows, mask_columns) = w.image, w.mask
    row = width * channels
    vector, vectors, rows, (across, down) = strip.vector, strip.vectors, strip.rows, strip.threads
    whole, rest = divmod(row, vector)  # vectors of a row, and the elements behind them, which only a signal has
    halo = ceil_div(_reach(w), vector)  # vectors on each side of the strip
    span = vectors + 2 * halo
    first = halo * vector - _reach(w)  # of the window's elements, the one that the first tap of the first output meets
    blocks_across = ceil_div(row, vector * vectors * across)
    blocks = blocks_across * ceil_div(height, rows * down)

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(X: T.Buffer(w.signal_shape), K: T.Buffer(w.mask_shape), Y: T.Buffer(w.signal_shape)):  # type: ignore[valid-type]
        sums = T.sblock_alloc_buffer((rows, vectors * vector), scope="local")
        window = T.sblock_alloc_buffer((span * vector,), scope="local")

        @T.inline
        def load(line, at):
            for g in T.unroll(span):
                if line >= 0 and line < height and at + g >= halo and at + g < halo + whole:
                    for lane in T.vectorized(vector):
                        window[g * vector + lane] = X[w.at(line, (at + g - halo) * vector + lane)]
                else:
                    for lane in T.vectorized(vector):
                        window[g * vector + lane] = T.float32(0)
                if rest > 0:  # noqa: SIM102  (decided as the function is parsed)
                    if line >= 0 and line < height and at + g == halo + whole:
                        for lane in T.unroll(rest):
                            window[g * vector + lane] = X[w.at(line, whole * vector + lane)]

        @T.inline
        def add(i, r):
            for s in T.unroll(mask_columns):
                for lane in T.unroll(vectors * vector):
                    sums[i, lane] += window[first + s * channels + lane] * K[w.tap(r, s)]

        @T.inline
        def store(line, at, i):
            for g in T.unroll(vectors):
                for lane in T.unroll(vector):
                    sums[i, g * vector + lane] = finished(w, sums[i, g * vector + lane])
                if line < height and at + g < whole:
                    for lane in T.vectorized(vector):
                        Y[w.at(line, (at + g) * vector + lane)] = sums[i, g * vector + lane]
                if rest > 0:  # noqa: SIM102  (decided as the function is parsed)
                    if line < height and at + g == whole:
                        for lane in T.unroll(rest):
                            Y[w.at(line, whole * vector + lane)] = sums[i, g * vector + lane]

        @T.inline
        def compute(top, left):
            for i in T.unroll(rows):
                for lane in T.unroll(vectors * vector):
                    sums[i, lane] = T.float32(0)
            if strip.once:
                for line in T.unroll(rows + mask_rows - 1):
                    load(top + line - mask_rows // 2, left)
                    for i in T.unroll(rows):
                        if line - i >= 0 and line - i < mask_rows:
                            add(i, line - i)
            else:
                for r in T.serial(mask_rows):
                    for i in T.unroll(rows):
                        load(top + i + r - mask_rows // 2, left)
                        add(i, r)
            for i in T.unroll(rows):
                store(top + i, left, i)

        for block in T.thread_binding(blocks, thread="blockIdx.x"):
            for ty in T.thread_binding(down, thread="threadIdx.y"):
                for tx in T.thread_binding(across, thread="threadIdx.x"):
                    compute(
                        (block // blocks_across * down + ty) * rows,
                        (block % blocks_across * across + tx) * vectors,
                    )
    # fmt: on
    s = Schedule(main)
    place(s, K="constant")
    return s


def _products(w: Filter, c: Mapping[str, Any]) -> Any:
    """Multiplications of a thread in the kernel's text."""
    outputs = c.get("rows", 1) * c["vector"] * c["vectors"]
    return outputs * w.mask[1] * np.where(c.get("once", 1) == 1, w.mask[0], 1)


def _held(w: Filter, c: Mapping[str, Any]) -> Any:
    """Sums and inputs that a thread holds in registers at a time."""
    return c.get("rows", 1) * c["vector"] * c["vectors"] + _window(w, c)


def _window(w: Filter, c: Mapping[str, Any]) -> Any:
    """Elements of an input row that a strip sees, in whole vectors."""
    return c["vector"] * (c["vectors"] + 2 * ceil_div(_reach(w), c["vector"]))


def _reach(w: Filter) -> int:
    """Elements between an output and the farthest input of its row."""
    return w.radius[1] * w.image[2]
