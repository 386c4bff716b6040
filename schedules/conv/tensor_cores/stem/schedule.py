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

from tvmconv.gpu_specs import REGISTERS_PER_MULTIPROCESSOR
from tvmconv.registry import schedule
from tvmconv.requirements import ONE_GROUP, Requirement, all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv2d

from ....tir_builder import build_schedule
from .default_config import (
    MAX_CTAS_CHOICES,
    PORTABLE_SHARED_BYTES,
    STAGES_CHOICES,
    list_block_n_choices,
    list_block_p_choices,
    list_default_candidates,
    list_warp_choices,
    select_default_config,
)
from .kernel import StemKernel
from .tile_config import StemTileConfig

DTYPES = ("float16", "bfloat16", "tf32")
MAX_CHANNELS = 8  # eight of 16 bits fill 16 bytes, and other schedules have nothing to lose
MAX_ACCUMULATORS = 128
MAX_UNROLLED_MMAS = 1024  # of a warp and tile, all of them unrolled
MAX_LIVE_REGISTERS = 160  # sums and weights of a thread, in registers
OVERHEAD_REGISTERS = 40  # of a thread besides these

FEW_CHANNELS = Requirement(
    f"at most {MAX_CHANNELS} input channels", lambda w: w.C <= MAX_CHANNELS, lambda w: f"{w.C} input channels"
)


def can_fit_shared_memory(w: Conv2d) -> bool:
    """Whether a tile and its weight have room in the shared memory of every GPU."""
    config = select_default_config(w)
    return bool(config.dynamic_smem_bytes <= PORTABLE_SHARED_BYTES) and bool(config.mmas_per_warp <= MAX_UNROLLED_MMAS)


def is_promising(w: Conv2d) -> bool:
    """Whether the channels do not fill 16 bytes, and shared memory has room for as many filters as there should be."""
    return w.C < MAX_CHANNELS and select_default_config(w).block_n == next(list_default_candidates(w)).block_n


def compute_usage(w: Conv2d, columns: Columns) -> ResourceUsage:
    """What configs use of a device."""
    return StemTileConfig.from_columns(w, columns).compute_usage()


@schedule(
    "conv2d",
    dtypes=DTYPES,
    usage=compute_usage,
    condition=all_of(ONE_GROUP, FEW_CHANNELS, can_fit_shared_memory),
    search_if=is_promising,
    supersedes=("mma_sync", "tensor_core", "direct", "implicit_gemm"),
    device_kinds=("cuda",),
    min_arch=80,
)
def stem(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """A tile is `rows` output rows × 16 columns for each of `warps` × `block_n` channels."""
    config = declare_knobs(w, k)
    return build_schedule(w, lambda arguments: StemKernel(config, arguments).emit())


def declare_knobs(w: Conv2d, k: Knobs) -> StemTileConfig:
    """The tile, from knobs; the defaults suit the workload on an H200."""
    default_config = select_default_config(w)
    config = StemTileConfig(
        w,
        block_p=k.choice("rows", list_block_p_choices(w), default_config.block_p),
        warps=k.choice("warps", list_warp_choices(w), default_config.warps),
        block_n=k.choice("block_n", list_block_n_choices(w), default_config.block_n),
        stages=k.choice("stages", STAGES_CHOICES, default_config.stages),
        max_ctas=k.choice("blocks", MAX_CTAS_CHOICES, default_config.max_ctas),
        weights_in_registers=k.choice("hold", (0, 1), default_config.weights_in_registers),
    )

    def make_config(columns: Columns) -> StemTileConfig:
        return StemTileConfig.from_columns(w, columns)

    k.require(
        f"a thread has at most {MAX_ACCUMULATORS} sums", lambda c: make_config(c).num_accumulators <= MAX_ACCUMULATORS
    )
    k.require(
        f"at most {MAX_UNROLLED_MMAS} mma of a warp are unrolled",
        lambda c: make_config(c).mmas_per_warp <= MAX_UNROLLED_MMAS,
    )
    k.require(
        f"a thread holds at most {MAX_LIVE_REGISTERS} sums and weights",
        lambda c: (
            (make_config(c).weights_in_registers == 0)
            | (make_config(c).num_accumulators + make_config(c).weight_registers <= MAX_LIVE_REGISTERS)
        ),
    )
    k.require(
        "all threads' registers fit",
        lambda c: (
            make_config(c).num_threads
            * (
                make_config(c).num_accumulators
                + np.where(make_config(c).weights_in_registers == 1, make_config(c).weight_registers, 0)
                + OVERHEAD_REGISTERS
            )
            <= REGISTERS_PER_MULTIPROCESSOR
        ),
    )
    k.prune(
        "a weight is held for several tiles",
        lambda c: (make_config(c).weights_in_registers == 0) | (make_config(c).tiles_per_cta > 1),
    )
    k.prune(
        "stages are filled",
        lambda c: (
            (make_config(c).stages == STAGES_CHOICES[0]) | (make_config(c).stages <= make_config(c).tiles_per_cta)
        ),
    )
    k.prune(
        "blocks fewer than tiles",
        lambda c: (
            (make_config(c).max_ctas == 0)
            | (make_config(c).max_ctas < make_config(c).num_pixel_tiles * make_config(c).num_channel_tiles)
        ),
    )
    return config
