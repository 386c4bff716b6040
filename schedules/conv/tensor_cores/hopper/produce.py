"""How `hopper` brings its operands: one thread has TMA copy them, each as soon as a stage is empty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....program import Expr, call, ptx, serial, store, uint, when
from .block import Block
from .workload import WGMMA_M


class Producer(Block):
    """The warp that has operands copied, stage by stage."""

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
