"""The kernels of `mma_sync`, put together from their parts."""

from __future__ import annotations

import math
from contextlib import ExitStack

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import Conv

from ....program import Buffer, Expr, allocate, call, serial, store, when
from .adding import add_up
from .outputs import Outputs
from .products import Products
from .tiles import WarpTiles


def emit(w: Conv, tiles: WarpTiles, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel, and behind it the one that adds up, where sums meet in scratch memory."""
    partial = None
    if tiles.in_scratch:
        partial = allocate("partial", tiles.split_k * w.N * math.prod(w.out) * w.O, "float32", "global")
    _Multiplication(w, tiles, arguments, partial).write()
    if partial is not None:
        add_up(w, tiles.split_k, arguments, partial)


class _Multiplication(Products, Outputs):
    """The kernel that multiplies: its parts, in the order in which they run."""

    def write(self) -> None:
        """Emit the kernel."""
        t = self.t
        self._allocate()
        with ExitStack() as axes:
            self._bind(axes)
            self._place_thread()
            store(self.memory, 0, T.cuda.cvta_generic_to_shared(self.shared.access_ptr("rw")))
            self._find_rows(self.block)
            for step in range(t.stages - 1):
                if step < self.steps:
                    self._copy_input(step, step)
                    self._copy_filters(step, step)
                call(T.ptx.cp.async_.commit_group())
            store(self.slot, 0, 0)
            store(self.slot, 1, t.stages - 1)
            if t.tiles_per_block == 1:  # what the epilogue reads is asked for before the first operands are waited for
                self._open(self.block)
            self._wait()
            self._fragments(0, 0, 0)
            if t.tiles_per_block == 1:
                self._compute(None)
                return
            with serial(int(t.tiles_per_block), "turn") as turn:
                tile = self.block + turn * self.grid
                with when(self._is_tile(tile)):
                    self._open(tile)
                    self._compute(tile + self.grid, turn + 1 < t.tiles_per_block)

    def _open(self, tile: Expr) -> None:
        """Turn to a tile, and ask for what its sums begin and end with."""
        self._take(tile)
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
