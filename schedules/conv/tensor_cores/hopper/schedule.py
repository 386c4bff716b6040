"""Convolution on Hopper's tensor cores: one warp has TMA copy operands, warpgroups multiply them where they lie.

Nobody computes an address of an operand. The copy engine (TMA) is told of the input as an image of which it takes the
pixels under one tap of the filter (im2col): padding, stride, dilation and the ends of lines and images are its own.
Of both operands it brings rows of up to 128 bytes of channels, swizzled as `wgmma` reads them from shared memory. Three
parts of a block are at work at a time, and tell each other by barriers in shared memory what is full and what is empty:

```
 producer, one thread            ring of stages                 warpgroups of 128 threads
 for each step (tap, channels):  +---------+---------+---       for each step:
   wait until a stage is empty   | pixels  | pixels  | ...        wait until the stage is full
   TMA: pixels  × channels  ---> | ------- | ------- |      --->  wgmma: sums += pixels × weights
   TMA: weights × channels  ---> | weights | weights | ...        tell that the step before is empty
                                 +---------+---------+---       for each slab of channels:
                                                                  epilogue; sums to shared memory
                                                                  TMA: slab to the output
```

- As many blocks as the GPU runs at a time take tiles in turn: while a tile is stored, the next one's operands come.
- Blocks of a cluster with neighbouring tiles share operands: each fetches a part, and TMA hands it to all of them.
- Where tiles are few, the blocks of a cluster share the reduction of one tile instead, and add up their sums through
  each other's shared memory.
- A residual comes by TMA as well, into the slabs that become the output; biases lie in shared memory by then.
- `griddepcontrol` lets the next launch begin while this one ends.

Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", "Tensors: im2col mode",
"mbarrier"; NVIDIA CUTLASS, `sm90_mma_tma_gmma_ss_warpspecialized` (the roles).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.gpu import WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_LAST

from ....program import (
    Expr,
    both,
    call,
    ptx,
    serial,
    store,
    uint,
    when,
    write,
)
from ..product import CHUNK, Product
from .output import Output
from .tiles import (
    WARPGROUP,
    WGMMA_BYTES,
    WGMMA_M,
    HopperTiles,
)

DTYPES = ("float16", "bfloat16", "tf32")
OPERAND = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32"}
SWIZZLE = {128: 1, 64: 2, 32: 3}  # of a matrix descriptor, by bytes


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    return HopperTiles.of_columns(c, w).usage(w)


def can_be_copied(w: Conv) -> bool:
    """Whether TMA can copy the operands: rows of whole chunks, filters that its corners and offsets have room for."""
    p = Product.of(w)
    rank = w.rank + 2
    corner, offset = maps.CORNERS[rank], maps.OFFSETS[rank]
    lasts = [(o - 1) * s - b - (n - 1) for o, s, b, n in zip(w.out, w.stride, w.before, w.space, strict=True)]
    return (
        w.layout == CHANNELS_LAST
        and p.depth * p.itemsize % CHUNK == 0
        and (p.groups == 1 or p.depth * p.itemsize % WGMMA_BYTES == 0)
        and max(w.stride) <= maps.MAX_STEP
        and max(d * (r - 1) for d, r in zip(w.dilation, w.kernel, strict=True)) < offset
        and max(w.before) <= corner
        and all(-corner <= last < corner for last in lasts)
    )


def is_promising(w: Conv) -> bool:
    """Whether the channels of a group fill wgmmas to some extent."""
    p = Product.of(w)
    return can_be_copied(w) and p.depth * p.itemsize >= WGMMA_BYTES and p.n >= 16


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=usage,
    condition=can_be_copied,
    promising=is_promising,
    supersedes=("direct", "implicit_gemm", "tensor_core"),
    kinds=("cuda",),
    only=90,
)
def hopper(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """A producer, a ring of stages, warpgroups that multiply, and tiles stored behind them."""
    tiles = HopperTiles.ask(k, w)
    return write(w, lambda arguments: _Pipeline(w, tiles, arguments).write())


class _Pipeline(Output):
    """The kernel: who does what, and the parts of those who copy and multiply."""

    def write(self) -> None:
        """Emit the kernel."""
        t = self.t
        self._map()
        with ExitStack() as axes:
            self._bind(axes)
            self._allocate()
            self._begin()
            warp = self.thread // WARP
            with when(warp < self.multipliers // WARP):
                self._each_tile(self._multiply_and_store)
                if not self.meets:
                    with when(self.thread % WARPGROUP == 0):  # what is stored has been read; it arrives by itself
                        ptx("cp.async.bulk.wait_group.read", 0)
            with when(both(warp == self.multipliers // WARP, self.lane == 0)):
                self._each_tile(self._produce)
            if self.residual:
                with when(both(warp == self.multipliers // WARP + 1, self.lane == 0)):
                    self._each_tile(self._fetch_residual)
            if self.meets:
                self._meet()
            elif t.sharers > 1:  # a block's shared memory is there until nobody hands anything to it
                call(T.cuda.cluster_sync())

    # --- produce ---

    def _produce(self) -> None:
        """Have the operands of a tile's steps copied, each as soon as a stage is empty."""
        t = self.t
        self._find_pixels()
        self._find_step()
        with serial(self._own_steps(), "step"):
            call(T.cuda.mbarrier_wait(self._empty(self.slot[0]), self.slot[1] ^ 1))
            ptx("mbarrier.arrive.expect_tx.shared.b64", self._full(self.slot[0]), T.uint32(self.coming_bytes))
            self._copy_input()
            self._copy_weights()
            self._next_step()
            self._advance(self.slot, t.stages)

    def _find_pixels(self) -> None:
        """Find where the first of the pixels lies of each copy that this block fetches of a tile."""
        w = self.w
        for segment in range(self.segments):
            m = self.at_m + self.rank_n * self.part_m + segment * WGMMA_M
            for axis in range(w.rank):
                out = m // math.prod(w.out[axis + 1 :]) % w.out[axis]
                store(self.first, segment * (w.rank + 1) + axis, out * w.stride[axis] - w.before[axis])
            store(self.first, segment * (w.rank + 1) + w.rank, m // math.prod(w.out))

    def _own_steps(self) -> Expr:
        """How many steps this block has of a tile."""
        if self.all_steps % self.steps == 0:
            return self.steps
        return T.min(self.steps, self.all_steps - self.part * self.steps)

    def _find_step(self) -> None:
        """Find the tap and the channels of this block's first step."""
        w, step = self.w, self.part * self.steps
        tap = step // self.of_tap
        for axis in range(w.rank):
            store(self.tap, axis, tap // math.prod(self.kernel[axis + 1 :]) % self.kernel[axis])
        store(self.depth, 0, step % self.of_tap * self.block_k)

    def _next_step(self) -> None:
        """Go on to the next channels, and behind the last to the next tap."""
        store(self.depth, 0, self.depth[0] + self.block_k)
        if self.taps == 1:
            return
        with when(self.depth[0] == self.of_tap * self.block_k):
            store(self.depth, 0, 0)
            self._next_tap(self.w.rank - 1)

    def _next_tap(self, axis: int) -> None:
        store(self.tap, axis, self.tap[axis] + 1)
        if axis > 0:
            with when(self.tap[axis] == self.kernel[axis]):
                store(self.tap, axis, 0)
                self._next_tap(axis - 1)

    def _copy_input(self) -> None:
        """Copy this block's part of a step's pixels, to all blocks that have the same."""
        w, t = self.w, self.t
        full, mask = self._full(self.slot[0]), self._ranks([(True, to) for to in range(t.sharers_n)])
        if self.together:
            for segment in range(self.segments):
                at = self._stage() + uint(segment * self.segment_bytes)
                place = [self.first[segment * (w.rank + 1) + axis] for axis in (*reversed(range(w.rank)), w.rank)]
                for axis in range(w.rank - 1):
                    place[w.rank - 1 - axis] = place[w.rank - 1 - axis] + self.tap[axis] * w.dilation[axis]
                channel = self.of_group * self.p.depth + self.depth[0]
                self._copy(w.rank + 2, "", at, self.input_map, (channel, *place), full, (), mask)
            return
        for panel in range(self.panels):
            part = self.rank_n * (self.part_m * self.panel_bytes) + panel * (self.block_m * self.panel_bytes)
            at = self._stage() + uint(part)
            channel = self.of_group * self.p.depth + self.depth[0] + panel * self.panel_k
            if self.plain:
                m = self.at_m + self.rank_n * self.part_m
                self._copy(2, "", at, self.input_map, (channel, m), full, (), mask)
                continue
            places = [self.first[axis] for axis in (*reversed(range(w.rank)), w.rank)]
            offsets = [T.Cast("uint16", self.tap[axis] * w.dilation[axis]) for axis in reversed(range(w.rank))]
            self._copy(w.rank + 2, ".im2col", at, self.input_map, (channel, *places), full, offsets, mask)

    def _copy_weights(self) -> None:
        """Copy this block's part of a step's weights, to all blocks that have the same."""
        t, w = self.t, self.w
        full, mask = self._full(self.slot[0]), self._ranks([(to, True) for to in range(t.sharers_m)])
        tap: Expr = 0
        for axis in range(w.rank):
            tap = tap * w.kernel[axis] + self.tap[axis]
        n = self.of_group * self.p.n + self.at_n + self.rank_m * self.part_n
        for which in range(self.panels * t.taps):
            panel, further = which % self.panels, which // self.panels
            part = self.rank_m * (self.part_n * self.panel_bytes) + which * (t.block_n * self.panel_bytes)
            at = self._stage() + uint(self.input_bytes) + uint(part)
            depth = self.depth[0] + panel * self.panel_k
            self._copy(3, "", at, self.weight_map, (depth, tap + further, n), full, (), mask)

    def _ranks(self, blocks: Sequence[tuple[Any, Any]]) -> Expr:
        """The mask of blocks of the cluster, each by its place along pixels and channels: True for this one's own."""
        if len(blocks) == 1:
            return None
        mask: Expr = T.uint32(0)
        for m, n in blocks:
            mask = mask | T.shift_left(T.uint32(1), uint(self._rank_of(m, n)))
        return T.Cast("uint16", mask)

    def _rank_of(self, m: Any, n: Any) -> Expr:
        """The rank in the cluster of a block."""
        return (self.rank_m if m is True else m) * self.t.sharers_n + (self.rank_n if n is True else n)

    def _stage(self) -> Expr:
        """Where the next stage lies."""
        return self.memory[0] + uint(self.slot[0] * self.stage_bytes)

    # --- multiply ---

    def _multiply_and_store(self) -> None:
        """What a warpgroup does with a tile."""
        self._hold_channels()
        self._multiply()
        if self.meets:
            return
        self._share_channels()
        self._store()

    def _multiply(self) -> None:
        """Multiply a tile's steps, each as soon as it is there; one is in the tensor cores while the next is begun."""
        t = self.t
        with serial(self._own_steps(), "step") as step:
            call(T.cuda.mbarrier_wait(self._full(self.slot[0]), self.slot[1]))
            self._wgmma(step)
            with when(step > 0):
                call(T.ptx.wgmma.wait_group.sync.aligned(1))
                self._release()
            self._advance(self.slot, t.stages)
        call(T.ptx.wgmma.wait_group.sync.aligned(0))
        self._release()

    def _wgmma(self, step: Expr) -> None:
        """Begin all multiplications of a step; the first of a tile forget what the sums were."""
        t, w, itemsize = self.t, self.w, self.p.itemsize
        of_rows = int(t.accumulators) // t.rows
        name = f"wgmma.mma_async.sync.aligned.m64n{t.block_n}k{WGMMA_BYTES // itemsize}.f32"
        name = f"{name}.{OPERAND[w.dtype]}.{OPERAND[w.dtype]}"
        signs = (1, 1) if itemsize == 4 else (1, 1, 0, 0)  # as they are, neither operand negated or transposed
        rows = self.group * (t.rows * self.segment_bytes)
        for which, at in enumerate((self._stage() + uint(rows), self._stage() + uint(self.input_bytes))):
            store(self.operand, which, T.shift_right(at, T.uint32(4)) | T.uint32(1 << 16))
        upper = (8 * self.panel_bytes >> 4) | SWIZZLE[self.panel_bytes] << 30  # 8 rows to the next 8, and the swizzle

        def descriptor(which: int, offset: int) -> Expr:
            low = T.Cast("uint64", self.operand[which] + T.uint32(offset >> 4))
            return low | T.shift_left(T.Cast("uint64", T.uint32(upper)), T.uint64(32))

        call(T.ptx.wgmma.fence.sync.aligned())
        for k in range(t.taps * t.row_bytes // WGMMA_BYTES):
            further, of_tap = divmod(k * WGMMA_BYTES, t.row_bytes)
            panel, within = divmod(of_tap, self.panel_bytes)
            away = further * w.dilation[-1] * self.panel_bytes if self.together else 0
            for i in range(t.rows):
                a = descriptor(0, panel * self.block_m * self.panel_bytes + i * self.segment_bytes + within + away)
                b = descriptor(1, (further * self.panels + panel) * t.block_n * self.panel_bytes + within)
                sums = [self.sums[i * of_rows + e] for e in range(of_rows)]
                ptx(name, *sums, a, b, True if k else step > 0, *signs)
        call(T.ptx.wgmma.commit_group.sync.aligned())

    def _release(self) -> None:
        """Tell all who copy into the stage before the next one that it is empty."""
        t = self.t
        stage = T.Select(self.slot[0] == 0, t.stages - 1, self.slot[0] - 1)
        me = self.thread % WARPGROUP
        if t.sharers == 1:
            with when(me == 0):
                ptx("mbarrier.arrive.shared.b64", self._empty(stage), T.uint32(1))
            return
        writers = [self._rank_of(m, True) for m in range(t.sharers_m)]
        writers += [self._rank_of(True, (self.rank_n + n) % t.sharers_n) for n in range(1, t.sharers_n)]
        for i, rank in enumerate(writers):
            with when(me == i):
                ptx("mapa.shared::cluster.u32", self.remote[0], self._empty(stage), uint(rank))
                call(T.ptx.mbarrier.arrive.shared__cluster.b64(self.remote[0]))
