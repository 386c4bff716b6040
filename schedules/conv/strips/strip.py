"""Strips: what the schedules share that write their own TIR for images with channels last.

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
from tvmconv.knobs.factors import divisors
from tvmconv.workloads import Conv2d, epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR, numpy_dtype

from ..sums import DTYPES
from ..tiles import element_bytes

STRIP_DTYPES = (*DTYPES, "tf32")  # which has float32's products: there is nothing to gain from fewer digits
LEVELS = ("block", "thread", "local")
LOAD_BYTES = 16  # that one instruction moves at most
VECTORS = (8, 4, 2, 1)  # channels of a thread
THREADS_C = (1, 2, 4, 8, 16, 32, 64)
MAX_COPIES = 32  # of a thread to shared memory, unrolled


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
        extent = w.O // vector
        return cls(vector, Tile(extent, {"block": -(-extent // threads), "thread": threads}), rows, columns)

    @classmethod
    def of_columns(cls, w: Conv2d, c: Columns) -> Strip:
        """The strips of many configs."""
        axes = (("tile_y", w.P), ("tile_x", w.Q))
        return cls.of(w, c["vector"], c["threads_c"], *(Tile.of_column(n, LEVELS, c[knob]) for knob, n in axes))

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


def vectors(w: Conv2d, fits: Callable[[int], bool]) -> tuple[int, ...]:
    """The numbers of output channels that a thread may have: those of one store at most that divide all and fit."""
    return tuple(v for v in VECTORS if v * element_bytes(w) <= LOAD_BYTES and w.O % v == 0 and fits(v))


def threads_across(w: Conv2d) -> tuple[int, ...]:
    """Threads that a block may have along the channels: powers of two, and what divides the channels."""
    return tuple(sorted({*THREADS_C, *(n for n in divisors(w.O) if n <= THREADS_C[-1])}))


def reach(w: Conv2d) -> tuple[int, int]:
    """From an output's first input to its last, in rows and in columns, both included."""
    rows, columns = ((size - 1) * d + 1 for size, d in zip((w.R, w.S), w.dilation, strict=True))
    return rows, columns


def places(outputs: int, stride: int, taps: int, dilation: int) -> list[int]:
    """Which inputs along an axis neighbouring outputs take, counted from the first one's first."""
    return sorted({i * stride + r * dilation for i in range(outputs) for r in range(taps)})


def distinct(outputs: Any, stride: int, taps: int, dilation: int) -> Any:
    """How many inputs along an axis so many neighbouring outputs take."""
    counts = [len(places(n, stride, taps, dilation)) for n in range(int(np.max(outputs, initial=0)) + 1)]
    return np.array(counts)[outputs]


def arguments(w: Conv2d) -> dict[str, Any]:
    """The function's arguments by name."""
    described = zip(w.argument_names, w.argument_shapes, w.argument_dtypes, strict=True)
    return {name: T.arg(name, T.Buffer(shape, dtype)) for name, shape, dtype in described}


def local(name: str, shape: Sequence[int], dtype: str) -> Any:
    """An array in registers."""
    return IRBuilder.name(name, T.sblock_alloc_buffer(tuple(shape), dtype, scope="local"))


@contextlib.contextmanager
def loop(name: str, extent: int, kind: Callable[[int], Any] = T.unroll) -> Iterator[Any]:
    """A loop of the builder, its variable called by a name."""
    with kind(extent) as variable:
        yield IRBuilder.name(name, variable)


