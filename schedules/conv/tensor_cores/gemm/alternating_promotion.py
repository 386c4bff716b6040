"""Promotion of sums of 8-bit floats by warpgroups at different times.

Warpgroups that share a tile wait for the same operands, so that they multiply at the same time. If they also promoted
at the same time, tensor cores would wait for them. Here, each warpgroup starts with a shorter interval than the one
before, so that one promotes while the wgmmas of another run. Intervals have as many instructions as their bound allows,
and may end within a K tile. Each warpgroup has code of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from ....tir_builder import Buffer, Expr, if_, serial_loop
from .accumulators import Accumulators
from .atoms import ThreadPosition, wgmma_wait_group
from .pipelines import PipelineState, TmaPipeline
from .smem_layout import MatrixDescriptor


class SteppedMainloop(Protocol):
    """A mainloop that issues some of the wgmmas of a K tile."""

    @property
    def promotion_steps(self) -> int:
        """Wgmmas along the reduction before each promotion."""

    @property
    def k_steps(self) -> range:
        """First products of the wgmmas of a K tile along the reduction."""

    def set_stage(self, descriptors: tuple[MatrixDescriptor, MatrixDescriptor], stage: Expr, warpgroup: Expr) -> None:
        """Have the descriptors point to this warpgroup's rows of A, and to B, in a stage."""

    def issue(
        self,
        accumulators: Buffer,
        descriptors: tuple[MatrixDescriptor, MatrixDescriptor],
        k_steps: range,
        accumulates: Expr,
    ) -> None:
        """Issue wgmmas of a K tile as one group; the first of them overwrite the sums unless `accumulates`."""


@dataclass
class AlternatingPromotion:
    """The wgmmas and promotions of the warpgroups that share a work tile."""

    mainloop: SteppedMainloop
    accumulators: Accumulators
    descriptors: tuple[MatrixDescriptor, MatrixDescriptor]
    pipeline: TmaPipeline
    state: PipelineState
    thread: ThreadPosition
    num_warpgroups: int
    _holds_stage: bool = field(default=False, init=False)  # whether the last K tile is issued, and not released

    def emit(self, warpgroup: Expr, num_k_tiles: int) -> None:
        """Multiply K tiles, of which there are as many in each work tile; run by all threads of a warpgroup."""
        self.accumulators.clear_promoted()
        for index in range(self.num_warpgroups):
            with if_(warpgroup == index):
                self._emit_warpgroup(index, num_k_tiles)

    def _emit_warpgroup(self, warpgroup: int, num_k_tiles: int) -> None:
        """Multiply all steps of a warpgroup; a loop has those after which promotions are at the same place again."""
        interval, steps_per_k_tile = self.mainloop.promotion_steps, len(self.mainloop.k_steps)
        first, total = interval * warpgroup // self.num_warpgroups, num_k_tiles * steps_per_k_tile
        first, period = min(first, total), math.lcm(interval, steps_per_k_tile)
        self._emit_intervals(warpgroup, 0, first)
        num_periods = (total - first) // period
        if num_periods > 1:
            with serial_loop(num_periods, "period"):
                self._emit_intervals(warpgroup, first, first + period)
            first += num_periods * period
        self._emit_intervals(warpgroup, first, total)

    def _emit_intervals(self, warpgroup: int, begin: int, end: int) -> None:
        """Multiply some steps of the reduction, and promote after each interval, of which the last may be shorter."""
        for first in range(begin, end, self.mainloop.promotion_steps):
            self._multiply(warpgroup, first, min(first + self.mainloop.promotion_steps, end))
            wgmma_wait_group(0)
            self._release_stage()
            self.accumulators.promote()

    def _multiply(self, warpgroup: int, begin: int, end: int) -> None:
        """Issue the wgmmas of some steps, as one group for each K tile; the first of them overwrite the sums.

        A stage is released as soon as its wgmmas are complete, while those of the next K tile are in flight.
        """
        mainloop, steps_per_k_tile, step = self.mainloop, len(self.mainloop.k_steps), begin
        while step < end:
            first = step % steps_per_k_tile
            last = min(steps_per_k_tile, first + end - step)
            if first == 0:
                mainloop.set_stage(self.descriptors, self.pipeline.stage_address(self.state.index), warpgroup)
                self.pipeline.consumer_wait(self.state.index, self.state.phase)
            steps = mainloop.k_steps[first:last]
            mainloop.issue(self.accumulators.registers, self.descriptors, steps, step > begin)
            if self._holds_stage:
                wgmma_wait_group(1)
                self._release_stage()
            if last == steps_per_k_tile:
                self.state.advance()
                self._holds_stage = True
            step += last - first

    def _release_stage(self) -> None:
        """Release the stage before the present one if its wgmmas are complete, and it is not released yet."""
        if self._holds_stage:
            self.pipeline.consumer_release(self.state.previous_index, self.thread)
        self._holds_stage = False
