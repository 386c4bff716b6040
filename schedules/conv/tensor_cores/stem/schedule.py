"""First layers, of few channels, on tensor cores: input lines staged whole, with nothing copied per filter tap.

A first layer's channels fill no 16 bytes, which is what tensor-core convolutions copy at a time. But along a filter row
and its channels the input is contiguous in memory, in NHWC: the reduction (r, s·C + c) takes a run of each input line,
wherever the pixel is. So a block stages the input lines that its tile of the output sees as they are, once. Two
neighbouring elements of an mma's fragment are one 32-bit load from such a line, and every tap finds its operands there.
In NCHW the same is true of each channel's plane: the reduction is (c, r, s), and a line a row of one plane.

A word has two elements, of 16 bits, and a pixel may begin in the middle of one. That costs no instruction: the weight,
which is spread from memory to one row of words for each output channel, is shifted by an element, and the first word
meets an input that a zero multiplies. Where stride times channels is odd, every second pixel begins in the middle: a
warp's 16 pixels are then every second one, and there are two weights, for the warps of even and of odd pixels. Dilation
along a line is zeros as well. (Zeros that meet an infinite input make NaNs: a pixel beside the window, or between its
taps, has to be finite.)

- A warp computes 16 pixels of each of `rows` output rows and all channels of the tile: `mma.sync` m16n8k16, of TF32
  m16n8k8, with sums in float32. The weight's fragments come by `ldmatrix`, or stay in registers (`hold`).
- Blocks are persistent: each takes every so many-th tile, so that the weight is spread once a block, and the lines of
  the next tiles are on their way by `cp.async` while a tile is computed. Where lines begin at no multiple of four bytes
  (the width times the channels is odd), threads copy them word by word.
- A warp puts its outputs together in shared memory, with the epilogue applied in registers to the sums in float32, and
  stores them 16 bytes a thread where the channels fill these; a residual comes the same way. A sum begins with its
  bias.

Bank conflicts: a fragment's load is of eight pixels' words, four each. Three choices are made by counting, so that few
loads conflict: whether the pixels are neighbours or every second one, how far lines are apart, and in which order the
reduction has its words. Four words of one line are free of conflicts for steps of one to four words and of six from
pixel to pixel; a line's last words, which are no four, share a load with those of other lines if that makes no more
products than necessary. With the lines well apart that is free of conflicts for three channels at any odd step, in 7×7
and in 3×3 filters. What is left are 4×4/4 (two of six loads are of two wavefronts), wider steps, and TF32's.

Sources: PTX ISA, "Matrix Fragments for mma.m16n8k16", "ldmatrix", "cp.async".
"""

from __future__ import annotations

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.gpu import REGISTERS
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.requirements import ONE_GROUP, Requirement, all_of
from tvmconv.workloads import Conv2d

from ....program import write
from .defaults import BLOCKS, SHARED_BYTES, STAGES, channel_choices, default, row_choices, sensible, warp_choices
from .program import Program
from .tile import Tile

DTYPES = ("float16", "bfloat16", "tf32")
MAX_CHANNELS = 8  # eight of 16 bits fill 16 bytes, and other schedules have nothing to lose
MAX_ACCUMULATORS = 128
MAX_PRODUCTS = 1024  # of a warp and tile, all of them unrolled
MAX_HELD = 160  # sums and weights of a thread, in registers
OWN_REGISTERS = 40  # of a thread besides these

FEW_CHANNELS = Requirement(
    f"at most {MAX_CHANNELS} input channels", lambda w: w.C <= MAX_CHANNELS, lambda w: f"{w.C} input channels"
)


def fits(w: Conv2d) -> bool:
    """Whether a tile and its weight have room in the shared memory of every GPU."""
    tile = default(w)
    return bool(tile.shared_bytes <= SHARED_BYTES) and bool(tile.products <= MAX_PRODUCTS)


def promising(w: Conv2d) -> bool:
    """Whether the channels do not fill 16 bytes, and shared memory has room for as many filters as there should be."""
    return w.C < MAX_CHANNELS and default(w).block_n == next(sensible(w)).block_n


def usage(w: Conv2d, c: Columns) -> Usage:
    """What configs use of a device."""
    return Tile.of_columns(w, c).usage()


@schedule(
    "conv2d",
    dtypes=DTYPES,
    usage=usage,
    condition=all_of(ONE_GROUP, FEW_CHANNELS, fits),
    promising=promising,
    supersedes=("mma_sync", "tensor_core", "direct", "implicit_gemm"),
    kinds=("cuda",),
    since=80,
)
def stem(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """A tile is `rows` output rows × 16 columns for each of `warps` × `block_n` channels."""
    tile = ask(w, k)
    return write(w, lambda arguments: Program(tile, arguments).write())


def ask(w: Conv2d, k: Knobs) -> Tile:
    """The tile, from knobs; the defaults suit the workload on an H200."""
    best = default(w)
    tile = Tile(
        w,
        rows=k.choice("rows", row_choices(w), best.rows),
        warps=k.choice("warps", warp_choices(w), best.warps),
        block_n=k.choice("block_n", channel_choices(w), best.block_n),
        stages=k.choice("stages", STAGES, best.stages),
        blocks=k.choice("blocks", BLOCKS, best.blocks),
        hold=k.choice("hold", (0, 1), best.hold),
    )

    def of(c: Columns) -> Tile:
        return Tile.of_columns(w, c)

    k.condition(f"a thread has at most {MAX_ACCUMULATORS} sums", lambda c: of(c).accumulators <= MAX_ACCUMULATORS)
    k.condition(f"at most {MAX_PRODUCTS} mma of a warp are unrolled", lambda c: of(c).products <= MAX_PRODUCTS)
    k.condition(
        f"a thread holds at most {MAX_HELD} sums and weights",
        lambda c: (of(c).hold == 0) | (of(c).accumulators + of(c).weight_registers <= MAX_HELD),
    )
    k.condition(
        "all threads' registers fit",
        lambda c: (
            of(c).threads * (of(c).accumulators + np.where(of(c).hold == 1, of(c).weight_registers, 0) + OWN_REGISTERS)
            <= REGISTERS
        ),
    )
    k.search_only("a weight is held for several tiles", lambda c: (of(c).hold == 0) | (of(c).rounds > 1))
    k.search_only("stages are filled", lambda c: (of(c).stages == STAGES[0]) | (of(c).stages <= of(c).rounds))
    k.search_only(
        "blocks fewer than tiles", lambda c: (of(c).blocks == 0) | (of(c).blocks < of(c).tiles * of(c).channel_tiles)
    )
    return tile
