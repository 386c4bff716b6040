"""What the parts of `mma_sync` have in common: numbers of a block, its arrays, the tile that it is at."""

from __future__ import annotations

import math
from contextlib import ExitStack

from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import WARP
from tvmconv.workloads import Conv

from ....program import Buffer, Expr, allocate, both, parallel, uint
from ..product import CHUNK, SUM_BYTES, Product
from .parts import is_unfinished, parts, staged_itemsize
from .tiles import MMA_BYTES, MMA_M, MMA_N, WarpTiles

SWIZZLED = 8  # chunks among which a row's are permuted: 128 bytes, what all banks serve at a time


class Block:
    """A block of the grid.

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
        self.unfinished = bool(is_unfinished(w, t))
        self.staged_itemsize = int(staged_itemsize(w, t))
        self.pitch = int(t.pitch(self.staged_itemsize))
        self.early, self.late = parts(w, t.residual == "begin", not t.in_cluster) if partial is None else ([], [])
        self.of_channels = [operation for operation in self.early if operation.takes == "channel"]
        self.channels_at = int(t.tile_bytes(p, self.staged_itemsize))  # in shared memory
        self.vector = math.gcd(p.n, self.chunk_elements)  # output elements that are neighbours in memory

    def _allocate(self) -> None:
        """Name the registers and the shared memory."""
        t, p = self.t, self.p
        copied = [ceil_div(block, self.rows) for block in (t.block_m, t.block_n)]
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
        self.shared = allocate("shared", nbytes // 4, "uint32", "shared.dyn")

    def _bind(self, axes: ExitStack) -> None:
        """Open the loops of blocks and threads."""
        t, bind = self.t, axes.enter_context
        self.part = bind(parallel(int(t.split_k), "blockIdx.z"))
        if t.in_cluster:
            bind(parallel(int(t.split_k), "clusterCtaIdx.z"))
        self.block = bind(parallel(self.grid, "blockIdx.x"))
        self.thread = bind(parallel(int(t.threads), "threadIdx.x"))

    def _take(self, tile: Expr) -> None:
        """Turn to a tile: the parts are about it."""
        self.at_m, self.at_n, self.group = self._place(tile)

    def _place(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """The first pixel and the first channel of a tile, and its group."""
        across, down = ceil_div(self.p.n, self.t.block_n), ceil_div(self.p.m, self.t.block_m)
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

    def _swizzle(self, row: Expr) -> Expr:
        """What the number of a chunk in a row is XORed with."""
        rows_of_line = max(SWIZZLED // self.chunks, 1)  # that lie side by side in the banks
        return row // rows_of_line % min(self.chunks, SWIZZLED)

    def _of_channel(self, place: int, channel: Expr) -> Expr:
        """The address of what the epilogue has for a channel of the tile, for one of its operations."""
        return self.memory[0] + uint(self.channels_at + place * self.t.block_n * SUM_BYTES) + uint(channel * SUM_BYTES)

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
