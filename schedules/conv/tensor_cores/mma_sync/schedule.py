"""Convolution on tensor cores, each instruction written: mma.sync on tiles that cp.async brings, several steps ahead.

What `tensor_core` does by rewriting is written here as a program, for the things that rewriting cannot say:

- Copies of 16 bytes that are zeros where the filter hangs over the image's border, with no branch around them, and of
  8, 4 or 2 bytes where the channels of a group fill no more.
- A swizzle: the chunk of 16 bytes that is c-th in row r lies at c XOR r (modulo 8), so that the 8 rows that `ldmatrix`
  reads at a time, and the chunks that neighbouring threads store, are in distinct banks with nothing padded.
- Fragments for the next mma are read while the tensor cores compute this one, across steps too: one barrier a step.
- A bias that is on its way to shared memory while the block multiplies; and a residual that sums begin with, if it is
  not added at the end (`residual`).
- Sums of one output shared among warps (`warps_k`) and among blocks (`split_k`), for images of few pixels with many
  channels. Blocks meet in the shared memory of a cluster (sm_90 and later), or in scratch memory that a second step
  reads.
- Several tiles in turn for one block (`tiles_per_block`), where there are many: while it stores one, the operands of
  the next are on their way.

The operands are rows of the reduction, taps × channels with the channels last, as both lie in memory in NHWC: pixels ×
reduction of the input, which exists nowhere as such (implicit GEMM), and channels × reduction of the weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.gpu import WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.layout import CHANNELS_LAST

from ....program import (
    Buffer,
    Expr,
    allocate,
    both,
    call,
    guarded,
    load_global,
    load_shared,
    pack,
    parallel,
    ptx,
    serial,
    store,
    store_global,
    uint,
    unpack,
    unrolled,
    when,
    write,
    zeros,
)
from ..outputs import finish, read_argument, without_relu
from ..warp_tiles import CHUNK, MMA_BYTES, MMA_M, MMA_N, SUM_BYTES, Product, WarpTiles

DTYPES = ("float16", "bfloat16", "tf32")
MMA = {
    "float16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "tf32": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
}
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
ASYNC_COPY = {
    16: "cp.async.cg.shared.global.L2::128B",
    8: "cp.async.ca.shared.global.L2::128B",
    4: "cp.async.ca.shared.global.L2::128B",
}
SWIZZLED = 8  # chunks among which a row's are permuted: 128 bytes, what all banks serve at a time
TOGETHER = 4  # vectors of outputs that a thread has at a time, at most
STAGED = "staged"  # what a vector is called that only passes through
ADDING_THREADS = 256  # of a block that adds up partial sums


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    tiles = WarpTiles.of_columns(c)
    return tiles.usage(Product.of(w), _staged_itemsize(w, tiles), _of_channels(w, tiles))


def is_channels_last(w: Conv) -> bool:
    """Whether the reduction is contiguous in memory, for each tap."""
    return w.layout == CHANNELS_LAST


def is_promising(w: Conv) -> bool:
    """Whether a group's channels fill chunks, and its output channels half an mma, or there are no groups."""
    p = Product.of(w)
    return w.layout == CHANNELS_LAST and (p.groups == 1 or (p.depth * p.itemsize % CHUNK == 0 and p.n >= MMA_N))


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=usage,
    condition=is_channels_last,
    promising=is_promising,
    supersedes=("direct", "implicit_gemm", "tensor_core"),
    kinds=("cuda",),
    since=80,
)
def mma_sync(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Tiles of pixels × channels by block and warp; steps of the reduction, some of them in flight."""
    tiles = WarpTiles.ask(k, w)
    return write(w, lambda arguments: _program(w, tiles, arguments))


def _parts(w: Conv, begins: bool, whole: bool) -> tuple[list[epilogue.Operation], list[epilogue.Operation]]:
    """The operations of the epilogue that are applied in registers, to sums, and those applied to vectors of outputs.

    What the first ones add is added in any order. A residual is among them where sums begin with it. It comes in pairs
    of channels then, as registers hold the sums; and in vectors where it is added at the end.

    Args:
        w: the workload.
        begins: whether sums begin with a residual.
        whole: whether the sums are the block's alone: only then may there be anything but adding.
    """
    operations = epilogue.steps(w.epilogue)
    adding = list(itertools.takewhile(lambda operation: operation.adds, operations))
    early = [operation for operation in adding if begins or operation.takes == "channel"]
    late = [operation for operation in operations if operation not in early]
    while whole and late and late[0].takes != "output":
        early.append(late.pop(0))
    return early, late


def _is_unfinished(w: Conv, tiles: WarpTiles) -> Any:
    """Whether the tile in shared memory is of sums: where others have a part in them, or more is read for outputs."""
    late_begun, late = (bool(_parts(w, begins, whole=True)[1]) for begins in (True, False))
    return np.where(np.asarray(tiles.residual) == "begin", late_begun, late) | np.asarray(tiles.in_cluster)


def _staged_itemsize(w: Conv, tiles: WarpTiles) -> Any:
    """Bytes of an element of the tile in shared memory."""
    return np.where(_is_unfinished(w, tiles), SUM_BYTES, Product.of(w).itemsize)


def _of_channels(w: Conv, tiles: WarpTiles) -> Any:
    """How many numbers each channel has in shared memory: of operations that are applied in registers."""

    def count(begins: bool, whole: bool) -> int:
        return sum(operation.takes == "channel" for operation in _parts(w, begins, whole)[0])

    begins = np.asarray(tiles.residual) == "begin"
    whole = np.where(begins, count(True, True), count(False, True))
    shared = np.where(begins, count(True, False), count(False, False))
    return np.where(tiles.in_scratch, 0, np.where(tiles.in_cluster, shared, whole))


def _program(w: Conv, tiles: WarpTiles, arguments: dict[str, Buffer]) -> None:
    partial = None
    if tiles.in_scratch:
        partial = allocate("partial", tiles.split_k * w.N * math.prod(w.out) * w.O, "float32", "global")
    _Multiplication(w, tiles, arguments, partial).write()
    if partial is not None:
        _add_up(w, tiles.split_k, arguments, partial)


class _Multiplication:
    """The kernel that multiplies: its numbers, its arrays, and its parts in the order in which they run.

    Args:
        w: the workload.
        tiles: how it is cut up.
        arguments: by name.
        partial: scratch memory for the sums of each block of a split reduction, if these meet there.
    """

    def __init__(self, w: Conv, tiles: WarpTiles, arguments: dict[str, Buffer], partial: Buffer | None) -> None:
        self.w, self.t, self.p = w, tiles, Product.of(w)
        self.arguments, self.partial = arguments, partial
        p, t = self.p, tiles
        self.chunk_elements = CHUNK // p.itemsize
        self.piece = math.gcd(p.depth, self.chunk_elements)  # elements that are neighbours in memory, for any tap
        self.row_bytes = t.block_k * p.itemsize
        self.chunks = self.row_bytes // CHUNK  # of a row
        self.rows = int(t.rows(p.itemsize))
        self.stage_bytes = int(t.stage_bytes(p))
        self.steps = int(t.steps(p))
        self.grid = int(t.blocks(p)) // int(t.split_k)
        self.ring = 0 if t.tiles_per_block == 1 else int(t.stages) * self.stage_bytes  # a finished tile is behind
        self.mmas_m = t.block_m // t.warps_m // MMA_M  # of a warp
        self.mmas_n = t.block_n // t.warps_n // MMA_N
        self.mmas_k = self.row_bytes // MMA_BYTES // t.warps_k  # in a step
        self.unfinished = bool(_is_unfinished(w, t))
        self.staged_itemsize = int(_staged_itemsize(w, t))
        self.pitch = int(t.pitch(self.staged_itemsize))
        self.early, self.late = _parts(w, t.residual == "begin", not t.in_cluster) if partial is None else ([], [])
        self.of_channels = [operation for operation in self.early if operation.takes == "channel"]
        self.channels_at = int(t.tile_bytes(p, self.staged_itemsize))  # in shared memory
        self.vector = math.gcd(p.n, self.chunk_elements)  # output elements that are neighbours in memory

    def write(self) -> None:
        """Emit the kernel."""
        t, p = self.t, self.p
        copied = [-(-block // self.rows) for block in (t.block_m, t.block_n)]
        self.sums = allocate("sums", self.mmas_m * self.mmas_n * 4, "float32")
        self.a = allocate("a", 2 * self.mmas_m * 4, "uint32")
        self.b = allocate("b", 2 * self.mmas_n * 2, "uint32")
        self.slot = allocate("slot", 2, "int32")  # of the ring of stages: the one that is read, the one that is filled
        self.pixel = allocate("pixel", copied[0], "int32")  # where the first tap of a row's pixel lies in X
        self.first = [allocate(f"first_{axis}", copied[0], "int32") for axis in range(self.w.rank)]  # its coordinates
        self.filter = allocate("filter", copied[1], "int32")  # where a row's filter lies in K
        self.memory = allocate("memory", 1, "uint32")  # the address of shared memory
        self.words = allocate("words", 8, "uint32")
        self.value = allocate("value", 8, "float32")
        self.added = {each.name: allocate(f"{each.name}_j", self.mmas_n * 2, "float32") for each in self.of_channels}
        nbytes = int(t.shared_bytes(p, self.staged_itemsize, len(self.of_channels)))
        shared = allocate("shared", nbytes // 4, "uint32", "shared.dyn")
        with (
            parallel(int(t.split_k), "blockIdx.z") as self.part,
            parallel(int(t.split_k), "clusterCtaIdx.z") if t.in_cluster else nullcontext(),
            parallel(self.grid, "blockIdx.x") as block,
            parallel(int(t.threads), "threadIdx.x") as self.thread,
        ):
            self._place_thread()
            store(self.memory, 0, T.cuda.cvta_generic_to_shared(shared.access_ptr("rw")))
            self._find_rows(block)
            for step in range(t.stages - 1):
                if step < self.steps:
                    self._copy_input(step, step)
                    self._copy_filters(step, step)
                call(T.ptx.cp.async_.commit_group())
            store(self.slot, 0, 0)
            store(self.slot, 1, t.stages - 1)
            if t.tiles_per_block == 1:  # what the epilogue reads is asked for before the first operands are waited for
                self._take(block)
            self._wait()
            self._fragments(0, 0, 0)
            if t.tiles_per_block == 1:
                self._compute(None)
                return
            with serial(int(t.tiles_per_block), "turn") as turn:
                tile = block + turn * self.grid
                with when(self._is_tile(tile)):
                    self._take(tile)
                    self._compute(tile + self.grid, turn + 1 < t.tiles_per_block)

    def _take(self, tile: Expr) -> None:
        """Turn to a tile: the parts below are about it."""
        self.at_m, self.at_n, self.group = self._place(tile)
        self._copy_of_channels()
        self._begin()

    def _compute(self, following: Expr, more: Expr = False) -> None:
        """Compute the tile, whose first operands are there.

        Args:
            following: the number of the tile that this block computes next, if it does.
            more: whether it does, if that tile is one.
        """
        t = self.t
        self._multiply(following, more)
        if t.tiles_per_block == 1:  # what is left of the stages makes room
            call(T.ptx.cp.async_.wait_group(0))
            call(T.cuda.cta_sync())
        if t.warps_k > 1:
            self._add_up_warps()
        if self.partial is not None:
            with when(self._is_first_slice()):
                self._store_partial(self.partial)
            return
        with when(self._is_first_slice()):
            self._stage()
        if t.split_k > 1:
            call(T.cuda.cluster_sync())
        else:
            call(T.cuda.cta_sync())
        self._store()
        if t.split_k > 1:  # a block's shared memory is there until all have read it
            call(T.cuda.cluster_sync())

    def _place(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """The first pixel and the first channel of a tile, and its group."""
        across, down = -(-self.p.n // self.t.block_n), -(-self.p.m // self.t.block_m)
        return tile // across % down * self.t.block_m, tile % across * self.t.block_n, tile // (across * down)

    def _is_tile(self, number: Expr) -> Expr:
        """Whether there is a tile of that number: the last blocks may have fewer than the others."""
        whole = self.grid * self.t.tiles_per_block == int(self.t.tiles(self.p))
        return True if whole else number < int(self.t.tiles(self.p))

    def _place_thread(self) -> None:
        """Which rows and chunk a thread copies, and which part of the tile its warp computes."""
        t = self.t
        self.chunk, self.row = self.thread % self.chunks, self.thread // self.chunks
        self.lane, warp = self.thread % WARP, self.thread // WARP
        self.warp_m = warp % t.warps_m
        self.warp_n = warp // t.warps_m % t.warps_n
        self.warp_k = warp // (t.warps_m * t.warps_n)

    def _is_first_slice(self) -> Expr:
        """Whether this warp ends up with the sums of its part of the tile."""
        return self.warp_k == 0 if self.t.warps_k > 1 else True

    def _find_rows(self, tile: Expr) -> None:
        """Find where the rows begin that this thread copies. Rows beyond the product repeat its last one."""
        w, p = self.w, self.p
        at_m, at_n, group = self._place(tile)
        strides = _strides((w.N, *w.space, w.C))
        with unrolled(-(-self.t.block_m // self.rows), "i") as i:
            m = T.min(at_m + self.row + i * self.rows, p.m - 1)
            place = m % math.prod(w.out)
            at = m // math.prod(w.out) * strides[0] + group * p.depth
            for axis, first in enumerate(self.first):
                out = place // math.prod(w.out[axis + 1 :]) % w.out[axis]
                store(first, i, out * w.stride[axis] - w.before[axis])
                at = at + first[i] * strides[1 + axis]
            store(self.pixel, i, at)
        with unrolled(-(-self.t.block_n // self.rows), "i") as i:
            n = T.min(at_n + self.row + i * self.rows, p.n - 1)
            store(self.filter, i, (group * p.n + n) * p.k)

    def _copy_input(self, step: Expr, slot: Expr) -> None:
        """Start the copy of this block's pixels, for one of its steps, into a slot of the ring."""
        p, t, w = self.p, self.t, self.w
        start, to = (self.part * self.steps + step) * t.block_k, self._destination(slot)
        strides = _strides((w.N, *w.space, w.C))
        within_tap = p.depth % t.block_k == 0  # all of a step: then the tap is the same for all threads
        for piece in range(0, self.chunk_elements, self.piece):
            k = start + self.chunk * self.chunk_elements + piece
            tap = (start if within_tap else k) // p.depth
            offset = k - tap * p.depth
            away = []
            for axis in range(w.rank):
                away.append(tap // math.prod(w.kernel[axis + 1 :]) % w.kernel[axis] * w.dilation[axis])
                offset = offset + away[axis] * strides[1 + axis]
            with self._passes(t.block_m) as i:
                inside = [
                    T.Cast("uint32", self.first[axis][i] + away[axis]) < T.uint32(w.space[axis])
                    for axis in range(w.rank)
                    if _leaves_image(w, axis)
                ]
                at = to + uint(i * self.rows * self.row_bytes)
                self._copy_piece(at, piece, "X", self.pixel[i] + offset, both(*inside, self._is_in_sum(k)))

    def _copy_filters(self, step: Expr, slot: Expr) -> None:
        """Start the copy of this block's filters, for one of its steps, into a slot of the ring."""
        t = self.t
        start = (self.part * self.steps + step) * t.block_k
        to = self._destination(slot) + uint(t.block_m * self.row_bytes)
        for piece in range(0, self.chunk_elements, self.piece):
            k = start + self.chunk * self.chunk_elements + piece
            with self._passes(t.block_n) as i:
                at = to + uint(i * self.rows * self.row_bytes)
                self._copy_piece(at, piece, "K", self.filter[i] + k, self._is_in_sum(k))

    def _destination(self, slot: Expr) -> Expr:
        """Where the first chunk goes that this thread copies into a slot."""
        line = self.memory[0] + uint(slot * self.stage_bytes) + uint(self.row * self.row_bytes)
        return line + uint((self.chunk ^ self._swizzle(self.row)) * CHUNK)

    def _is_in_sum(self, k: Expr) -> Expr:
        """Whether a place in the reduction is one, and not in the overhang of the last steps."""
        return True if self.p.k % (self.t.block_k * self.steps * self.t.split_k) == 0 else k < self.p.k

    def _passes(self, block: int) -> Any:
        """A loop over the rows of an operand that a thread copies."""
        whole = block % self.rows == 0
        passes = unrolled(-(-block // self.rows), "i")
        return guarded(passes, lambda i: True if whole else self.row + i * self.rows < block)

    def _copy_piece(self, to: Expr, piece: int, operand: str, at: Expr, inside: Expr) -> None:
        """Copy neighbouring elements of an operand to shared memory, or zeros if they are not `inside`."""
        nbytes = self.piece * self.p.itemsize
        to = to + uint(piece * self.p.itemsize)
        if nbytes in ASYNC_COPY:
            self._copy(to, operand, at, nbytes, inside)
            return
        store(self.words, 0, T.uint32(0))  # two bytes are less than an asynchronous copy has
        with when(inside):
            load_global(self.words, self.arguments[operand], at, 1)
        ptx("st.shared.b16", to, T.Cast("uint16", self.words[0]))

    def _copy(self, to: Expr, name: str, at: Expr, nbytes: int, inside: Expr) -> None:
        """Start the copy of neighbouring elements of an argument to shared memory, or of zeros if not `inside`."""
        read = () if inside is True else (T.Select(inside, T.uint32(nbytes), T.uint32(0)),)
        ptx(ASYNC_COPY[nbytes], to, self.arguments[name].access_ptr("r", offset=at), nbytes, *read)

    def _copy_of_channels(self) -> None:
        """Start the copy of what the epilogue has for each channel of the tile, behind all else in shared memory.

        It is there at the end of the tile, for all threads: it goes with the operands that the first step asks for. Of
        blocks that share sums only the first has anything to add. All have read that of one tile before the next one's
        is on its way: there is a barrier between the tile in registers and its store.
        """
        p, t = self.p, self.t
        width = math.gcd(p.n, CHUNK // SUM_BYTES)
        copies = t.block_n // width
        for place, operation in enumerate(self.of_channels):
            with unrolled(-(-copies // t.threads), "i") as i:
                copy = self.thread + i * t.threads
                n = self.at_n + copy * width
                inside = both(True if p.n % t.block_n == 0 else n < p.n, True if t.split_k == 1 else self.part == 0)
                to, at = self._of_channel(place, copy * width), self.group * p.n + n
                with when(True if copies % t.threads == 0 else copy < copies):
                    self._copy(to, operation.name, at, width * SUM_BYTES, inside)

    def _of_channel(self, place: int, channel: Expr) -> Expr:
        """The address of what the epilogue has for a channel of the tile, for one of its operations."""
        return self.memory[0] + uint(self.channels_at + place * self.t.block_n * SUM_BYTES) + uint(channel * SUM_BYTES)

    def _swizzle(self, row: Expr) -> Expr:
        """What the number of a chunk in a row is XORed with."""
        rows_of_line = max(SWIZZLED // self.chunks, 1)  # that lie side by side in the banks
        return row // rows_of_line % min(self.chunks, SWIZZLED)

    def _begin(self) -> None:
        """Begin the sums: with a residual, where that is so, in one of the slices of the reduction, else with zero."""
        zeros(self.sums, self.mmas_m * self.mmas_n * 4)
        first = both(self._is_first_slice(), True if self.t.split_k == 1 else self.part == 0)
        width = math.gcd(self.p.n, 2)
        for operation in self.early:
            if operation.takes != "output":
                continue
            with (
                when(first),
                unrolled(self.mmas_n, "j") as j,
                unrolled(self.mmas_m, "i") as i,
                unrolled(2, "h") as h,
            ):
                m, n = self._pixel(i, h), self._channel(j)
                for pair in range(0, 2, width):
                    with when(self._is_output(m, n + pair)):
                        added = self._read(operation, m, n + pair, width)
                        self._add(operation, (i * self.mmas_n + j) * 4 + h * 2 + pair, added)

    def _add(self, operation: epilogue.Operation, first: Expr, added: Sequence[Expr]) -> None:
        """Apply an operation to neighbouring sums."""
        for e, value in enumerate(added):
            store(self.sums, first + e, operation.compute(self.sums[first + e], value))

    def _pixel(self, i: Expr, h: Expr) -> Expr:
        """The pixel of a sum of this thread, of the i-th mma of its warp in its h-th half."""
        return self.at_m + (self.warp_m * self.mmas_m + i) * MMA_M + h * 8 + self.lane // 4

    def _channel(self, j: Expr) -> Expr:
        """The channel, in its group, of the first of two neighbouring sums of this thread, of the j-th mma."""
        return self.at_n + (self.warp_n * self.mmas_n + j) * MMA_N + self.lane % 4 * 2

    def _is_output(self, m: Expr, n: Expr) -> Expr:
        """Whether the tile's pixel and channel are in the product, and not in its overhang."""
        p, t = self.p, self.t
        return both(True if p.m % t.block_m == 0 else m < p.m, True if p.n % t.block_n == 0 else n < p.n)

    def _read(self, operation: epilogue.Operation, m: Expr, n: Expr, width: int) -> list[Expr]:
        """An operation's argument for neighbouring channels of a pixel, in the accumulation dtype."""
        return read_argument(self.w, self.arguments, operation, m, self.group * self.p.n + n, width, self.words)

    def _multiply(self, following: Expr, more: Expr) -> None:
        """Walk through the steps, each copied `stages` - 1 of them ahead, its fragments one mma ahead.

        Behind the last steps that are copied for this tile come the first ones of the following. What an mma waits for
        is asked for before what is wanted later: fragments before copies, and these spread over the mmas of a step, for
        the instructions to be issued while the tensor cores are at work.
        """
        t, ahead, last = self.t, self.t.stages - 1, self.mmas_k - 1

        def copy(step: Expr, part: Callable[[Expr, Expr], None]) -> None:
            with when(step + ahead < self.steps):
                part(step + ahead, self.slot[1])
            if t.tiles_per_block > 1:
                with when(both(step + ahead >= self.steps, more, self._is_tile(following))):
                    part(step + (ahead - self.steps), self.slot[1])

        def advance(which: int) -> None:
            store(self.slot, which, T.Select(self.slot[which] == t.stages - 1, 0, self.slot[which] + 1))

        with serial(self.steps, "step") as step:
            if t.tiles_per_block > 1:
                with when(both(step + ahead == self.steps, more, self._is_tile(following))):
                    self._find_rows(following)
            for mma in range(self.mmas_k):
                if mma == last:
                    advance(0)
                    self._wait()
                    self._fragments(self.slot[0], 0, 0)
                else:
                    self._fragments(self.slot[0], mma + 1, (mma + 1) % 2)
                if mma == 0:
                    copy(step, self._copy_input)
                if mma == min(1, last - 1):
                    copy(step, self._copy_filters)
                    call(T.ptx.cp.async_.commit_group())
                    advance(1)
                self._mma(mma % 2)

    def _wait(self) -> None:
        """Wait for the next step, and for all warps to have read the last one."""
        call(T.ptx.cp.async_.wait_group(self.t.stages - 2))
        call(T.cuda.cta_sync())

    def _fragments(self, slot: Expr, mma: int, into: int) -> None:
        """Read this warp's operands of an mma of a step into one of two sets of registers.

        An `ldmatrix` of four matrices reads 16 rows × 32 bytes: of the input in the order of mma's registers, of the
        weight two mmas' operands.
        """
        lane, first = self.lane, (self.warp_k * self.mmas_k + mma) * 2
        stage = self.memory[0] + uint(slot * self.stage_bytes)
        row, chunk = self.warp_m * (self.mmas_m * MMA_M) + lane % 16, first + lane // 16
        at = stage + uint(row * self.row_bytes) + uint((chunk ^ self._swizzle(lane % 8)) * CHUNK)
        with unrolled(self.mmas_m, "i") as i:
            registers = [self.a[(into * self.mmas_m + i) * 4 + e] for e in range(4)]
            ptx(LDMATRIX, *registers, at + uint(i * (MMA_M * self.row_bytes)))
        row, chunk = self.warp_n * (self.mmas_n * MMA_N) + lane % 8 + lane // 16 * 8, first + lane // 8 % 2
        at = stage + uint(self.t.block_m * self.row_bytes) + uint(row * self.row_bytes)
        at = at + uint((chunk ^ self._swizzle(lane % 8)) * CHUNK)
        with unrolled(self.mmas_n // 2, "j") as j:
            registers = [self.b[(into * self.mmas_n + j * 2) * 2 + e] for e in range(4)]
            ptx(LDMATRIX, *registers, at + uint(j * (2 * MMA_N * self.row_bytes)))

    def _mma(self, of: int) -> None:
        """Multiply what is in one of the two sets of registers."""
        with unrolled(self.mmas_m, "i") as i, unrolled(self.mmas_n, "j") as j:
            sums = [self.sums[(i * self.mmas_n + j) * 4 + e] for e in range(4)]
            a = [self.a[(of * self.mmas_m + i) * 4 + e] for e in range(4)]
            b = [self.b[(of * self.mmas_n + j) * 2 + e] for e in range(2)]
            ptx(MMA[self.w.dtype], *sums, *a, *b, *sums)

    def _add_up_warps(self) -> None:
        """Add what the warps along the reduction have, through shared memory, in the first of them."""
        count, threads = self.mmas_m * self.mmas_n * 4, self.t.threads // self.t.warps_k
        mine = self.memory[0] + uint(self.thread % threads * SUM_BYTES)
        with when(self.warp_k > 0), unrolled(count, "i") as i:
            at = mine + uint((self.warp_k - 1) * (threads * count * SUM_BYTES))
            ptx("st.shared.b32", at + uint(i * (threads * SUM_BYTES)), self.sums[i])
        call(T.cuda.cta_sync())
        with when(self.warp_k == 0), unrolled(self.t.warps_k - 1, "g") as g, unrolled(count, "i") as i:
            ptx("ld.shared.b32", self.value[0], mine + uint((g * count + i) * (threads * SUM_BYTES)))
            store(self.sums, i, self.sums[i] + self.value[0])
        call(T.cuda.cta_sync())

    def _store_partial(self, partial: Buffer) -> None:
        """Store this block's sums to scratch memory: (blocks that share an output, pixels, channels)."""
        p = self.p
        width = math.gcd(p.n, 2)
        with unrolled(self.mmas_m, "i") as i, unrolled(self.mmas_n, "j") as j, unrolled(2, "h") as h:
            m, n = self._pixel(i, h), self._channel(j)
            at = (self.part * p.m + m) * self.w.O + self.group * p.n + n
            for pair in range(0, 2, width):
                with when(self._is_output(m, n + pair)):
                    first = (i * self.mmas_n + j) * 4 + h * 2 + pair
                    for e in range(width):
                        store(self.value, e, self.sums[first + e])
                    to = partial.access_ptr("w", offset=at + pair)
                    ptx(f"st.global{'.v2' if width == 2 else ''}.b32", to, *(self.value[e] for e in range(width)))

    def _stage(self) -> None:
        """Put the tile into shared memory, where the threads that store it find neighbouring channels."""
        itemsize = self.staged_itemsize
        operations, relu = without_relu(self.early, "float32" if self.unfinished else self.w.storage)
        row = self.warp_m * (self.mmas_m * MMA_M) + self.lane // 4
        column = self.warp_n * (self.mmas_n * MMA_N) + self.lane % 4 * 2
        at = self.memory[0] + uint(self.ring) + uint(row * self.pitch) + uint(column * itemsize)
        for place, operation in enumerate(self.of_channels):
            added = self.added[operation.name]
            with unrolled(self.mmas_n, "j") as j:
                ptx("ld.shared.v2.b32", added[j * 2], added[j * 2 + 1], self._of_channel(place, column + j * MMA_N))
        with unrolled(self.mmas_m, "i") as i, unrolled(self.mmas_n, "j") as j, unrolled(2, "h") as h:
            sums = [self.sums[(i * self.mmas_n + j) * 4 + h * 2 + e] for e in range(2)]
            pair = [self._applied(operations, value, j * 2 + e) for e, value in enumerate(sums)]
            to = at + uint((i * MMA_M + h * 8) * self.pitch) + uint(j * (MMA_N * itemsize))
            if itemsize == SUM_BYTES:
                ptx("st.shared.v2.b32", to, *pair)
            else:
                pack(self.words, 0, pair, self.w.storage, relu)
                ptx("st.shared.b32", to, self.words[0])

    def _applied(self, operations: Sequence[epilogue.Operation], value: Expr, channel: Expr) -> Expr:
        """A sum of one of this thread's channels with operations applied in registers, but for what it began with."""
        for operation in operations:
            if operation.takes == "channel":
                value = operation.compute(value, self.added[operation.name][channel])
            elif not operation.takes:
                value = operation.compute(value)
        return value

    def _store(self) -> None:
        """Store the tile from shared memory in vectors of channels; of a cluster each block its share of the pixels.

        A thread has several vectors at a time: it asks for all that it reads before it waits for any.
        """
        t, p, w = self.t, self.p, self.w
        vectors = t.block_m // t.split_k * (t.block_n // self.vector)
        passes = -(-vectors // t.threads)
        together = math.gcd(passes, TOGETHER)
        reading = [operation for operation in self.late if operation.takes == "output"]
        names = [operation.name for operation in reading] if self.unfinished else [STAGED]
        asked = [{name: allocate(f"{name}_{u}", 8, "uint32") for name in names} for u in range(together)]
        with serial(passes // together, "i") as i:
            numbers = [(i * together + u) * t.threads + self.thread for u in range(together)]
            for number, words in zip(numbers, asked, strict=True):
                inside, at, m, n = self._vector(number, vectors)
                with when(inside):
                    if not self.unfinished:
                        load_shared(words[STAGED], self.memory[0] + at, self.vector * p.itemsize)
                    for operation in reading if self.unfinished else ():
                        load_global(words[operation.name], self.arguments[operation.name], m * w.O + n, self.vector)
            for number, words in zip(numbers, asked, strict=True):
                inside, at, m, n = self._vector(number, vectors)
                with when(inside):
                    if self.unfinished:
                        self._sum_up(at)
                        finish(w, self.arguments, self.late, m, n, self.vector, self.value, self.words, words)
                    staged = self.words if self.unfinished else words[STAGED]
                    store_global(self.arguments["Y"], m * w.O + n, staged, self.vector)

    def _vector(self, number: Expr, vectors: int) -> tuple[Expr, Expr, Expr, Expr]:
        """Whether a vector of the tile is to be stored, its place in shared memory, its pixel and first channel."""
        t, across = self.t, self.t.block_n // self.vector
        row, column = self.part * (t.block_m // t.split_k) + number // across, number % across * self.vector
        m, n = self.at_m + row, self.at_n + column
        inside = both(True if vectors % t.threads == 0 else number < vectors, self._is_output(m, n))
        at = uint(self.ring) + uint(row * self.pitch) + uint(column * self.staged_itemsize)
        return inside, at, m, self.group * self.p.n + n

    def _sum_up(self, at: Expr) -> None:
        """Load neighbouring sums of the tile, in a cluster added up over its blocks."""
        if self.t.split_k == 1:
            load_shared(self.value, self.memory[0] + at, self.vector * SUM_BYTES)
            return
        total = self.value
        zeros(total, self.vector)
        with unrolled(int(self.t.split_k), "g") as g:
            ptx("mapa.shared::cluster.u32", self.words[0], self.memory[0] + at, uint(g))
            for first in range(0, self.vector, 4):
                count = min(4, self.vector - first)
                suffix = f".v{count}" if count > 1 else ""
                read = [self.words[1 + e] for e in range(count)]
                ptx(f"ld.shared::cluster{suffix}.b32", *read, self.words[0] + uint(first * SUM_BYTES))
                for e in range(count):
                    store(total, first + e, total[first + e] + T.reinterpret("float32", read[e]))


def _add_up(w: Conv, parts: int, arguments: dict[str, Buffer], partial: Buffer) -> None:
    """Emit the kernel that adds up the sums in scratch memory and applies the epilogue.

    Args:
        w: the workload.
        parts: how many sums each output has.
        arguments: by name.
        partial: the sums, (parts, pixels, channels).
    """
    p = Product.of(w)
    vector = math.gcd(w.O, CHUNK // p.itemsize)
    pixels, across = p.m, w.O // vector
    value, words = allocate("total", 8, "float32"), allocate("read", 8, "uint32")
    with (
        parallel(-(-pixels * across // ADDING_THREADS), "blockIdx.x") as block,
        parallel(ADDING_THREADS, "threadIdx.x") as thread,
    ):
        index = block * ADDING_THREADS + thread
        m, o = index // across, index % across * vector
        with when(True if pixels * across % ADDING_THREADS == 0 else index < pixels * across):
            zeros(value, vector)
            with unrolled(parts, "g") as g:
                load_global(words, partial, (g * pixels + m) * w.O + o, vector)
                for e, part in enumerate(unpack(words, vector, "float32")):
                    store(value, e, value[e] + part)
            finish(w, arguments, epilogue.steps(w.epilogue), m, o, vector, value, words)
            store_global(arguments["Y"], m * w.O + o, words, vector)


def _strides(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next along each axis of an array in C order."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _leaves_image(w: Conv, axis: int) -> bool:
    """Whether the filter hangs over the image's border anywhere along an axis."""
    last = (w.out[axis] - 1) * w.stride[axis] + w.window[axis] - 1 - w.before[axis]
    return w.before[axis] > 0 or last >= w.space[axis]
