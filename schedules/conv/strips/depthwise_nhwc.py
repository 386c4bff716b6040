"""Depthwise convolution, channels last: vectors of channels, and a window of the input that slides in registers.

Each channel has its own filter, so that a kernel has little to compute and is bound by memory, or, where the image is
small, by how long a load takes. Channels lie side by side: a thread computes a vector of them, up to 16 bytes, for a
strip of neighbouring output pixels, and neighbouring threads the next vectors; each load and store of a warp is whole
sectors.

A thread walks down the input lines that its strip sees. Of each it loads the window of all its columns, which overlap,
and adds them to every output row whose filter covers the line, so that an input is loaded and widened to float32 once
a thread and not once a tap. The next line is loaded before one is added. What neighbouring threads read as well comes
from the L1 cache; there is no tile of the input in shared memory, and no barrier to wait for it.

The weight lies in memory filter by filter, the channels outermost, so that a vector of channels is no vector there. A
block turns its part of it around in shared memory (`weight`); the first line of the input is on its way meanwhile. Or
each thread loads the filters of all its channels, which follow each other, in vectors, and keeps them in registers.

Small images have few strips: threads then take fewer channels and pixels, until there are enough of them for a large
GPU. The defaults are those of the least estimate (`choice`).

A signal is an image of one row. Of a volume, each plane of the output is computed like an image, from as many planes of
the input as the filter is deep; the lines of all of them are walked down.

From `depthwise`, whose blocks stage a tile of the input channel by channel: vector loads, and four times the outputs a
load. Tensor expressions cannot say it, because which output row and which row of the filter meet depends on the line.
It is written as TIR.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tvm.s_tir import Schedule
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.workloads import Conv

from ..planes import Planes
from ..sums import DTYPES, has_filter_per_channel
from .depthwise_plan import Plan, ask, usage
from .outputs import Outputs
from .strip import places
from .window import Window
from .writing import Place, copy, local, loop, own_channel, program, stage_filters


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_filter_per_channel),
    promising=has_filter_per_channel,
    supersedes=("depthwise",),
)
def depthwise_nhwc(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """A thread computes a vector of channels for a strip of pixels, (block, thread, local) of the rows and columns."""
    plan = ask(w, k)
    return program(w, plan.strip, lambda arrays, at: Writer(w, plan, arrays, at).write())


class Writer:
    """Writes what a thread does."""

    def __init__(self, w: Conv, plan: Plan, arrays: Mapping[str, Any], at: Place) -> None:
        self.w, self.plan, self.strip, self.at, self.K = w, plan, plan.strip, at, arrays["K"]
        self.sizes = Planes.of(w)
        self.multiplier = w.O // w.groups
        vector = self.strip.vector
        self.channel = own_channel(self.strip, at)
        self.width = max(1, vector // self.multiplier)  # channels of the input that the thread's outputs take
        self.unrolled = w.kernel[-1] if plan.unrolled != "tap" else 1  # columns of the filter
        self.outputs = Outputs(w, arrays, self.strip, at)
        self.input = Window(w, arrays["X"], self.strip, at, self.width, lines=2, taps=self.unrolled)
        self.taps = local("taps", (self.unrolled, vector), w.storage)

    def write(self) -> None:
        """Write all of it."""
        if self.plan.weight == "shared":
            self.shared = stage_filters(self.w, self.strip, self.at, self.K)
        elif self.plan.weight == "registers":
            self.keep()
        {"filter": self.walk_lines, "row": self.walk_rows, "tap": self.walk_taps}[self.plan.unrolled]()

    def keep(self) -> None:
        """Load the filters of the thread's channels, which follow each other, in vectors."""
        w, vector, taps = self.w, self.strip.vector, self.sizes.all_taps
        self.kept = local("filters", (vector * taps,), w.storage)
        with loop("chunk", taps) as chunk:

            def value(lane: Any) -> Any:
                element = chunk * vector + lane
                return self.filter(element // taps, self.sizes.tap(element % taps))

            copy(vector, self.kept, lambda lane: (chunk * vector + lane,), value)

    def filter(self, channel: Any, tap: tuple[Any, Any, Any]) -> Any:
        """An element of the filter of the thread's channel `channel`."""
        return self.K[self.sizes.place(self.channel + channel, tap, 0)]

    def read_taps(self, row: Any, first: Any = 0) -> None:
        """Read the unrolled taps of the filters' row `row`, counted over all planes, from the column `first` on."""
        vector, (*_, columns) = self.strip.vector, self.sizes.taps
        with loop("s", self.unrolled) as s:
            tap = row * columns + first + s
            if self.plan.weight == "shared":
                own = self.at.vector * vector - self.at.first
                copy(vector, self.taps, lambda lane: (s, lane), lambda lane: self.shared[tap, own + lane])
            else:
                with loop("channel", vector) as channel:
                    if self.plan.weight == "registers":
                        value = self.kept[channel * self.sizes.all_taps + tap]
                    else:
                        value = self.filter(channel, (*self.sizes.tap_row(row), first + s))
                    T.buffer_store(self.taps, value, [s, channel])

    def load(self, half: int, t: Any, line: Any, column: Any = 0) -> None:
        """Load a line of the input, of the plane that the filter's plane `t` meets, to a half of the window."""
        self.input.load_line(half, t, line, self.channel // self.multiplier, column)

    def add(self, half: int, i: int) -> None:
        """Add a line to the strip's row `i`, with the taps that were read."""
        for s in range(self.unrolled):
            with loop("j", self.strip.columns.local) as j, loop("channel", self.strip.vector) as channel:
                x = self.input.held[half, self.input.place(j, s), channel // self.multiplier if self.width > 1 else 0]
                self.outputs.add(i, j, channel, x, self.taps[s, channel])

    def walk_lines(self) -> None:
        """Walk down the input lines, with all rows of the strip and of the filter unrolled."""
        rows, (deep, high, _) = self.strip.rows.local, self.sizes.taps
        (_, step, _), (_, spread, _) = self.sizes.steps, self.sizes.dilations
        lines = [(t, line) for t in range(deep) for line in places(rows, step, high, spread)]
        self.load(0, *lines[0])
        self.outputs.start()
        for number, (t, line) in enumerate(lines):
            if number + 1 < len(lines):
                self.load((number + 1) % 2, *lines[number + 1])
            for i in range(rows):
                r, between = divmod(line - i * step, spread)
                if not between and 0 <= r < high:
                    self.read_taps(t * high + r)
                    self.add(number % 2, i)
                    if (t, r) == (deep - 1, high - 1):
                        self.outputs.store(i)

    def walk_rows(self) -> None:
        """Walk down the rows of the filter in a loop: the line that each row of the strip meets is loaded for it."""
        deep, high, _ = self.sizes.taps
        with self.walked("r", deep * high) as row:
            self.read_taps(row)
            self.add_row(self.sizes.tap_row(row), 0)

    def walk_taps(self) -> None:
        """Walk over the taps of the filter in a loop, and load for each what it meets."""
        with self.walked("tap", self.sizes.all_taps) as tap:
            t, r, s = self.sizes.tap(tap)
            self.read_taps(tap // self.sizes.taps[-1], s)
            self.add_row((t, r), s)

    def add_row(self, row: tuple[Any, Any], s: Any) -> None:
        """Load for each row of the strip the line that a row of the filter meets, from column `s` on, and add it."""
        (t, r), (_, step, _) = row, self.sizes.steps
        _, spread, across = self.sizes.dilations
        for i in range(self.strip.rows.local):
            self.load(i % 2, t, i * step + r * spread, s * across)
            self.add(i % 2, i)

    @contextlib.contextmanager
    def walked(self, name: str, extent: int) -> Iterator[Any]:
        """A loop over parts of the filter, and what comes before and behind it."""
        self.outputs.start()
        with loop(name, extent, T.serial) as variable:
            yield variable
        for i in range(self.strip.rows.local):
            self.outputs.store(i)
