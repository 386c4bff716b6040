"""Strips: what schedules that write their own TIR for images with channels last share.

A *strip* is what a thread computes: a vector of neighbouring output channels at a few neighbouring pixels, rows ×
columns of them. Threads of a block lie side by side along the channels (x), the columns (y) and the rows (z), so that
what a warp reads or writes at a time is one contiguous run, or several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.gpu import MAX_BLOCKS_YZ
from tvmconv.knobs import Columns, Tile
from tvmconv.workloads import Conv2d, epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR

from .tiles import element_bytes

LEVELS = ("block", "thread", "local")
LOAD_BYTES = 16  # that one instruction moves at most
VECTORS = (8, 4, 2, 1)  # channels of a thread
_PLAIN = {"bfloat16": "uint16"}  # what NumPy calls an element type of that size


@dataclass(frozen=True)
class Strip:
    """The strip of a thread, and how threads make up a block; of one config, or as columns of many.

    Attributes:
        vector: channels.
        channels: a tile of the vectors: (block, thread).
        rows: a tile of the output's rows, of `LEVELS`.
        columns: a tile of its columns, likewise.
    """

    vector: Any
    channels: Tile
    rows: Tile
    columns: Tile

    @classmethod
    def of(cls, w: Conv2d, vector: Any, threads: Any, rows: Tile, columns: Tile) -> Strip:
        """The strips of these tiles, with so many threads along the channels."""
        vectors = w.O // vector
        return cls(vector, Tile(vectors, {"block": -(-vectors // threads), "thread": threads}), rows, columns)

    @classmethod
    def of_columns(cls, w: Conv2d, c: Columns) -> Strip:
        """The strips of many configs."""
        rows, columns = (
            Tile.of_column(extent, LEVELS, c[knob]) for knob, extent in (("tile_y", w.P), ("tile_x", w.Q))
        )
        vectors = w.O // c["vector"]
        threads = c["threads_c"]
        return cls(c["vector"], Tile(vectors, {"block": -(-vectors // threads), "thread": threads}), rows, columns)

    @property
    def threads(self) -> Any:
        """Threads of a block."""
        return self.channels.thread * self.rows.thread * self.columns.thread

    @property
    def sums(self) -> Any:
        """Outputs of a thread."""
        return self.vector * self.rows.local * self.columns.local

    def blocks(self, w: Conv2d) -> Any:
        """Blocks of the grid."""
        return w.N * self.channels.block * self.rows.block * self.columns.block


class Place(NamedTuple):
    """Where a thread is.

    Attributes:
        image: of the batch.
        first: the first channel of its block.
        vector: its vector of channels in the whole tensor; may lie behind the last one.
        row: its first output row.
        column: its first output column.
        number: its number in the block.
    """

    image: Any
    first: Any
    vector: Any
    row: Any
    column: Any
    number: Any


def vectors(w: Conv2d, divides: Callable[[int], bool]) -> tuple[int, ...]:
    """The numbers of output channels that a thread may have: one store's at most, and what `divides` says."""
    most = LOAD_BYTES // element_bytes(w)
    return tuple(v for v in VECTORS if v <= most and w.O % v == 0 and divides(v))


def taps_of(w: Conv2d) -> tuple[int, int]:
    """From an output's first input to its last, in rows and in columns, both included."""
    rows, columns = ((size - 1) * d + 1 for size, d in zip((w.R, w.S), w.dilation, strict=True))
    return rows, columns


def arguments(w: Conv2d) -> dict[str, Any]:
    """The function's arguments by name."""
    described = zip(w.argument_names, w.argument_shapes, w.argument_dtypes, strict=True)
    return {name: T.arg(name, T.Buffer(shape, dtype)) for name, shape, dtype in described}


def local(name: str, shape: Sequence[int], dtype: str) -> Any:
    """An array in registers."""
    return IRBuilder.name(name, T.sblock_alloc_buffer(tuple(shape), dtype, scope="local"))


@contextlib.contextmanager
def named(name: str, frame: Any) -> Iterator[Any]:
    """A loop of the builder, its variable called by a name."""
    with frame as variable:
        yield IRBuilder.name(name, variable)