@contextlib.contextmanager
def launched(w: Conv2d, strip: Strip) -> Iterator[Place]:
    """The loops of blocks and threads. What is unrolled inside them is left to the device's compiler to unroll."""
    channels, rows, columns = strip.channels, strip.rows, strip.columns
    across, pixels = channels.block, columns.block * rows.block
    with contextlib.ExitStack() as stack:

        def bind(extent: int, thread: str) -> Any:
            return stack.enter_context(T.thread_binding(extent, thread=thread))

        if max(pixels, w.N) > MAX_BLOCKS_YZ:
            block = bind(w.N * pixels * across, "blockIdx.x")
            image, pixel, channel = block // (pixels * across), block // across % pixels, block % across
        else:
            image, pixel, channel = bind(w.N, "blockIdx.z"), bind(pixels, "blockIdx.y"), bind(across, "blockIdx.x")
        z, y, x = (bind(t.thread, f"threadIdx.{i}") for t, i in ((rows, "z"), (columns, "y"), (channels, "x")))
        stack.enter_context(T.attr(0, "pragma_unroll_explicit", 0))
        yield Place(
            image=image,
            first=channel * channels.thread * strip.vector,
            vector=channel * channels.thread + x,
            row=(pixel // columns.block * rows.thread + z) * rows.local,
            column=(pixel % columns.block * columns.thread + y) * columns.local,
            number=(z * columns.thread + y) * channels.thread + x,
        )


def own_channel(strip: Strip, at: Place) -> Any:
    """The first channel of a thread: of one that has none, the last thread's, so that it may read and not store."""
    channels = strip.channels
    return (at.vector if channels.divides else tirx.min(at.vector, channels.extent - 1)) * strip.vector


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
    width = min(lanes, LOAD_BYTES // numpy_dtype(str(target.dtype)).itemsize)
    for first in range(0, lanes, width):
        if width == 1:
            T.buffer_store(target, value(first), [*at(first)])
        else:
            with loop("lane", width, T.vectorized) as lane:
                T.buffer_store(target, value(lane + first), [*at(lane + first)])


def stage_filters(w: Conv2d, strip: Strip, at: Place, K: Any) -> Any:
    """Turn the filters of a block around in shared memory: (taps and input channels, output channels of the block).

    Neighbouring threads copy neighbouring output channels, which lie a filter apart: they store to neighbouring words,
    and what they read of a sector is in the L1 cache for the taps that follow.
    """
    channels, depth = strip.channels.thread * strip.vector, w.C // w.groups
    elements = w.R * w.S * depth
    shared = IRBuilder.name("filters", T.sblock_alloc_buffer((elements, channels), w.storage, scope="shared"))
    copies = -(-elements * channels // strip.threads)
    with loop("copy", copies, T.unroll if copies <= MAX_COPIES else T.serial) as step:
        element = (step * strip.threads + at.number) // channels
        channel = (step * strip.threads + at.number) % channels
        tests = [element < elements] * (elements * channels % strip.threads > 0)
        tests += [at.first + channel < w.O] * (not strip.channels.divides)
        tap, d = element // depth, element % depth
        value = K[at.first + channel, tap // w.S, tap % w.S, d]
        guarded(tests, lambda: T.buffer_store(shared, value, [element, channel]))
    return shared


class Window:
    """Lines of the input as a strip sees them, in registers: for each, the vectors that its columns take together.

    Args:
        w: the workload.
        X: the input.
        strip: the strips.
        at: where the thread is.
        width: channels of a vector.
        lines: how many are held.
        taps: how many of the filter's columns are unrolled.

    Attributes:
        held: the array, (lines, places, channels).
        top: the input's line that the strip's first row meets first; it may lie outside.
        left: likewise its column.
    """

    def __init__(self, w: Conv2d, X: Any, strip: Strip, at: Place, width: int, lines: int, taps: int) -> None:
        self._w, self._X, self._strip, self._at, self._width = w, X, strip, at, width
        self._places = places(strip.columns.local, w.stride[1], taps, w.dilation[1])
        if self._places != [*range(len(self._places))]:  # what neighbouring columns take lies side by side even so
            self._places.sort(key=lambda place: (place % w.stride[1], place))
        self.held = local("window", (lines, len(self._places), width), w.storage)
        self.top = at.row * w.stride[0] - w.before[0]
        self.left = at.column * w.stride[1] - w.before[1]

    def place(self, j: Any, s: int) -> Any:
        """Where in a line the input is that the filter's column `s` meets for the strip's column `j`."""
        first = self._places.index(s * self._w.dilation[1])
        if self._strip.columns.local == 1:
            return first
        return first + j * (self._places.index(s * self._w.dilation[1] + self._w.stride[1]) - first)

    def load_line(self, i: Any, line: Any, channel: Any, column: Any = 0) -> None:
        """Load line `i`: that of the input, so many below the first, from a channel on, the columns shifted."""
        if self._places == [*range(len(self._places))]:
            with loop("g", len(self._places)) as g:
                self._load(i, g, self.top + line, self.left + column + g, channel)
        else:
            for g, place in enumerate(self._places):
                self._load(i, g, self.top + line, self.left + column + place, channel)

    def _load(self, i: Any, g: Any, line: Any, column: Any, channel: Any) -> None:
        """Load a vector of the input, zeros outside."""

        def fill(value: Callable[[Any], Any]) -> None:
            copy(self._width, self.held, lambda lane: (i, g, lane), value)

        guarded(
            self._inside(line, column),
            lambda: fill(lambda lane: self._X[self._at.image, line, column, channel + lane]),
            lambda: fill(lambda lane: tirx.const(0, self._w.storage)),
        )

    def _inside(self, line: Any, column: Any) -> list[Any]:
        """What has to hold for a place of the input to exist, tested for where it might not."""
        w, tests = self._w, []
        sides = zip((line, column), (w.H, w.W), (self._strip.rows, self._strip.columns), reach(w), strict=True)
        for i, (at, size, tile, taps) in enumerate(sides):
            last = (tile.block * tile.size - 1) * w.stride[i] + taps - 1 - w.before[i]
            tests += [at >= 0] * (w.before[i] > 0) + [at < size] * (last >= size)
        return tests


class Outputs:
    """The sums of a strip, and their way to the output, through the epilogue.

    Args:
        w: the workload.
        arrays: the function's arguments.
        strip: the strips.
        at: where the thread is.

    Attributes:
        sums: (rows, columns, channels).
    """

    def __init__(self, w: Conv2d, arrays: Mapping[str, Any], strip: Strip, at: Place) -> None:
        self._w, self._arrays, self._strip, self._at = w, arrays, strip, at
        rows, columns, vector = strip.rows.local, strip.columns.local, strip.vector
        self.sums = local("sums", (rows, columns, vector), ACCUMULATOR)
        self._results = local("results", (columns, vector), w.storage)
        taken = {step.name: step.takes for step in epilogue.steps(w.epilogue) if step.takes}
        shapes = {"channel": (vector,), "output": (columns, vector)}
        self._own = {name: local(name, shapes[takes], str(arrays[name].dtype)) for name, takes in taken.items()}
        self._of_channels = [name for name, takes in taken.items() if takes == "channel"]

    def start(self) -> None:
        """Set the sums to zero, and read of the epilogue's arguments what all pixels share."""
        rows, columns, vector = self.sums.shape
        with loop("i", rows) as i, loop("j", columns) as j, loop("channel", vector) as channel:
            T.buffer_store(self.sums, tirx.const(0, ACCUMULATOR), [i, j, channel])
        for name in self._of_channels:
            self._read(name, lambda lane: (lane,), lambda lane: own_channel(self._strip, self._at) + lane)

    def add(self, i: Any, j: Any, channel: Any, x: Any, k: Any) -> None:
        """Add a product to a sum; the operands are widened first."""
        product = x.astype(ACCUMULATOR) * k.astype(ACCUMULATOR)
        T.buffer_store(self.sums, self.sums[i, j, channel] + product, [i, j, channel])

    def store(self, i: int) -> None:
        """Store the strip's row `i`."""
        strip, at = self._strip, self._at
        row, channel = at.row + i, own_channel(strip, at)
        tests = [row < self._w.P] * (not strip.rows.divides)
        tests += [at.vector < strip.channels.extent] * (not strip.channels.divides)

        def inside(j: Any) -> list[Any]:
            return tests + [at.column + j < self._w.Q] * (not strip.columns.divides)

        for name in self._own:
            if name not in self._of_channels:
                with loop("j", strip.columns.local) as j:
                    self._read_pixel(name, inside(j), j, (at.image, row, at.column + j, channel))
        with loop("j", strip.columns.local) as j:
            with loop("channel", strip.vector) as lane:
                value = epilogue.compute(
                    self._w.epilogue, self.sums[i, j, lane], lambda name: self._element(name, j, lane)
                )
                T.buffer_store(self._results, value.astype(self._w.storage), [j, lane])

            def write() -> None:
                copy(
                    strip.vector,
                    self._arrays["Y"],
                    lambda lane: (at.image, row, at.column + j, channel + lane),
                    lambda lane: self._results[j, lane],
                )

            guarded(inside(j), write)

    def _element(self, name: str, j: Any, lane: Any) -> Any:
        own = self._own[name]
        return (own[lane] if name in self._of_channels else own[j, lane]).astype(ACCUMULATOR)

    def _read_pixel(self, name: str, tests: list[Any], j: Any, place: tuple[Any, ...]) -> None:
        *pixel, channel = place
        guarded(tests, lambda: self._read(name, lambda lane: (j, lane), lambda lane: (*pixel, channel + lane)))

    def _read(self, name: str, to: Callable[[Any], Sequence[Any]], of: Callable[[Any], Any]) -> None:
        """Read a vector of an epilogue's argument."""
        copy(self._strip.vector, self._own[name], to, lambda lane: self._arrays[name][of(lane)])
