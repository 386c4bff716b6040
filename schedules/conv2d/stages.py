"""What all conv2d schedules share: the stages of the declaration, and the output axes that tiles are cut from."""

from __future__ import annotations

from typing import NamedTuple

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.workloads import Conv2d

from ..vocabulary import inline_consumers


def convolution(s: Schedule, w: Conv2d) -> SBlockRV:
    """The block that multiplies and accumulates; a grouped weight's view by group is inlined into it."""
    if w.groups == 1:
        return s.get_sblock("Y")
    s.compute_inline(s.get_sblock("weight"))
    return s.get_sblock("conv")


def accumulate_in_registers(s: Schedule, conv: SBlockRV) -> SBlockRV:
    """Give the convolution a local accumulator; returns the block that writes it to the output."""
    store = s.cache_write(conv, 0, "local")
    inline_consumers(s, store)
    return store


class Axes(NamedTuple):
    """The loops of a convolution; `outer` is the batch, fused with the groups, and the last three are the reduction."""

    outer: LoopRV
    channel: LoopRV
    height: LoopRV
    width: LoopRV
    rc: LoopRV
    rh: LoopRV
    rw: LoopRV


def axes(s: Schedule, w: Conv2d, conv: SBlockRV) -> Axes:
    """The loops of a convolution, whatever its groups.

    Where each group has one output channel (depthwise), the groups take the channels' place.
    """
    if w.groups == 1:
        return Axes(*s.get_loops(conv))
    n, g, o, *rest = s.get_loops(conv)
    if w.groups == w.O:
        s.reorder(o, g)
        return Axes(s.fuse(n, o), g, *rest)
    return Axes(s.fuse(n, g), o, *rest)


def tiled_channels(w: Conv2d) -> int:
    """The extent of the channel axis that `axes` returns."""
    return w.groups if w.groups == w.O else w.O // w.groups