@contextlib.contextmanager
def launched(w: Conv2d, strip: Strip) -> Iterator[Place]:
    """The loops of blocks and threads. `T.unroll` loops inside them are left to the device's compiler to unroll."""
    channels, rows, columns = strip.channels, strip.rows, strip.columns
    across, pixels = channels.block, columns.block * rows.block
    with contextlib.ExitStack() as stack:

        def bind(extent: int, thread: str, **options: Any) -> Any:
            return stack.enter_context(T.thread_binding(extent, thread=thread, **options))

        if max(pixels, w.N) > MAX_BLOCKS_YZ:
            block = bind(w.N * pixels * across, "blockIdx.x")
            image, pixel, channel = block // (pixels * across), block // across % pixels, block % across
        else:
            image, pixel, channel = bind(w.N, "blockIdx.z"), bind(pixels, "blockIdx.y"), bind(across, "blockIdx.x")
        z, y = bind(rows.thread, "threadIdx.z"), bind(columns.thread, "threadIdx.y")
        x = bind(channels.thread, "threadIdx.x")
        stack.enter_context(T.attr(0, "pragma_unroll_explicit", 0))
        yield Place(
            image=image,
            first=channel * channels.thread * strip.vector,
            vector=channel * channels.thread + x,
            row=(pixel // columns.block * rows.thread + z) * rows.local,
            column=(pixel % columns.block * columns.thread + y) * columns.local,
            number=(z * columns.thread + y) * channels.thread + x,
        )


def inside(w: Conv2d, strip: Strip, line: Any, column: Any) -> list[Any]:
    """What has to hold for the input's `line` and `column` to exist, tested for where they might not."""
    tests = []
    tiles, taps = (strip.rows, strip.columns), taps_of(w)
    for i, (at, size) in enumerate(((line, w.H), (column, w.W))):
        covered = tiles[i].block * tiles[i].size
        last = (covered - 1) * w.stride[i] + taps[i] - 1 - w.before[i]
        tests += [at >= 0] * (w.before[i] > 0) + [at < size] * (last >= size)
    return tests


def guarded(tests: Sequence[Any], then: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
    """Write `then` where all tests hold and `otherwise` where not."""
    if not tests:
        then()
        return
    with T.If(tirx.all(*tests)):
        with T.Then():
            then()
        if otherwise:
            with T.Else():
                otherwise()


def copy(lanes: int, target: Any, at: Callable[[Any], Sequence[Any]], value: Callable[[Any], Any]) -> None:
    """Write `target[at(lane)] = value(lane)` for all lanes, in vectors as wide as they can be."""
    width = min(lanes, LOAD_BYTES // np.dtype(_PLAIN.get(str(target.dtype), str(target.dtype))).itemsize)
    for first in range(0, lanes, width):
        if width == 1:
            T.buffer_store(target, value(first), [*at(first)])
        else:
            with named("lane", T.vectorized(width)) as lane:
                T.buffer_store(target, value(lane + first), [*at(lane + first)])


class Finish:
    """Applies the epilogue and stores: the outputs of one row of a strip at a time.

    Args:
        w: the workload.
        arrays: the function's arguments.
        strip: the strips.
        at: where the thread is.
    """

    def __init__(self, w: Conv2d, arrays: Mapping[str, Any], strip: Strip, at: Place) -> None:
        self._w, self._arrays, self._strip, self._at = w, arrays, strip, at
        self._own = {
            step.name: local(
                step.name,
                (strip.vector,) if step.takes == "channel" else (strip.columns.local, strip.vector),
                str(arrays[step.name].dtype),
            )
            for step in epilogue.steps(w.epilogue)
            if step.takes
        }
        self._results = local("results", (strip.columns.local, strip.vector), w.storage)

    def start(self) -> None:
        """Read what all outputs share."""
        for name, own in self._own.items():
            if len(own.shape) == 1:
                first = self.channel
                array = self._arrays[name]
                copy(self._strip.vector, own, lambda lane: [lane], lambda lane: array[first + lane])

    @property
    def channel(self) -> Any:
        """The thread's first channel: of one that has none, the last one's, so that it may read and not store."""
        vector, channels = self._at.vector, self._strip.channels
        return (vector if channels.divides else tirx.min(vector, channels.extent - 1)) * self._strip.vector

    def row(self, sums: Any, i: int) -> None:
        """Store the strip's row `i` of `sums`, (rows, columns, channels)."""
        strip, at, vector = self._strip, self._at, self._strip.vector
        here = at.row + i
        rows = [here < self._w.P] * (not strip.rows.divides)
        rows += [at.vector < strip.channels.extent] * (not strip.channels.divides)

        def place(j: Any, lane: Any) -> tuple[Any, ...]:
            return (at.image, here, at.column + j, self.channel + lane)

        def tests(j: Any) -> list[Any]:
            return rows + [at.column + j < self._w.Q] * (not strip.columns.divides)

        for name, own in self._own.items():
            if len(own.shape) > 1:
                with named("j", T.unroll(strip.columns.local)) as j:
                    array = self._arrays[name]
                    guarded(tests(j), lambda: copy(vector, own, lambda lane: [j, lane], lambda lane: array[place(j, lane)]))
        with named("j", T.unroll(strip.columns.local)) as j:
            with named("channel", T.unroll(vector)) as lane:

                def read(name: str) -> Any:
                    own = self._own[name]
                    return (own[lane] if len(own.shape) == 1 else own[j, lane]).astype(ACCUMULATOR)

                value = epilogue.compute(self._w.epilogue, sums[i, j, lane], read)
                T.buffer_store(self._results, value.astype(self._w.storage), [j, lane])

            def store() -> None:
                copy(vector, self._arrays["Y"], lambda lane: place(j, lane), lambda lane: self._results[j, lane])

            guarded(tests(j), store)
