"""First layers, of few channels, on tensor cores: input lines staged whole, with nothing copied per filter tap.

A first layer's channels fill no 16 bytes, which is what tensor-core convolutions copy at a time. But along a filter row
and its channels the input is contiguous in memory, in NHWC: the reduction (r, s·C + c) takes a run of each input line,
wherever the pixel is. So a block stages the input lines that its tile of the output sees as they are, once. Two
neighbouring elements of an mma's fragment are one 32-bit load from such a line, and every tap finds its operands there.
In NCHW the same is true of each channel's plane: the reduction is (c, r, s), and a line a row of one plane.

A word has two elements, of 16 bits, and a pixel may begin in the middle of one. That costs no instruction: the weight,
which is spread from memory to one row of words for each output channel, is shifted by an element, and the first word
meets an input that a zero multiplies. Where stride times channels is odd, every second pixel begins in the middle: a
warp's 16 pixels are then every second one, and there are two weights, for the warps of even and of odd pixels. Dilation
along a line is zeros as well. (Zeros that meet an infinite input make NaNs: a pixel beside the window, or between its
taps, has to be finite.)

- A warp computes 16 pixels of each of `rows` output rows and all channels of the tile: `mma.sync` m16n8k16, of TF32
  m16n8k8, with sums in float32. The weight's fragments come by `ldmatrix`, or stay in registers (`hold`).
- Blocks are persistent: each takes every so many-th tile, so that the weight is spread once a block, and the lines of
  the next tiles are on their way by `cp.async` while a tile is computed. Where lines begin at no multiple of four bytes
  (the width times the channels is odd), threads copy them word by word.
- A warp puts its outputs together in shared memory, with the epilogue applied in registers to the sums in float32, and
  stores them 16 bytes a thread where the channels fill these; a residual comes the same way. A sum begins with its
  bias.

Bank conflicts: a fragment's load is of eight pixels' words, four each. Three choices are made by counting, so that few
loads conflict: whether the pixels are neighbours or every second one, how far lines are apart, and in which order the
reduction has its words. Four words of one line are free of conflicts for steps of one to four words and of six from
pixel to pixel; a line's last words, which are no four, share a load with those of other lines if that makes no more
products than necessary. With the lines well apart that is free of conflicts for three channels at any odd step, in 7×7
and in 3×3 filters. What is left are 4×4/4 (two of six loads are of two wavefronts), wider steps, and TF32's.

Sources: PTX ISA, "Matrix Fragments for mma.m16n8k16", "ldmatrix", "cp.async".
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.gpu import MAX_THREADS, REGISTERS, WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d, epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....program import (
    Buffer,
    Expr,
    allocate,
    both,
    call,
    load_global,
    load_shared,
    pack,
    parallel,
    ptx,
    serial,
    store,
    store_global,
    store_shared,
    uint,
    unpack,
    unrolled,
    when,
    write,
    zeros,
)
from .tile import CHANNELS, PIXELS, QUAD_WORDS, STEP_WORDS, SUM_BYTES, VECTOR, WORD, Tile

DTYPES = ("float16", "bfloat16", "tf32")
MAX_CHANNELS = 8  # eight of 16 bits fill 16 bytes, and other schedules have nothing to lose
SHARED_BYTES = 99 << 10  # that a block may have on every architecture since sm_80 (tvmconv/gpu.py)
MAX_ACCUMULATORS = 128
MAX_PRODUCTS = 1024  # of a warp and tile, all of them unrolled
MAX_HELD = 160  # sums and weights of a thread, in registers
OWN_REGISTERS = 40  # of a thread besides these
MULTIPROCESSORS = 132  # of an H200: what the defaults are for
WARPS = 16  # of a multiprocessor, by default: at 64 sums a thread its registers are for as many
UNROLLED = 16  # steps of a copy
WORDS, WEIGHT_ROWS = 8, 8  # of lines, and of the weight's, that a thread has under way at a time

ROWS, STAGES = (1, 2, 4, 8), (2, 3, 4)
BLOCK_WARPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
BLOCK_CHANNELS = (16, 32, 48, 64, 96, 128)
BLOCKS = (0, 66, 132, 264, 396, 528, 792, 1056)

ASYNC_COPY = {4: "cp.async.ca.shared.global", 8: "cp.async.ca.shared.global", 16: "cp.async.cg.shared.global"}
_MMA = {"float16": ("m16n8k16", "f16"), "bfloat16": ("m16n8k16", "bf16"), "tf32": ("m16n8k8", "tf32")}


def fits(w: Conv2d) -> bool:
    """Whether the channels are few, and a tile and its weight have room in the shared memory of every GPU."""
    if w.groups > 1 or w.C > MAX_CHANNELS:
        return False
    tile = default(w)
    return bool(tile.shared_bytes <= SHARED_BYTES) and bool(tile.products <= MAX_PRODUCTS)


def promising(w: Conv2d) -> bool:
    """Whether the channels do not fill 16 bytes, and shared memory has room for as many filters as there should be."""
    return w.C < MAX_CHANNELS and default(w).block_n == next(_sensible(w)).block_n


def usage(w: Conv2d, c: Columns) -> Usage:
    """What configs use of a device."""
    return Tile.of_columns(w, c).usage()


@schedule(
    "conv2d",
    dtypes=DTYPES,
    usage=usage,
    condition=fits,
    promising=promising,
    supersedes=("mma_sync", "tensor_core", "direct", "implicit_gemm"),
    kinds=("cuda",),
    since=80,
)
def stem(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """A tile is `rows` output rows × 16 columns for each of `warps` × `block_n` channels."""
    return write(w, Program(ask(w, k)).emit)


def ask(w: Conv2d, k: Knobs) -> Tile:
    """The tile, from knobs; the defaults suit the workload on an H200."""
    best = default(w)
    tile = Tile(
        w,
        rows=k.choice("rows", _rows(w), best.rows),
        warps=k.choice("warps", _warps(w), best.warps),
        block_n=k.choice("block_n", _channels(w), best.block_n),
        stages=k.choice("stages", STAGES, best.stages),
        blocks=k.choice("blocks", BLOCKS, best.blocks),
        hold=k.choice("hold", (0, 1), best.hold),
    )

    def of(c: Columns) -> Tile:
        return Tile.of_columns(w, c)

    k.condition(f"a thread has at most {MAX_ACCUMULATORS} sums", lambda c: of(c).accumulators <= MAX_ACCUMULATORS)
    k.condition(f"at most {MAX_PRODUCTS} mma of a warp are unrolled", lambda c: of(c).products <= MAX_PRODUCTS)
    k.condition(
        f"a thread holds at most {MAX_HELD} sums and weights",
        lambda c: (of(c).hold == 0) | (of(c).accumulators + of(c).weight_registers <= MAX_HELD),
    )
    k.condition(
        "all threads' registers fit",
        lambda c: (
            of(c).threads * (of(c).accumulators + np.where(of(c).hold == 1, of(c).weight_registers, 0) + OWN_REGISTERS)
            <= REGISTERS
        ),
    )
    k.search_only("a weight is held for several tiles", lambda c: (of(c).hold == 0) | (of(c).rounds > 1))
    k.search_only("stages are filled", lambda c: (of(c).stages == STAGES[0]) | (of(c).stages <= of(c).rounds))
    k.search_only(
        "blocks fewer than tiles", lambda c: (of(c).blocks == 0) | (of(c).blocks < of(c).tiles * of(c).channel_tiles)
    )
    return tile


def _rows(w: Conv2d) -> tuple[int, ...]:
    return tuple(rows for rows in ROWS if rows < 2 * w.P)


def _warps(w: Conv2d) -> tuple[int, ...]:
    """Numbers of warps of which the last one has something to compute; as many for even as for odd pixels."""
    phases = Tile(w, 1, 1, 1, 1, 0, 0).lines.phases
    fitting = (warps for warps in BLOCK_WARPS if warps % phases == 0 and warps * WARP <= MAX_THREADS)
    return tuple(warps for warps in fitting if warps == phases or (warps - phases) * PIXELS < w.Q)


def _channels(w: Conv2d) -> tuple[int, ...]:
    """Numbers of channels of which the last 16 have something to compute."""
    return tuple(channels for channels in BLOCK_CHANNELS if channels - PIXELS < w.O)


def default(w: Conv2d) -> Tile:
    """The tile by default: the first of those that are sensible, the best first, to have room on every GPU."""
    tiles = list(_sensible(w))
    return next((tile for tile in tiles if tile.shared_bytes <= SHARED_BYTES), tiles[-1])


def _sensible(w: Conv2d) -> Iterator[Tile]:
    """Tiles that leave few lanes idle and no multiprocessor, of an H200, and then smaller and smaller ones."""
    channels = _channels(w)
    block_n = min((n for n in channels if n <= 64), key=lambda n: (-(-w.O // n) * n, -n))  # idle channels are few
    rows = min(2, _rows(w)[-1])
    for n in (n for n in reversed(channels) if n <= block_n):
        for max_warps in (8, 4, 2):
            for count in dict.fromkeys((rows, 1)):
                yield _filling(w, count, n, max_warps)


def _filling(w: Conv2d, rows: int, block_n: int, max_warps: int) -> Tile:
    """The tile of so many rows and channels whose warps fill output rows best; fewer, where tiles would be few."""

    def tile(warps: int, blocks: int = 0) -> Tile:
        lines = Tile(w, rows, warps, block_n, STAGES[0], blocks, 0)
        held = lines.weight_registers <= 32 and lines.rounds > 1
        return Tile(w, rows, warps, block_n, STAGES[0], blocks, int(held))

    def filled(candidate: Tile) -> float:
        used = w.Q / (candidate.tiles_across * candidate.columns)
        return float(used * candidate.warps / (candidate.warps + 0.5))  # what a block has to do by itself is shared

    options = _warps(w)
    candidates = [tile(warps) for warps in options if warps <= max_warps] or [tile(options[0])]
    many = [each for each in candidates if each.tiles * each.channel_tiles >= 0.75 * MULTIPROCESSORS]
    best = max(many, key=filled) if many else max(candidates, key=lambda each: (each.tiles, filled(each)))
    resident = max(blocks for blocks in BLOCKS if blocks <= MULTIPROCESSORS * max(1, WARPS // best.warps))
    return tile(best.warps, resident if resident < best.tiles * best.channel_tiles else 0)


class Program:
    """The kernel, a part a function.

    Args:
        tile: what a block computes at a time.
    """

    def __init__(self, tile: Tile) -> None:
        self.tile, self.w = tile, tile.w
        self.lines, self.placed = tile.lines, tile.placed
        self.threads, self.channels = int(tile.threads), int(tile.block_n)
        self.buffers, self.grid = int(tile.buffers), int(tile.grid)
        self.n_tiles = self.channels // CHANNELS
        first = epilogue.steps(self.w.epilogue)[:1]
        self.begun = any(operation.adds and operation.takes == "channel" for operation in first)  # a sum, with the bias
        self.of_channels = [operation.name for operation in self.w.reading if operation.takes == "channel"]
        self.of_outputs = [operation.name for operation in self.w.reading if operation.takes == "output"]

        self.ahead = int(tile.ahead)
        self.input_bytes = int(tile.input_bytes)
        self.arguments_at = int(tile.weight_bytes)  # behind the weight
        self.inputs_at = self.arguments_at + int(tile.argument_bytes)
        self.filters_at = self.inputs_at + self.ahead * self.input_bytes
        self.output_at = self.inputs_at + self.buffers * self.input_bytes
        self.output_bytes, self.output_row = int(tile.output_bytes), int(tile.output_row_bytes)

    def emit(self, arguments: dict[str, Buffer]) -> None:
        """Emit the kernel."""
        self.arguments = arguments
        with (
            parallel(int(self.tile.channel_tiles), "blockIdx.y") as self.channel_tile,
            parallel(self.grid, "blockIdx.x") as self.block,
            parallel(self.threads, "threadIdx.x") as self.thread,
        ):
            self._allocate()
            self._begin()
            with serial((int(self.tile.tiles) - self.block + self.grid - 1) // self.grid, "i") as i:
                self._wait_for_inputs()
                ahead = i + self.buffers - 1
                if self.buffers > 1:
                    self._stage_if_any(self._tile_number(ahead), ahead % self.buffers)
                self._begin_sums()
                self._multiply()
                self._go_on(i % self.buffers)
                self._finish(self._tile_number(i))

    def _allocate(self) -> None:
        """Registers, by what they are for, and shared memory."""
        tile, steps = self.tile, self.lines.steps if self.tile.hold else 1
        self.patterns = list(dict.fromkeys(tuple(at - quad[0] for at in quad) for quad in self.placed.quads()))
        self.shared = allocate("shared", int(tile.shared_bytes) // WORD, "uint32", "shared.dyn")
        self.sums = allocate("sums", int(tile.accumulators), ACCUMULATOR)
        self.a = allocate("a", 4, "uint32")
        self.b = allocate("b", steps * self.n_tiles * 2, "uint32")
        self.base = allocate("base", 1, "uint32")
        self.weight = allocate("weight", 1, "uint32")
        self.pixel = allocate("pixel", len(self.patterns), "uint32")
        self.values = allocate("values", 2, ACCUMULATOR)
        self.sources = allocate("sources", 2, "uint32")
        self.keep = allocate("keep", 1, "uint32")
        self.row = allocate("row", 1, "uint32")
        self.words = allocate("words", max(VECTOR // WORD, WEIGHT_ROWS), "uint32")
        self.halves = allocate("halves", 2 * max(WORDS, WEIGHT_ROWS), "uint16")
        self.of_channel = {name: allocate(name, 2, ACCUMULATOR) for name in self.of_channels}
        self.of_output = {name: allocate(name, self._residuals(name), "uint32") for name in self.of_outputs}

    def _begin(self) -> None:
        """What is done once a block: the first inputs are asked for, and meanwhile the weight is spread."""
        store(self.base, 0, T.cuda.cvta_generic_to_shared(self.shared.access_ptr("rw")))
        self._copy_weight()
        call(T.ptx.cp.async_.commit_group())
        for ahead in range(self.ahead):
            self._stage_if_any(self._tile_number(ahead), ahead)
        self._stage_arguments()
        call(T.ptx.cp.async_.wait_group(self.ahead if self.lines.asynchronous else 0))
        call(T.cuda.cta_sync())
        self._spread_weight()
        self._point_lanes()
        if self.tile.hold:
            call(T.cuda.cta_sync())
            for step in range(self.lines.steps):
                self._load_weight(step, step)

    @property
    def lane(self) -> Expr:
        """The thread's number in its warp."""
        return self.thread % WARP

    @property
    def warp(self) -> Expr:
        """The warp's number in its block."""
        return self.thread // WARP

    @property
    def phase(self) -> Expr:
        """Whether the warp's pixels are the even or the odd ones, where these differ."""
        return self.warp % self.lines.phases

    @property
    def first_channel(self) -> Expr:
        """The tile's first output channel."""
        return self.channel_tile * self.channels

    def _column(self, pixel: Expr) -> Expr:
        """The column in the tile of one of the warp's 16 pixels."""
        return (self.warp // self.lines.phases * PIXELS + pixel) * self.lines.phases + self.phase

    def _tile_number(self, i: Expr) -> Expr:
        """The i-th tile of the block."""
        return i * self.grid + self.block

    def _origin(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Image, first output row and first column of a tile."""
        tile = self.tile
        across, down = int(tile.tiles_across), int(tile.tiles_down)
        return number // (down * across), number // across % down * tile.rows, number % across * int(tile.columns)

    # Inputs

    def _stage_if_any(self, number: Expr, buffer: Expr) -> None:
        """Copy the input lines of a tile to shared memory, if there is such a tile."""
        with when(number < int(self.tile.tiles)):
            if self.lines.asynchronous:
                self._stage(number, buffer)
            else:
                self._stage_words(number, buffer)
        if self.lines.asynchronous:
            call(T.ptx.cp.async_.commit_group())

    def _wait_for_inputs(self) -> None:
        """Wait for the inputs of the tile that is next, of all threads; also for the reads of the one before."""
        if self.lines.asynchronous:
            call(T.ptx.cp.async_.wait_group(max(0, self.buffers - 2)))
        call(T.cuda.cta_sync())

    def _stage(self, number: Expr, buffer: Expr) -> None:
        units = self._units
        with (unrolled if units <= UNROLLED * self.threads else serial)(-(-units // self.threads), "unit") as i:
            unit = i * self.threads + self.thread
            with when(unit < units if units % self.threads else True):
                source, there = self._input(number, unit, 0)
                source = T.Select(there, source, 0)
                address = self.arguments["X"].access_ptr("r", offset=source)
                nbytes = self.lines.unit * self.lines.size
                known = T.Select(there, uint(nbytes), uint(0))  # the rest of them are zeros
                ptx(ASYNC_COPY[nbytes], self._place(unit, buffer), address, nbytes, known)

    def _stage_words(self, number: Expr, buffer: Expr) -> None:
        """Copy lines of which every second begins in the middle of a word, element by element, several at a time."""
        units = self._units
        each = -(-units // self.threads)
        batch = min(each, WORDS)

        def unit(i: Expr, j: Expr) -> Expr:
            return (i * batch + j) * self.threads + self.thread

        with serial(-(-each // batch), "i") as i:
            with unrolled(batch, "j") as j:
                for place in range(2):
                    source, there = self._input(number, unit(i, j), place)
                    there = both(there, unit(i, j) < units)
                    address = self.arguments["X"].access_ptr("r", offset=T.Select(there, source, 0))
                    ptx("ld.global.nc.b16", self.halves[j * 2 + place], address)
                    read = self.halves[j * 2 + place]
                    store(self.halves, j * 2 + place, T.Select(there, read, T.uint16(0)))
            with unrolled(batch, "j") as j, when(unit(i, j) < units):
                store(self.words, 0, self._joined(j * 2))
                store_shared(self._place(unit(i, j), buffer), self.words, WORD)

    @property
    def _units(self) -> int:
        """Copies of a tile."""
        return self.lines.planes * self.placed.plane_lines * self.placed.copies

    def _input(self, number: Expr, unit: Expr, place: int) -> tuple[Expr, Expr]:
        """The element of X that is the given place of a copy of a tile, and whether there is one."""
        w, lines = self.w, self.lines
        n, p, q = self._origin(number)
        line, along = unit // self.placed.copies, unit % self.placed.copies
        plane, row = line // self.placed.plane_lines, line % self.placed.plane_lines
        h = p * w.stride[0] - w.before[0] + row
        element = q * lines.step - (w.before[1] * lines.pixel + lines.lead) + along * lines.unit + place
        there = both(h >= 0, h < w.H, element >= 0, element < lines.length)
        return ((n * lines.planes + plane) * w.H + h) * lines.length + element, there

    def _place(self, unit: Expr, buffer: Expr) -> Expr:
        """Where a copy of a tile goes in shared memory."""
        line, along = unit // self.placed.copies, unit % self.placed.copies
        offset = line * self.placed.line_bytes + along * (self.lines.unit * self.lines.size)
        return self.base[0] + uint(buffer * self.input_bytes) + uint(self.inputs_at + offset)

    # The weight, and what the epilogue has for each channel

    def _stage_arguments(self) -> None:
        """Copy what the epilogue has for each channel to shared memory."""
        for index, name in enumerate(self.of_channels):
            with serial(-(-self.channels // self.threads), "i") as i:
                channel = i * self.threads + self.thread
                with when(channel < self.channels if self.channels % self.threads else True):
                    known = self.first_channel + channel < self.w.O
                    source = T.Select(known, self.first_channel + channel, 0)
                    ptx("ld.global.nc.f32", self.values[0], self.arguments[name].access_ptr("r", offset=source))
                    ptx("st.shared.f32", self._argument(index, channel), self.values[0])

    def _argument(self, index: int, channel: Expr) -> Expr:
        at = self.arguments_at + index * self.channels * SUM_BYTES
        return self.base[0] + uint(at) + uint(channel * SUM_BYTES)

    def _copy_weight(self) -> None:
        """Copy the tile's filters to shared memory as they are; behind the last of all filters are zeros.

        A copy is of all its bytes or of none: where filters end within a vector, its elements are copied one by one.
        An asynchronous copy of a part would do on a GPU, but memcheck takes it to read all, beyond the array.
        """
        vector = VECTOR // self.lines.size  # elements
        vectors = int(self.tile.filter_bytes) // VECTOR
        first, end = (channels * self.lines.filter_size for channels in (self.first_channel, self.w.O))
        last, rest = (end - first) // vector, end % vector  # the vector that the filters end within, if they do
        with serial(-(-vectors // self.threads), "i") as i:
            unit = i * self.threads + self.thread
            inside = unit < vectors if vectors % self.threads else True
            with when(both(inside, unit != last if rest else True)):
                source: Expr = first + unit * vector
                known: Expr = uint(VECTOR)
                if self.w.O % self.channels:
                    known = T.Select(source < end, known, uint(0))
                    source = T.Select(source < end, source, 0)
                destination = self.base[0] + uint(self.filters_at) + uint(unit * VECTOR)
                ptx(ASYNC_COPY[VECTOR], destination, self.arguments["K"].access_ptr("r", offset=source), VECTOR, known)
        if rest:
            with when(both(self.thread < vector, last < vectors)):
                source = T.Select(self.thread < rest, last * vector + self.thread, 0) + first
                load_global(self.words, self.arguments["K"], source, 1)
                store(self.words, 0, T.Select(self.thread < rest, self.words[0], T.uint32(0)))
                place = uint((last * vector + self.thread) * self.lines.size)
                store_shared(self.base[0] + uint(self.filters_at) + place, self.words, self.lines.size)

    def _spread_weight(self) -> None:
        """Put the filters in rows of words, with zeros between their lines, once for each phase.

        A thread has one word of some channels' rows: where that comes from is told once.
        """
        lines = self.lines
        row_words = lines.steps * STEP_WORDS
        together = max(1, self.threads // row_words)  # channels at a time
        while self.channels % together:
            together -= 1
        for part in range(-(-row_words // self.threads)):
            word = part * self.threads + self.thread % row_words if together > 1 else part * self.threads + self.thread
            last = (part + 1) * self.threads > row_words or together > 1
            with when(self.thread < together * row_words - part * self.threads if last else True):
                for phase in range(lines.phases):
                    self._spread_words(word, self.thread // row_words if together > 1 else 0, together, phase)

    def _spread_words(self, word: Expr, first: Expr, together: int, phase: int) -> None:
        """Put a word in the rows of the first channel and of every so many-th after it."""
        lines, size = self.lines, self.lines.size
        line, within = word // lines.line_words, word % lines.line_words
        keep: Expr = T.uint32(0)
        for e in range(lines.pair):
            element = within * lines.pair + (e - lines.shift(phase))
            dilation = self.w.dilation[1]
            tap = element // lines.pixel // dilation
            there = both(
                line < lines.filter_lines,
                element >= 0,
                tap < self.w.S,
                element // lines.pixel % dilation == 0 if dilation > 1 else True,
            )
            source = first * lines.filter_size + line * lines.taps + tap * lines.pixel + element % lines.pixel
            if dilation == 1:
                source = first * lines.filter_size + line * lines.taps + element
            place = uint(T.Select(there, source, 0) * size)
            store(self.sources, e, self.base[0] + uint(self.filters_at) + place)
            bits = (1 << 8 * size) - 1 << 8 * size * e
            keep = keep | T.Select(there, T.uint32(bits), T.uint32(0))
        store(self.keep, 0, keep)
        row = phase * self.channels + first
        position = lines.position(word, self.placed.ends, T.Select)
        store(self.row, 0, self.base[0] + uint(row * lines.weight_row_bytes + position * WORD))

        rows = self.channels // together
        batch = math.gcd(rows, WEIGHT_ROWS)
        with serial(rows // batch, "i") as i:
            with unrolled(batch, "j") as j:
                for e in range(lines.pair):
                    filters = uint((i * batch + j) * (together * lines.filter_size * size))
                    if size == WORD:
                        ptx("ld.shared.b32", self.words[j], self.sources[e] + filters)
                    else:
                        ptx("ld.shared.b16", self.halves[j * 2 + e], self.sources[e] + filters)
            with unrolled(batch, "j") as j:
                if size == WORD:  # rounded here, where it costs nothing; what it multiplies is cut off
                    ptx("cvt.rna.tf32.f32", self.words[j], T.reinterpret("float32", self.words[j]))
                else:
                    store(self.words, j, self._joined(j * 2))
                store(self.words, j, self.words[j] & self.keep[0])
                address = self.row[0] + uint((i * batch + j) * (together * lines.weight_row_bytes))
                ptx("st.shared.b32", address, self.words[j])

    def _point_lanes(self) -> None:
        """Where each lane finds its words: of its pixel, for each pattern of four lanes' words, and of the weight."""
        lines, lane = self.lines, self.lane
        row = self.phase * self.channels + lane % 8 + lane // 16 * 8
        offset = row * lines.weight_row_bytes + lane // 8 % 2 * VECTOR
        store(self.weight, 0, self.base[0] + uint(offset))
        column = self._column(lane // QUAD_WORDS * self.placed.spread[0])
        first = (lines.lead + column * lines.step) // lines.pair * WORD
        for index, pattern in enumerate(self.patterns):
            offset = pattern[0]
            for word in range(1, QUAD_WORDS):
                offset = T.Select(lane % QUAD_WORDS == word, pattern[word], offset)
            if pattern == tuple(word * WORD for word in range(QUAD_WORDS)):
                offset = lane % QUAD_WORDS * WORD
            store(self.pixel, index, self.base[0] + uint(self.inputs_at + first + offset))

    # Products

    def _begin_sums(self) -> None:
        """Set the sums to zero, or to the bias."""
        if not self.begun:
            zeros(self.sums, int(self.tile.accumulators))
            return
        with unrolled(self.n_tiles, "j") as j:
            self._load_of_channel(0, j)
            bias = self.of_channel[self.of_channels[0]]
            with unrolled(self.tile.rows, "r") as r, unrolled(2, "second") as second:
                for e in range(2):
                    store(self.sums, self._sum(r, j) + second * 2 + e, bias[e])

    def _load_of_channel(self, index: int, j: Expr) -> None:
        """Load what the epilogue has for the lane's two channels of an mma."""
        values = self.of_channel[self.of_channels[index]]
        address = self._argument(index, j * CHANNELS + self.lane % QUAD_WORDS * 2)
        ptx("ld.shared.v2.f32", values[0], values[1], address)

    def _sum(self, r: Expr, j: Expr) -> Expr:
        """The first of four sums of a lane: two channels of one pixel, and of its second."""
        return (r * self.n_tiles + j) * 4

    def _load_weight(self, step: int, slot: int) -> None:
        """Load the weight's fragments of a step."""
        with unrolled(self.channels // 16, "j") as j:
            address = self.weight[0] + uint(j * (16 * self.lines.weight_row_bytes) + step * STEP_WORDS * WORD)
            first = slot * self.n_tiles * 2 + j * 4
            ptx("ldmatrix.sync.aligned.m8n8.x4.shared.b16", *(self.b[first + e] for e in range(4)), address)

    def _go_on(self, buffer: Expr) -> None:
        """Point the lanes to the next tile's inputs; addresses wrap around."""
        if self.buffers > 1:
            back = T.uint32((1 << 32) - (self.buffers - 1) * self.input_bytes)
            step = T.Select(buffer == self.buffers - 1, back, T.uint32(self.input_bytes))
            for index in range(len(self.patterns)):
                store(self.pixel, index, self.pixel[index] + step)

    def _multiply(self) -> None:
        """Add the products of a tile to its sums."""
        placed = self.placed
        shape, dtype = _MMA[self.w.dtype]
        mma = f"mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32"
        quads = list(placed.quads())
        second = placed.spread[1] * placed.pixel_bytes
        for step in range(self.lines.steps):
            slot = step if self.tile.hold else 0
            if not self.tile.hold:
                self._load_weight(step, slot)
            with unrolled(self.tile.rows, "r") as r:
                for e in range(4):
                    quad = quads[step * 2 + e // 2]
                    pattern = self.patterns.index(tuple(at - quad[0] for at in quad))
                    offset = r * (self.w.stride[0] * placed.line_bytes) + (e % 2 * second + quad[0])
                    ptx("ld.shared.b32", self.a[e], self.pixel[pattern] + uint(offset))
                with unrolled(self.n_tiles, "j") as j:
                    sums = [self.sums[self._sum(r, j) + e] for e in range(4)]
                    b = [self.b[(slot * self.n_tiles + j) * 2 + e] for e in range(2)]
                    ptx(mma, *sums, *(self.a[e] for e in range(4)), *b, *sums)

    # Outputs

    def _finish(self, number: Expr) -> None:
        """Apply the epilogue to the sums of a tile, and store it, a row at a time."""
        with unrolled(self.tile.rows, "r") as r:
            for name in self.of_outputs:
                self._move_outputs(number, r, name, to_memory=False)
                call(T.cuda.warp_sync())
                if name != self.of_outputs[-1]:  # the last one's are read one by one, where later the outputs are
                    with unrolled(self.n_tiles, "j") as j, unrolled(2, "second") as second:
                        self._read_outputs(name, j, second)
                    call(T.cuda.warp_sync())
            with unrolled(self.n_tiles, "j") as j:
                for index in range(self.begun, len(self.of_channels)):
                    self._load_of_channel(index, j)
                with unrolled(2, "second") as second:
                    for name in self.of_outputs[-1:]:
                        self._read_outputs(name, j, second)
                    self._write_outputs(j, second, [self._finished(r, j, second, e) for e in range(2)])
            call(T.cuda.warp_sync())
            self._move_outputs(number, r, "Y", to_memory=True)
            call(T.cuda.warp_sync())

    def _finished(self, r: Expr, j: Expr, second: Expr, e: int) -> Expr:
        """A sum with the epilogue, but for what it begins with."""

        def read(name: str) -> Expr:
            if name in self.of_channel:
                return self.of_channel[name][e]
            return unpack(self._residual(name, j, second), 2, self.w.storage)[e]

        return epilogue.compute(self.w.epilogue[self.begun :], self.sums[self._sum(r, j) + second * 2 + e], read)

    def _output(self, j: Expr, second: Expr, e: int) -> Expr:
        """Where in shared memory the warp has one of the lane's outputs of an mma."""
        pixel, channel = self.lane // QUAD_WORDS, j * CHANNELS + self.lane % QUAD_WORDS * 2 + e
        if self.lines.channels_last:  # of the mma's pixels in its own order
            offset = (pixel + second * 8) * self.output_row + channel * self.lines.size
        else:
            across, between = self.placed.spread
            offset = channel * self.output_row + (pixel * across + second * between) * self.lines.size
        return self._outputs + uint(offset)

    @property
    def _outputs(self) -> Expr:
        return self.base[0] + uint(self.output_at) + uint(self.warp * self.output_bytes)

    def _residuals(self, name: str) -> int:
        """Registers for a tensor like the output: for two elements, or for all of a row while another one is read."""
        pairs = 1 if name == self.of_outputs[-1] else self.n_tiles * 2
        return pairs * 2 // self.lines.pair

    def _residual(self, name: str, j: Expr, second: Expr) -> list[Expr]:
        """The registers with the lane's two elements, for an mma, of a tensor like the output."""
        words = 2 // self.lines.pair
        first = 0 if name == self.of_outputs[-1] else (j * 2 + second) * words
        return [self.of_output[name][first + word] for word in range(words)]

    def _read_outputs(self, name: str, j: Expr, second: Expr) -> None:
        """Load two elements of a tensor like the output, which the warp has in shared memory."""
        size, words = self.lines.size, 2 // self.lines.pair
        if self.lines.channels_last:
            load_shared(self.words, self._output(j, second, 0), 2 * size)
        elif size == WORD:
            for e in range(2):
                ptx("ld.shared.b32", self.words[e], self._output(j, second, e))
        else:
            for e in range(2):
                ptx("ld.shared.b16", self.halves[e], self._output(j, second, e))
            store(self.words, 0, self._joined(0))
        first = 0 if name == self.of_outputs[-1] else (j * 2 + second) * words
        for word in range(words):
            store(self.of_output[name], first + word, self.words[word])

    def _joined(self, first: Expr) -> Expr:
        """Two halves of a word, in registers one behind the other, as the word."""
        low, high = (T.Cast("uint32", self.halves[first + e]) for e in range(2))
        return low | T.shift_left(high, T.uint32(16))

    def _write_outputs(self, j: Expr, second: Expr, values: list[Expr]) -> None:
        """Round two outputs and put them where the warp stores them from."""
        if self.lines.channels_last:
            pack(self.words, 0, values, self.w.storage)
            store_shared(self._output(j, second, 0), self.words, 2 * self.lines.size)
            return
        for e, value in enumerate(values):
            pack(self.words, 0, [value], self.w.storage)
            store_shared(self._output(j, second, e), self.words, self.lines.size)

    def _move_outputs(self, number: Expr, r: Expr, name: str, *, to_memory: bool) -> None:
        """Move the warp's outputs of a row between shared memory and a tensor, in vectors as wide as fit there."""
        w, lines = self.w, self.lines
        n, p, q = self._origin(number)
        row = p + r
        contiguous = w.O if lines.channels_last else w.Q if lines.phases == 1 else 1
        width = math.gcd(contiguous, VECTOR // lines.size)
        vectors = (self.channels if lines.channels_last else PIXELS) // width  # of a pixel, or a channel
        with unrolled(PIXELS * self.channels // width // WARP, "i") as i:
            vector = i * WARP + self.lane
            major, minor = vector // vectors, vector % vectors * width
            if lines.channels_last:
                together = max(1, 8 // vectors)  # pixels that eight lanes move: such as lie in different banks
                major = major // 8 * 8 + major % together * (8 // together) + major % 8 // together
                across, between = self.placed.spread
                pixel, channel = major % 8 * across + major // 8 * between, minor
            else:
                pixel, channel = minor, major
            column, channel = q + self._column(pixel), self.first_channel + channel
            there = both(
                row < w.P if w.P % self.tile.rows else True,
                column < w.Q if w.Q % int(self.tile.columns) else True,
                channel < w.O if w.O % self.channels else True,
            )
            if lines.channels_last:
                index = ((n * w.P + row) * w.Q + column) * w.O + channel
            else:
                index = ((n * w.O + channel) * w.P + row) * w.Q + column
            here = self._outputs + uint(major * self.output_row + minor * lines.size)
            if to_memory:
                load_shared(self.words, here, width * lines.size)
                with when(there):
                    store_global(self.arguments[name], index, self.words, width)
            else:
                with when(there):
                    load_global(self.words, self.arguments[name], index, width)
                    store_shared(here, self.words, width * lines.size)
