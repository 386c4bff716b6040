"""Grouped convolution, channels last: a thread sums vectors of a group's few input channels for a few of its outputs.

Where groups are small, as in ResNeXt and RegNet, a tile of a matrix product has no room for its operands: each group is
a product of its own, of 4 to 32 channels by as many. A thread computes a vector of output channels of one group for a
strip of neighbouring pixels. In each step, of a row of the filter and a few input channels, it loads the lines of its
window in vectors, which the threads of the other outputs of the group load as well, by the same instructions; then for
each tap the weights of its outputs, and every weight is used for all pixels of the strip.

The weights of a block are turned around in shared memory, so that a thread reads those of its outputs as a vector; or
each thread loads them from global memory, a vector of input channels for each output.

From `depthwise_nhwc`, whose strips these are, of signals and volumes too: a sum over the channels of the group, a step
at a time, in a loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.s_tir import Schedule
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.workloads import Conv

from ..planes import Planes
from ..sums import DTYPES
from .grouped_plan import Plan, ask, usage
from .outputs import Outputs
from .window import Window
from .writing import Place, copy, local, loop, own_channel, program, stage_filters

FEW_CHANNELS = 32  # of a group: more had better be multiplied as matrices
FILLED = 16  # 16-bit channels that tensor cores multiply at a time: by these they take half as long (ResNeXt, RegNet)


def has_groups(w: Conv) -> bool:
    """Whether there are groups, of several input channels each."""
    return 1 < w.groups < w.C


def fills_matrices(w: Conv) -> bool:
    """Whether the channels of a group are as many as tensor cores multiply at a time."""
    return w.storage != "float32" and w.C // w.groups >= FILLED


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_groups),
    promising=lambda w: has_groups(w) and w.C // w.groups <= FEW_CHANNELS,
    supersedes=("direct", "implicit_gemm"),
    yields=fills_matrices,
)
def grouped_nhwc(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """A thread computes a vector of channels for a strip of pixels, (block, thread, local) of the rows and columns."""
    plan = ask(w, k)
    return program(w, plan.strip, lambda arrays, at: Writer(w, plan, arrays, at).write())


class Writer:
    """Writes what a thread does."""

    def __init__(self, w: Conv, plan: Plan, arrays: Mapping[str, Any], at: Place) -> None:
        self.w, self.plan, self.strip, self.at, self.K = w, plan, plan.strip, at, arrays["K"]
        self.depth, self.sizes = w.C // w.groups, Planes.of(w)
        self.channel = own_channel(self.strip, at)
        self.unrolled = w.kernel[-1] if plan.unrolled == "row" else 1  # columns of the filter
        self.outputs = Outputs(w, arrays, self.strip, at)
        rows = self.strip.rows.local
        self.input = Window(w, arrays["X"], self.strip, at, plan.depth, lines=rows, taps=self.unrolled)
        self.in_shared = plan.weight == "shared"
        order = (plan.depth, self.strip.vector) if self.in_shared else (self.strip.vector, plan.depth)
        self.weights = local("weights", order, w.storage)  # of a tap, as they are read: the vectors innermost

    def write(self) -> None:
        """Write all of it."""
        w, plan, rows = self.w, self.plan, self.strip.rows.local
        if self.in_shared:
            self.shared = stage_filters(w, self.strip, self.at, self.K)
        first = self.channel // (w.O // w.groups) * self.depth
        self.outputs.start()
        (_, stride, _), (_, *apart) = self.sizes.steps, self.sizes.dilations
        taps = self.sizes.all_taps // self.unrolled
        with loop("tap", taps, T.serial) as number, loop("step", self.steps, T.serial) as step:
            t, r, s = self._tap(number)
            for i in range(rows):
                line = i * stride + r * apart[0]
                self.input.load_line(i, t, line, first + step * plan.depth, s * apart[1])
            for column in range(self.unrolled):
                self.read_weights((t, r, s + column), step)
                for i in range(rows):
                    self.add(i, column)
        for i in range(rows):
            self.outputs.store(i)

    def _tap(self, number: Any) -> tuple[Any, Any, Any]:
        """Plane, row and column of the first of the taps that are unrolled together."""
        return self.sizes.tap(number) if self.plan.unrolled == "tap" else (*self.sizes.tap_row(number), 0)

    @property
    def steps(self) -> int:
        """Steps of a group's input channels."""
        return self.depth // self.plan.depth

    def read_weights(self, tap: tuple[Any, Any, Any], step: Any) -> None:
        """Read the weights of one tap and step."""
        vector, depth = self.strip.vector, self.plan.depth
        if self.in_shared:
            first = self.at.vector * vector - self.at.first
            with loop("d", depth) as d:
                at = self.sizes.number(tap) * self.depth + step * depth + d
                copy(vector, self.weights, lambda lane: (d, lane), lambda lane: self.shared[at, first + lane])
        else:
            with loop("channel", vector) as channel:
                copy(
                    depth,
                    self.weights,
                    lambda lane: (channel, lane),
                    lambda lane: self.K[self.sizes.place(self.channel + channel, tap, step * depth + lane)],
                )

    def add(self, i: int, column: int) -> None:
        """Add to the strip's row `i` the products of one of the unrolled columns of the filter."""
        columns, vector, depth = self.strip.columns.local, self.strip.vector, self.plan.depth
        with loop("d", depth) as d, loop("j", columns) as j, loop("channel", vector) as channel:
            x = self.input.held[i, self.input.place(j, column), d]
            weight = self.weights[d, channel] if self.in_shared else self.weights[channel, d]
            self.outputs.add(i, j, channel, x, weight)
