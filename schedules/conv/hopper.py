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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.gpu import WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.layout import CHANNELS_LAST

from ..program import (
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
    tensor_map,
    uint,
    unpack,
    unrolled,
    when,
    write,
    zeros,
)
from .hopper_tiles import (
    BARRIER_BYTES,
    LINE,
    SLAB_BYTES,
    SUM_BYTES,
    WARPGROUP,
    WGMMA_BYTES,
    WGMMA_M,
    HopperTiles,
    residual,
)
from .outputs import finish, without_relu
from .warp_tiles import CHUNK, Product

DTYPES = ("float16", "bfloat16", "tf32")
OPERAND = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32"}
SWIZZLE = {128: 1, 64: 2, 32: 3}  # of a matrix descriptor, by bytes
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
COPY = "cp.async.bulk.tensor.{rank}d.shared::cluster.global{mode}.mbarrier::complete_tx::bytes{multicast}"
STORE = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"


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


class _Pipeline:
    """The kernel: its numbers, its arrays, and its parts.

    Args:
        w: the workload.
        tiles: how it is cut up.
        arguments: by name.
    """

    def __init__(self, w: Conv, tiles: HopperTiles, arguments: dict[str, Buffer]) -> None:
        self.w, self.t, self.p = w, tiles, Product.of(w)
        self.arguments = arguments
        p, t = self.p, tiles
        self.block_m, self.block_k = int(t.block_m), int(t.block_k(p.itemsize))
        self.part_m, self.part_n = self.block_m // t.sharers_n, t.block_n // t.sharers_m  # that a block fetches
        self.panel_bytes = int(t.panel_bytes)
        self.panels, self.panel_k = t.row_bytes // self.panel_bytes, self.panel_bytes // p.itemsize
        self.together = t.taps > 1  # all taps of a line read one copy
        self.segments = self.block_m // WGMMA_M if self.together else 1  # copies of the pixels of a step
        self.copied = WGMMA_M + t.reach if self.together else self.part_m  # pixels of each
        self.segment_bytes = int(t.pixel_rows) * self.panel_bytes
        self.input_bytes = int(t.pixel_rows) * (self.block_m // WGMMA_M) * t.row_bytes
        self.stage_bytes = int(t.stage_bytes())
        self.coming_bytes = (self.segments * self.copied * t.sharers_n + t.block_n * t.taps) * t.row_bytes
        self.kernel = (*w.kernel[:-1], 1) if self.together else w.kernel  # what steps walk over
        self.taps = math.prod(self.kernel)
        self.steps, self.all_steps = int(t.steps(p)), int(t.all_steps(p))
        self.of_tap = int(t.steps_of_tap(p))
        self.tiles_m, self.tiles_n, self.tiles = int(t.tiles_m(p)), int(t.tiles_n(p)), int(t.tiles(p))
        self.meets = bool(t.meets(w))
        self.grid = int(t.blocks(w)) // t.split_k
        self.rounds = 1 if self.meets else -(-self.tiles // self.grid)
        self.operations = epilogue.steps(w.epilogue)
        self.residual = None if self.meets else residual(w)
        self.of_channels = [o.name for o in self.operations if o.takes == "channel" and not self.meets]
        self.slab_bytes, self.buffers = int(t.slab_bytes(p.itemsize)), int(t.buffers(w))
        self.slab = self.slab_bytes // p.itemsize  # channels
        self.buffer_bytes = -(-WGMMA_M * self.slab_bytes // LINE) * LINE
        self.bias_at = int(t.ring_bytes() + t.out_bytes(w))
        self.barriers_at = int(t.front_bytes(w))
        self.multipliers = t.warpgroups * WARPGROUP  # threads
        self.vector = math.gcd(p.n, CHUNK // p.itemsize)

    # --- the whole ---

    def write(self) -> None:
        """Emit the kernel."""
        t = self.t
        self._map()
        with ExitStack() as axes:
            bind = axes.enter_context
            self.part = bind(parallel(int(t.split_k), "blockIdx.z"))
            if t.split_k > 1:
                bind(parallel(int(t.split_k), "clusterCtaIdx.z"))
            self.block = bind(parallel(self.grid, "blockIdx.x"))
            self.rank = bind(parallel(int(t.sharers), "clusterCtaIdx.x")) if t.sharers > 1 else 0
            self.thread = bind(parallel(self.multipliers + WARP * (2 if self.residual else 1), "threadIdx.x"))
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

    def _map(self) -> None:
        """Tell TMA of the arrays."""
        w, p = self.w, self.p
        dtype, itemsize = w.storage, p.itemsize
        channels, extents = w.C, tuple(reversed(w.space))
        self.plain = math.prod((*w.kernel, *w.stride)) == 1 and w.out == w.space and self.part_m <= maps.MAX_BOX
        if self.together:  # pieces of lines of the image, with zeros beyond
            sizes = (channels, *extents, w.N)
            elements = tuple(math.prod(sizes[:axis]) for axis in range(1, len(sizes)))
            piece = (self.panel_k, self.copied, *(1,) * w.rank)
            image = maps.tiled(dtype, itemsize, sizes, elements, piece, self.panel_bytes)
        elif self.plain:  # the pixels of all images are the rows of one matrix
            pixels = (self.panel_k, self.part_m)
            image = maps.tiled(dtype, itemsize, (channels, p.m), (channels,), pixels, self.panel_bytes)
        else:
            image = maps.im2col(
                dtype,
                itemsize,
                (channels, *extents, w.N),
                (self.panel_k, self.part_m),
                tuple(reversed(w.stride)),
                tuple(-before for before in reversed(w.before)),
                tuple(reversed(w.out)),
                self.panel_bytes,
            )
        self.input_map = tensor_map("X_map", self.arguments["X"], image)
        weights = (p.depth, math.prod(w.kernel), w.O)
        box = (self.panel_k, 1, self.part_n)
        told = maps.tiled(dtype, itemsize, weights, (p.depth, p.k), box, self.panel_bytes)
        self.weight_map = tensor_map("K_map", self.arguments["K"], told)
        self.maps = [self.input_map, self.weight_map]
        if self.meets:
            return
        told = maps.tiled(
            dtype, itemsize, (p.n, p.m, p.groups), (w.O, p.n), (self.slab, WGMMA_M, 1), int(self.slab_bytes)
        )
        self.output_map = tensor_map("Y_map", self.arguments["Y"], told)
        if self.residual:
            self.residual_map = tensor_map(f"{self.residual}_map", self.arguments[self.residual], told)
            self.maps.append(self.residual_map)
        self.maps.append(self.output_map)

    def _allocate(self) -> None:
        """Name the registers and the shared memory."""
        t, w = self.t, self.w
        self.lane, self.group = self.thread % WARP, self.thread // WARPGROUP
        self.sums = allocate("sums", int(t.accumulators), "float32")
        self.memory = allocate("memory", 1, "uint32")  # the address of shared memory, from a whole line on
        self.slot = allocate("slot", 2, "int32")  # of the ring: which stage is next, and its turn's parity
        self.out = allocate("out", 2, "int32")  # of the slabs: which buffer is next, and its turn's parity
        self.first = allocate("first", self.segments * (w.rank + 1), "int32")  # where a copy's first tap is, its image
        self.tap = allocate("tap", w.rank, "int32")  # of the filter
        self.depth = allocate("depth", 1, "int32")  # the first of a step's channels
        self.operand = allocate("operand", 2, "uint32")  # lower halves of matrix descriptors
        self.remote = allocate("remote", 1, "uint32")  # this address in another block of the cluster
        self.words = allocate("words", 8, "uint32")
        self.value = allocate("value", max(8, 4 + 2 * len(self.of_channels)), "float32")
        self.read = allocate("read", 16, "uint32")
        held = -(-t.block_n // WARPGROUP)
        self.held = {name: allocate(f"{name}_held", held, "float32") for name in self.of_channels}
        self.shared = allocate("shared", int(t.shared_bytes(w)) // 4, "uint32", "shared.dyn")

    def _begin(self) -> None:
        """Get the barriers ready, and wait for what the launch before this one leaves."""
        t = self.t
        address = T.cuda.cvta_generic_to_shared(self.shared.access_ptr("rw"))
        store(self.memory, 0, (address + uint(LINE - 1)) & T.uint32(0xFFFFFFFF - (LINE - 1)))
        store(self.slot, 0, 0)
        store(self.slot, 1, 0)
        store(self.out, 0, 0)
        store(self.out, 1, 0)
        writers = t.sharers_m + t.sharers_n - 1  # blocks whose copies go into a stage of this one
        with when(self.thread == self.multipliers):  # who copies: the tensor maps come while barriers are made ready
            for told in self.maps:
                ptx("prefetch.tensormap", told)
        with when(self.thread == 0):
            for stage in range(t.stages):
                ptx("mbarrier.init.shared.b64", self._full(stage), T.uint32(1))
                ptx("mbarrier.init.shared.b64", self._empty(stage), T.uint32(t.warpgroups * writers))
            if self.residual:
                for buffer in range(t.warpgroups * self.buffers):
                    ptx("mbarrier.init.shared.b64", self._come(buffer), T.uint32(1))
                    ptx("mbarrier.init.shared.b64", self._gone(buffer), T.uint32(1))
            call(T.ptx.fence.mbarrier_init.release.cluster())
        if t.sharers > 1:
            call(T.cuda.cluster_sync())
        else:
            call(T.cuda.cta_sync())
        ptx("griddepcontrol.wait")
        ptx("griddepcontrol.launch_dependents")

    def _each_tile(self, do: Callable[[], None]) -> None:
        """Do something for each tile of this block, in their order: channels, pixels, groups."""
        if self.rounds == 1:
            self._take(self.block)
            do()
            return
        with serial(self.rounds, "round") as turn:
            tile = self.block + turn * self.grid
            whole = self.grid * self.rounds == self.tiles
            with when(True if whole else tile < self.tiles):
                self._take(tile)
                do()

    def _take(self, tile: Expr) -> None:
        """Turn to a tile: the parts below are about it. Those of a cluster are neighbours."""
        t = self.t
        across, down = self.tiles_n // t.sharers_n, self.tiles_m // t.sharers_m
        which = tile // t.sharers
        self.rank_m, self.rank_n = self.rank // t.sharers_n, self.rank % t.sharers_n
        self.at_m = (which // across % down * t.sharers_m + self.rank_m) * self.block_m
        self.at_n = (which % across * t.sharers_n + self.rank_n) * t.block_n
        self.of_group = which // (across * down)

    # --- barriers ---

    def _barrier(self, number: Expr) -> Expr:
        """Where an mbarrier lies."""
        return self.memory[0] + uint(self.barriers_at) + uint(number * BARRIER_BYTES)

    def _full(self, stage: Expr) -> Expr:
        """The barrier that a stage's operands have come."""
        return self._barrier(stage)

    def _empty(self, stage: Expr) -> Expr:
        """The barrier that a stage's operands have been multiplied, in all blocks that have them."""
        return self._barrier(self.t.stages + stage)

    def _come(self, buffer: Expr) -> Expr:
        """The barrier that a slab of the residual has come."""
        return self._barrier(2 * self.t.stages + buffer)

    def _gone(self, buffer: Expr) -> Expr:
        """The barrier that a slab has been stored."""
        return self._barrier(2 * self.t.stages + self.t.warpgroups * self.buffers + buffer)

    def _advance(self, place: Buffer, extent: int) -> None:
        """Go on to the next place of a ring; the parity changes with each turn."""
        store(place, 0, place[0] + 1)
        with when(place[0] == extent):
            store(place, 0, 0)
            store(place, 1, place[1] ^ 1)

    def _warpgroup_sync(self) -> None:
        """Wait for the threads of this warpgroup; barrier 0 is that of the whole block."""
        ptx("bar.sync", uint(1 + self.group), T.uint32(WARPGROUP))

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

    def _copy(
        self,
        rank: int,
        mode: str,
        to: Expr,
        told: Expr,
        at: Sequence[Expr],
        full: Expr,
        offsets: Sequence[Expr],
        ranks: Expr,
    ) -> None:
        """One copy by TMA, to this block or to several of its cluster."""
        multicast = ranks is not None
        name = COPY.format(rank=rank, mode=mode, multicast=".multicast::cluster" if multicast else "")
        ptx(name, to, told, *at, full, *offsets, *([ranks] if multicast else []))

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

    # --- store ---

    def _hold_channels(self) -> None:
        """Ask for what the epilogue reads for each channel; it comes while the tile is multiplied."""
        t, p = self.t, self.p
        for name in self.of_channels:
            for i in range(-(-t.block_n // WARPGROUP)):
                n = self.thread % WARPGROUP + i * WARPGROUP
                store(self.held[name], i, T.float32(0))
                with when(both(True if t.block_n % WARPGROUP == 0 else n < t.block_n, self._is_channel(self.at_n + n))):
                    load_global(self.words, self.arguments[name], self.of_group * p.n + self.at_n + n, 1)
                    store(self.held[name], i, T.reinterpret("float32", self.words[0]))

    def _is_channel(self, n: Expr) -> Expr:
        """Whether a channel is one of the group's, and not of the last tile's overhang."""
        return True if self.p.n % self.t.block_n == 0 and self.t.sharers_n == 1 else n < self.p.n

    def _share_channels(self) -> None:
        """Put what is read for each channel where all threads of the warpgroup find it."""
        t = self.t
        if not self.of_channels:
            return
        for name in self.of_channels:
            for i in range(-(-t.block_n // WARPGROUP)):
                n = self.thread % WARPGROUP + i * WARPGROUP
                with when(True if t.block_n % WARPGROUP == 0 else n < t.block_n):
                    ptx("st.shared.b32", self._of_channel(name, n), self.held[name][i])
        self._warpgroup_sync()

    def _of_channel(self, name: str, n: Expr) -> Expr:
        """Where in shared memory the epilogue's number lies for a channel of the tile."""
        place = self.group * len(self.of_channels) + self.of_channels.index(name)
        return self.memory[0] + uint(self.bias_at) + uint((place * self.t.block_n + n) * SUM_BYTES)

    def _store(self) -> None:
        """Finish a tile and store it, slab by slab: while one is on its way, the next is put together."""
        t = self.t
        leader = self.thread % WARPGROUP == 0
        slabs = t.block_n // self.slab
        for i in range(t.rows):
            for j in range(slabs):
                buffer = self._buffer(self.out[0])
                if self.residual:
                    call(T.cuda.mbarrier_wait(self._come(self.group * self.buffers + self.out[0]), self.out[1]))
                else:
                    with when(leader):
                        ptx("cp.async.bulk.wait_group.read", self.buffers - 1)
                    self._warpgroup_sync()
                self._finish_slab(i, j, buffer)
                call(T.ptx.fence.proxy.async_.shared__cta())
                self._warpgroup_sync()
                with when(leader):
                    m = self.at_m + self.group * (t.rows * WGMMA_M) + i * WGMMA_M
                    ptx(STORE, self.output_map, self.at_n + j * self.slab, m, self.of_group, buffer)
                    call(T.ptx.cp.async_.bulk.commit_group())
                    if self.residual:
                        ptx("cp.async.bulk.wait_group.read", 0)
                        number = self.group * self.buffers + self.out[0]
                        ptx("mbarrier.arrive.shared.b64", self._gone(number), T.uint32(1))
                self._advance(self.out, self.buffers)

    def _buffer(self, number: Expr) -> Expr:
        """Where a buffer of this warpgroup lies."""
        place = self.group * self.buffers + number
        return self.memory[0] + uint(int(self.t.ring_bytes())) + uint(place * self.buffer_bytes)

    def _swizzled(self, row: Expr, chunk: Expr) -> Expr:
        """Where a chunk of a slab lies, against the buffer, as TMA has it."""
        line = SLAB_BYTES // self.slab_bytes  # rows that lie side by side in 128 bytes
        return uint(row * self.slab_bytes) + uint((chunk ^ (row // line % (self.slab_bytes // CHUNK))) * CHUNK)

    def _finish_slab(self, i: int, j: int, buffer: Expr) -> None:
        """Apply the epilogue to a slab of the sums, and put it into a buffer."""
        t = self.t
        warp_row = self.thread % WARPGROUP // WARP * 16
        first = i * (int(t.accumulators) // t.rows) + j * self.slab // 8 * 4
        if self.p.itemsize == 2:
            places = [  # each of 16 pixels × 16 channels of a warp
                buffer + self._swizzled(warp_row + self.lane % 16, q * 2 + self.lane // 16)
                for q in range(self.slab // 16)
            ]
            if self.residual:
                for q, at in enumerate(places):
                    ptx(LDMATRIX, *(self.read[q * 4 + e] for e in range(4)), at)
                ptx("bar.warp.sync", T.uint32(0xFFFFFFFF))
            for q, at in enumerate(places):
                for c in range(2):
                    n = j * self.slab + q * 16 + c * 8
                    given = self._read_channels(n)
                    for h in range(2):
                        sums = [self.sums[first + (q * 2 + c) * 4 + h * 2 + e] for e in range(2)]
                        added: list[Expr] = self._halves(self.read[q * 4 + c * 2 + h]) if self.residual else [None] * 2
                        self._finish_pair(sums, given, added, c * 2 + h)
                ptx(STMATRIX, at, *(self.words[e] for e in range(4)))
            return
        for q in range(self.slab // 8):  # 8 pixels × 8 channels of a warp, twice
            given = self._read_channels(j * self.slab + q * 8)
            for h in range(2):
                row, chunk = warp_row + self.lane // 4 + h * 8, q * 2 + self.lane % 4 // 2
                at = buffer + self._swizzled(row, chunk) + uint(self.lane % 2 * 8)
                added = [None] * 2
                if self.residual:
                    load_shared(self.read, at, 8)
                    added = [T.reinterpret("float32", self.read[e]) for e in range(2)]
                sums = [self.sums[first + q * 4 + h * 2 + e] for e in range(2)]
                self._finish_pair(sums, given, added, 0)
                ptx("st.shared.v2.b32", at, self.words[0], self.words[1])

    def _halves(self, word: Expr) -> list[Expr]:
        """Two neighbouring elements of 16 bits."""
        store(self.words, 7, word)
        return unpack([self.words[7]], 2, self.w.storage)

    def _read_channels(self, n: int) -> dict[str, list[Expr]]:
        """What the epilogue reads for the two channels of this thread, of 8 from one on."""
        given: dict[str, list[Expr]] = {}
        for place, name in enumerate(self.of_channels):
            at = self._of_channel(name, n + self.lane % 4 * 2)
            ptx("ld.shared.v2.b32", self.value[4 + place * 2], self.value[5 + place * 2], at)
            given[name] = [self.value[4 + place * 2 + e] for e in range(2)]
        return given

    def _finish_pair(self, sums: list[Expr], given: dict[str, list[Expr]], added: list[Expr], word: int) -> None:
        """Apply the epilogue to two neighbouring sums, and round them into registers."""
        operations, relu = without_relu(self.operations, self.w.storage)
        for e in range(2):
            read = {name: pair[e] for name, pair in given.items()}
            if self.residual:
                read[self.residual] = added[e]
            names = [operation.name for operation in operations]
            store(self.value, e, epilogue.compute(names, sums[e], read.__getitem__))
        pack(self.words, word, [self.value[e] for e in range(2)], self.w.storage, relu)

    def _fetch_residual(self) -> None:
        """Have a tile's residual copied, each slab as soon as its buffer has been stored."""
        t = self.t
        slabs = t.block_n // self.slab
        with unrolled(t.rows, "i") as i, unrolled(slabs, "j") as j:
            for group in range(t.warpgroups):
                number = group * self.buffers + self.out[0]
                call(T.cuda.mbarrier_wait(self._gone(number), self.out[1] ^ 1))
                full = self._come(number)
                ptx("mbarrier.arrive.expect_tx.shared.b64", full, T.uint32(WGMMA_M * self.slab_bytes))
                to = self.memory[0] + uint(int(t.ring_bytes())) + uint(number * self.buffer_bytes)
                m = self.at_m + (group * t.rows + i) * WGMMA_M
                at = (self.at_n + j * self.slab, m, self.of_group)
                self._copy(3, "", to, self.residual_map, at, full, (), None)
            self._advance(self.out, self.buffers)

    # --- meet ---

    def _meet(self) -> None:
        """Have sums meet in shared memory, of all blocks of the cluster, and store each block's share of the pixels."""
        t = self.t
        is_multiplier = self.thread < self.multipliers
        call(T.cuda.cta_sync())  # all stages have been multiplied
        with when(is_multiplier):
            self._lay_down()
        if t.split_k > 1:
            call(T.cuda.cluster_sync())
        else:
            call(T.cuda.cta_sync())
        with when(is_multiplier):
            self._add_up()
        if t.split_k > 1:  # a block's shared memory is there until all have read it
            call(T.cuda.cluster_sync())

    def _lay_down(self) -> None:
        """Put this thread's sums into shared memory."""
        t = self.t
        of_rows, pitch = int(t.accumulators) // t.rows, int(t.pitch())
        row = self.group * (t.rows * WGMMA_M) + self.thread % WARPGROUP // WARP * 16 + self.lane // 4
        at = self.memory[0] + uint(row * pitch) + uint(self.lane % 4 * (2 * SUM_BYTES))
        for i in range(t.rows):
            for j in range(t.block_n // 8):
                for h in range(2):
                    pair = [self.sums[i * of_rows + j * 4 + h * 2 + e] for e in range(2)]
                    to = at + uint((i * WGMMA_M + h * 8) * pitch + j * 8 * SUM_BYTES)
                    ptx("st.shared.v2.b32", to, *pair)

    def _add_up(self) -> None:
        """Add up the sums of this block's share of the pixels, finish them, and store them in vectors of channels."""
        t, p, w = self.t, self.p, self.w
        across = t.block_n // self.vector
        vectors = self.block_m * across
        share = -(-vectors // t.split_k)
        with serial(-(-share // self.multipliers), "i") as i:
            number = i * self.multipliers + self.thread
            place = self.part * share + number
            row, column = place // across, place % across * self.vector
            m, n = self.at_m + row, self.at_n + column
            inside = both(
                True if share % self.multipliers == 0 else number < share,
                True if vectors % t.split_k == 0 else place < vectors,
                True if p.m % self.block_m == 0 else m < p.m,
                True if p.n % t.block_n == 0 else n < p.n,
            )
            with when(inside):
                self._sum_up(uint(row * int(t.pitch())) + uint(column * SUM_BYTES))
                o = self.of_group * p.n + n
                finish(w, self.arguments, self.operations, m, o, self.vector, self.value, self.words)
                store_global(self.arguments["Y"], m * w.O + o, self.words, self.vector)

    def _sum_up(self, at: Expr) -> None:
        """Load neighbouring sums of the tile, added up over the blocks of the cluster."""
        parts = int(self.t.split_k)
        if parts == 1:
            load_shared(self.value, self.memory[0] + at, self.vector * SUM_BYTES)
            return
        zeros(self.value, self.vector)
        for part in range(parts):
            ptx("mapa.shared::cluster.u32", self.remote[0], self.memory[0] + at, uint(part))
            for first in range(0, self.vector, 4):
                count = min(4, self.vector - first)
                suffix = f".v{count}" if count > 1 else ""
                read = [self.words[e] for e in range(count)]
                ptx(f"ld.shared::cluster{suffix}.b32", *read, self.remote[0] + uint(first * SUM_BYTES))
                for e in range(count):
                    store(self.value, first + e, self.value[first + e] + T.reinterpret("float32", read[e]))
