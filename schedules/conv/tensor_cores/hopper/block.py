"""What the parts of `hopper` have in common: numbers of a block, its arrays, its barriers, the tile that it is at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.gpu import WARP
from tvmconv.workloads import Conv, epilogue

from ....program import Buffer, Expr, allocate, call, parallel, ptx, serial, store, tensor_map, uint, when
from ..product import CHUNK, SUM_BYTES, Product
from .tiles import BARRIER_BYTES, LINE, HopperTiles
from .workload import WARPGROUP, WGMMA_M, residual

COPY = "cp.async.bulk.tensor.{rank}d.shared::cluster.global{mode}.mbarrier::complete_tx::bytes{multicast}"


class Block:
    """A block of the grid.

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
        self.rounds = 1 if self.meets else ceil_div(self.tiles, self.grid)
        self.operations = epilogue.steps(w.epilogue)
        self.residual = None if self.meets else residual(w)
        self.of_channels = [o.name for o in self.operations if o.takes == "channel" and not self.meets]
        self.slab_bytes, self.buffers = int(t.slab_bytes(p.itemsize)), int(t.buffers(w))
        self.slab = self.slab_bytes // p.itemsize  # channels
        self.buffer_bytes = round_up(WGMMA_M * self.slab_bytes, LINE)
        self.bias_at = int(t.ring_bytes() + t.out_bytes(w))
        self.barriers_at = int(t.front_bytes(w))
        self.multipliers = t.warpgroups * WARPGROUP  # threads
        self.vector = math.gcd(p.n, CHUNK // SUM_BYTES)

    def _bind(self, axes: ExitStack) -> None:
        """Open the loops of blocks and threads."""
        t, bind = self.t, axes.enter_context
        self.part = bind(parallel(int(t.split_k), "blockIdx.z"))
        if t.split_k > 1:
            bind(parallel(int(t.split_k), "clusterCtaIdx.z"))
        self.block = bind(parallel(self.grid, "blockIdx.x"))
        self.rank = bind(parallel(int(t.sharers), "clusterCtaIdx.x")) if t.sharers > 1 else 0
        self.thread = bind(parallel(self.multipliers + WARP * (2 if self.residual else 1), "threadIdx.x"))

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
        held = ceil_div(t.block_n, WARPGROUP)
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

    def _own_steps(self) -> Expr:
        """How many steps this block has of a tile."""
        if self.all_steps % self.steps == 0:
            return self.steps
        return T.min(self.steps, self.all_steps - self.part * self.steps)

    def _rank_of(self, m: Any, n: Any) -> Expr:
        """The rank in the cluster of a block."""
        return (self.rank_m if m is True else m) * self.t.sharers_n + (self.rank_n if n is True else n)

    def _stage(self) -> Expr:
        """Where the next stage lies."""
        return self.memory[0] + uint(self.slot[0] * self.stage_bytes)

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
