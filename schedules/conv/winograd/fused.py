"""Winograd's convolution in one kernel: neither the transformed inputs nor the products ever pass through memory.

`winograd` writes and reads α²/m² times the inputs and as many times the outputs: little on an H200, where it was faster
on all layers that were measured, more on a GPU with less bandwidth for its arithmetic. Here a block computes all α²
products of a tile of output channels × output tiles. For every few input channels its threads transform the inputs that
the block sees, straight into shared memory, beside the filters, which are transformed once by a kernel of its own; then
they multiply. In the end the products meet in shared memory, some channels at a time, and become outputs there. Blocks
of other output channels transform the same inputs again.

A thread has the sums of one or several of the α² places, for some channels and tiles. Threads are (place, channel,
tile), the tiles innermost, so that a warp's threads read few distinct words.

Tensor expressions cannot say this: the products' tiles are of a flat axis, which the outputs' are not. It is written as
TIR. Source of the idea: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", 2015; Yan, Wang, Chu,
"Optimizing Batched Winograd Convolution on GPUs", 2020.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)
from tvm.tirx.script.builder import ir

from tvmconv.arithmetic import ceil_div
from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.requirements import DILATION_1, ONE_GROUP, STRIDE_1, all_of
from tvmconv.workloads import Conv2d, epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.layout import stored

from ...program import (
    Buffer,
    Expr,
    allocate,
    block,
    both,
    parallel,
    parallel_blocks,
    serial,
    store,
    unrolled,
    vectorized,
    when,
    write,
    zeros,
)
from ...vocabulary import as_allocated, keep
from ..plan import SUM_BYTES
from ..sums import DTYPES
from .cook_toom import Matrix, transforms
from .fused_tile import Tile, ask, usage
from .plan import applies
from .stages import transposed, weighted

TRANSFORMING = 128  # threads of a block that transforms filters


@schedule("conv2d", dtypes=DTYPES, usage=usage, condition=all_of(ONE_GROUP, STRIDE_1, DILATION_1, applies))
def winograd_fused(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """A block's tile is output channels × output tiles, each (thread, local), for all places."""
    written = write(w, Program(ask(w, k)).emit)
    keep(written, "K")
    as_allocated(written)
    return written


class Program:
    """The kernels of a tile."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        self.w, self.grid = tile.w, tile.grid
        self.alpha = self.grid.alpha
        self.A, self.B, self.G = transforms(self.grid.m, self.w.R)

    def emit(self, arguments: dict[str, Buffer]) -> None:
        """Write both kernels."""
        self.arguments = arguments
        tile = self.tile
        down, across = tile.blocks
        self.channels = down * tile.channels  # with those of zeros that fill the last block
        self.filters = allocate("U", tile.all_places * tile.depth * self.channels, ACCUMULATOR, "global")
        self._transform_filters()
        with ExitStack() as stack:
            block_y, block_x = stack.enter_context(parallel_blocks(down, across))
            thread = stack.enter_context(parallel(tile.threads, "threadIdx.x"))
            self._compute(block_x, block_y, thread)

    # The filters

    def _transform_filters(self) -> None:
        """Each thread transforms one filter of one channel, or writes zeros beyond the last of them."""
        tile, w = self.tile, self.w
        count = tile.depth * self.channels
        blocks = ceil_div(count, TRANSFORMING)
        with parallel(blocks, "blockIdx.x") as of_grid, parallel(TRANSFORMING, "threadIdx.x") as thread:
            at = of_grid * TRANSFORMING + thread
            c, o = at // self.channels, at % self.channels
            there = both(c < w.C, o < w.O)
            with when(at < count), block("filters"):
                values = along_both(lambda r, s: self._read("K", there, (o, c, r, s)), transposed(self.G))
                for place, value in enumerate(values):
                    store(self.filters, place * count + at, value)

    def _read(self, name: str, there: Expr, index: Sequence[Expr]) -> Expr:
        """An element of X or K, whose axes are given channels second; zero where it is not there."""
        value = T.Cast(ACCUMULATOR, self.arguments[name][tuple(stored(self.w.layout, index))])
        return T.if_then_else(there, value, T.float32(0))

    # The products

    def _compute(self, block_x: Expr, block_y: Expr, thread: Expr) -> None:
        tile = self.tile
        self.thread = thread
        self.first_tile, self.first_channel = block_x * tile.tiles, block_y * tile.channels
        self.shared = allocate("staged", tile.shared_bytes // SUM_BYTES, ACCUMULATOR, "shared")
        self.inputs_at = tile.all_places * tile.taps * tile.channels  # behind the filters
        across, down = tile.threads_x, tile.threads_y
        self.of_tile, self.of_channel = thread % across, thread // across % down
        self.of_place = thread // (across * down)
        self.sums = allocate("sums", tile.accumulators, ACCUMULATOR)
        zeros(self.sums, tile.accumulators)
        with serial(tile.depth // tile.taps, "step") as step:
            self._copy_filters(step)
            self._transform_inputs(step)
            self._multiply()
        self._transform_outputs()

    def _copy_filters(self, step: Expr) -> None:
        """Copy the filters of some input channels, four neighbouring output channels a thread at a time."""
        tile = self.tile
        row, vector = tile.channels, tile.vector
        vectors = tile.all_places * tile.taps * row // vector
        with unrolled(ceil_div(vectors, tile.threads), "i") as i:
            unit = i * tile.threads + self.thread
            with when(unit < vectors if vectors % tile.threads else True):
                o, rest = unit % (row // vector) * vector, unit // (row // vector)
                c, place = rest % tile.taps, rest // tile.taps
                source = (place * tile.depth + step * tile.taps + c) * self.channels + self.first_channel + o
                with vectorized(vector) as lane:
                    store(self.shared, unit * vector + lane, self.filters[source + lane])

    def _transform_inputs(self, step: Expr) -> None:
        """Each thread transforms the inputs of one tile and channel, or of several."""
        tile, grid, w = self.tile, self.grid, self.w
        count = tile.taps * tile.tiles
        with serial(ceil_div(count, tile.threads), "i") as i:
            unit = i * tile.threads + self.thread
            with when(unit < count if count % tile.threads else True), block("transform"):
                c = step * tile.taps + unit // tile.tiles
                p = self.first_tile + unit % tile.tiles
                n, top, left = grid.place(p)
                there = both(p < grid.count, c < w.C)

                def read(i: int, j: int) -> Expr:
                    row, column = top + (i - w.before[0]), left + (j - w.before[1])
                    inside = both(there, row >= 0, row < w.H, column >= 0, column < w.W)
                    return self._read("X", inside, (n, c, row, column))

                for place, value in enumerate(along_both(read, self.B)):
                    store(self.shared, self.inputs_at + place * count + unit, value)

    def _multiply(self) -> None:
        """Add the products of the input channels in shared memory to the sums."""
        tile = self.tile
        channels, tiles = tile.local_y, tile.local_x
        u, v = allocate("u", channels, ACCUMULATOR), allocate("v", tiles, ACCUMULATOR)
        with unrolled(tile.places, "b") as b, unrolled(tile.taps, "c") as c:
            row = (self.of_place * tile.places + b) * tile.taps + c
            with unrolled(channels, "i") as i:
                store(u, i, self.shared[row * tile.channels + self.of_channel * channels + i])
            with unrolled(tiles, "j") as j:
                store(v, j, self.shared[self.inputs_at + row * tile.tiles + self.of_tile * tiles + j])
            with unrolled(channels, "i") as i, unrolled(tiles, "j") as j:
                at = (b * channels + i) * tiles + j
                store(self.sums, at, self.sums[at] + u[i] * v[j])

    # The outputs

    def _transform_outputs(self) -> None:
        """Let the products of some channels meet in shared memory, and each thread make the outputs of a tile there."""
        tile, width = self.tile, self.tile.tiles
        each = tile.together // tile.threads_y  # of a thread's channels
        items = tile.together * width
        for part in range(tile.local_y // each):
            with unrolled(tile.places, "b") as b, unrolled(each, "i") as i, unrolled(tile.local_x, "j") as j:
                place = self.of_place * tile.places + b
                row = place * tile.together + self.of_channel * each + i
                at = (b * tile.local_y + part * each + i) * tile.local_x + j
                store(self.shared, row * width + self.of_tile * tile.local_x + j, self.sums[at])
            with serial(ceil_div(items, tile.threads), "i") as i:
                unit = i * tile.threads + self.thread
                with when(unit < items if items % tile.threads else True), block("outputs"):
                    met = unit // width
                    channel = met // each * tile.local_y + part * each + met % each
                    self._store_outputs(unit, items, self.first_channel + channel, self.first_tile + unit % width)

    def _store_outputs(self, unit: Expr, items: int, o: Expr, p: Expr) -> None:
        """Transform the products of one tile and channel, and store them with the epilogue."""
        w, grid = self.w, self.grid
        values = along_both(lambda i, j: self.shared[(i * self.alpha + j) * items + unit], self.A)
        outputs = hold("y", values)
        n, top, left = grid.place(p)
        with when(both(o < w.O, p < grid.count)):
            for i, j in itertools.product(range(grid.m), repeat=2):
                row, column = top + i, left + j
                with when(both(row < w.P if w.P % grid.m else True, column < w.Q if w.Q % grid.m else True)):
                    at = tuple(stored(w.layout, (n, o, row, column)))
                    ir.buffer_store(self.arguments["Y"], self._finished(outputs[i * grid.m + j], at, o), list(at))

    def _finished(self, value: Expr, at: Sequence[Expr], o: Expr) -> Expr:
        def read(name: str) -> Expr:
            tensor = self.arguments[name]
            return T.Cast(ACCUMULATOR, tensor[tuple(at)] if len(tensor.shape) > 1 else tensor[o])

        return T.Cast(self.w.storage, epilogue.compute(self.w.epilogue, value, read))


def along_both(read: Callable[[int, int], Expr], matrix: Matrix) -> Iterator[Expr]:
    """The elements of matrixᵀ · X · matrix, one row after another.

    X is read a column at a time, so that few of its elements are in registers together.
    """
    columns, size = transposed(matrix), len(matrix)
    half = allocate("half", len(columns) * size, ACCUMULATOR)
    for j in range(size):
        column = hold("column", (read(i, j) for i in range(size)))
        for u, weights in enumerate(columns):
            store(half, u * size + j, weighted(column.__getitem__, weights))
    for u in range(len(columns)):
        row = [half[u * size + j] for j in range(size)]
        for weights in columns:
            yield weighted(row.__getitem__, weights)


def hold(name: str, values: Iterable[Expr]) -> list[Expr]:
    """Values in registers, computed in their order."""
    found = list(values)
    held = allocate(name, len(found), ACCUMULATOR)
    for i, value in enumerate(found):
        store(held, i, value)
    return [held[i] for i in range(len(found))]
