"""First layers of few channels on tensor cores: input rows are staged whole, with no copy per filter tap.

The channels of a first layer fill less than 16 bytes, the size of the copies of other tensor-core convolutions. In
NHWC, however, a filter row with its channels covers contiguous input: the reduction (r, s·C + c) reads a run of each
input row, for any pixel. A block therefore copies the input rows of its tile to shared memory once and unchanged. Two
neighbouring elements of an mma fragment are one 32-bit load from such a row, for every tap. In NCHW the same holds for
each channel's plane: the reduction is (c, r, s), and a memory row is a row of one plane.

A signal is one row, and an image one plane. A volume has a window of several planes below each output plane, and each
tap along the depth is a plane of the reduction, as each channel is in NCHW.

A word holds two 16-bit elements, and a pixel may start in the middle of a word. This costs no instruction: the weight,
which is spread to one row of words per output channel, is shifted by one element, and a zero of the weight multiplies
the extra input. If stride times channels is odd, every second pixel starts in the middle of a word. A warp's 16 pixels
are then every second pixel, and there are two weights, for the warps of even and of odd pixels. Dilation along a row
also becomes zeros in the weight. Because a zero times an infinite input is NaN, pixels beside the window or between its
taps must be finite.

- A warp computes 16 pixels of each of `block_p` output rows and all channels of the tile by `mma.sync` m16n8k16
  (m16n8k8 for TF32), with float32 accumulators. `ldmatrix` loads the weight fragments, which can stay in registers
  (`weights_in_registers`).
- The grid is persistent: each block computes tiles at a fixed interval. The weight is spread once per block, and
  `cp.async` copies the input rows of the next tiles while a tile is computed. Rows that do not start at multiples of
  four bytes (width times channels is odd) are copied word by word.
- A warp applies the epilogue to the float32 accumulators in registers, arranges its outputs in shared memory, and
  stores 16 bytes per thread if the channels allow it. A residual is loaded the same way. Accumulators start with the
  bias.

Bank conflicts: one fragment load reads four words of each of eight pixels. Three choices are made by counting
conflicts: whether the pixels are neighbours or every second pixel, the distance between rows, and the order of the
words of the reduction. Four words of one row have no conflicts for pixel distances of one to four words and of six
words. The last words of a row, fewer than four, share a load with those of other rows if that needs no additional
product. With suitable row distances, this has no conflicts for three channels at any odd stride, for 7×7 and 3×3
filters. Conflicts remain for 4×4 filters with stride 4 (two of six loads need two wavefronts), larger strides, and
TF32.

Sources: PTX ISA, "Matrix Fragments for mma.m16n8k16", "ldmatrix", "cp.async".
"""

from __future__ import annotations

import functools

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import ONE_GROUP, Requirement, all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import PORTABLE_SHARED_BYTES, REGISTERS_PER_MULTIPROCESSOR
from tvmconv.workloads import Conv, Conv3d

from ....tir_builder import build_schedule
from ...tile_config import Rule, add_rules, declare_choices
from .default_config import (
    STAGES_CHOICES,
    list_default_candidates,
    list_options,
    select_default_config,
)
from .kernel import emit_kernel
from .tile_config import StemTileConfig
from .volume_view import view_as_volume

DTYPES = ("float16", "bfloat16", "tf32")
MAX_CHANNELS = 8  # eight 16-bit channels fill 16 bytes, which other schedules copy efficiently
MAX_ACCUMULATORS = 128
MAX_UNROLLED_MMAS = 1024  # per warp and tile
MAX_LIVE_REGISTERS = 160  # registers per thread for accumulators and weights
OVERHEAD_REGISTERS = 40  # other registers per thread

FEW_CHANNELS = Requirement(
    f"at most {MAX_CHANNELS} input channels", lambda w: w.C <= MAX_CHANNELS, lambda w: f"{w.C} input channels"
)


def can_fit_shared_memory(w: Conv) -> bool:
    """Whether a tile and its weight fit into the shared memory of every GPU."""
    config = select_default_config(view_as_volume(w))
    return bool(config.dynamic_smem_bytes <= PORTABLE_SHARED_BYTES) and bool(config.mmas_per_warp <= MAX_UNROLLED_MMAS)


def is_promising(w: Conv) -> bool:
    """Return whether channels fill less than 16 bytes and shared memory holds half of the preferred filters."""
    viewed = view_as_volume(w)
    preferred = next(list_default_candidates(viewed))
    return w.C < MAX_CHANNELS and 2 * select_default_config(viewed).block_n >= preferred.block_n


def compute_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    return StemTileConfig.from_columns(columns, w=view_as_volume(w)).compute_usage()


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=compute_usage,
    condition=all_of(ONE_GROUP, FEW_CHANNELS, can_fit_shared_memory),
    search_if=is_promising,
    supersedes=("mma_sync", "tensor_core", "direct", "implicit_gemm"),
    device_kinds=("cuda",),
    min_arch=80,
)
def stem(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Compute tiles of `block_p` output rows × 16 columns per warp × `block_n` channels."""
    config = declare_knobs(view_as_volume(w), k)
    return build_schedule(w, lambda arguments: emit_kernel(config, arguments))


def declare_knobs(w: Conv3d, k: Knobs) -> StemTileConfig:
    """Declare the knobs, with defaults that suit the workload on an H200, and return their values."""
    values = declare_choices(k, list_options(w), select_default_config(w))
    add_rules(k, functools.partial(StemTileConfig.from_columns, w=w), REQUIREMENTS, PRUNINGS)
    return StemTileConfig(w, **values)


REQUIREMENTS: list[Rule] = [
    (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
    (
        f"at most {MAX_UNROLLED_MMAS} unrolled mma instructions per warp",
        lambda t: t.mmas_per_warp <= MAX_UNROLLED_MMAS,
    ),
    (
        f"at most {MAX_LIVE_REGISTERS} registers per thread for accumulators and weights",
        lambda t: (t.weights_in_registers == 0) | (t.num_accumulators + t.weight_registers <= MAX_LIVE_REGISTERS),
    ),
    (
        "the registers of all threads fit",
        lambda t: (
            t.num_threads * (t.num_accumulators + t.weights_in_registers * t.weight_registers + OVERHEAD_REGISTERS)
            <= REGISTERS_PER_MULTIPROCESSOR
        ),
    ),
]
PRUNINGS: list[Rule] = [
    (
        "weights stay in registers only for several tiles per block",
        lambda t: (t.weights_in_registers == 0) | (t.tiles_per_cta > 1),
    ),
    (
        "there are at most as many stages as tiles per block",
        lambda t: (t.stages == STAGES_CHOICES[0]) | (t.stages <= t.tiles_per_cta),
    ),
    (
        "there are fewer blocks than tiles",
        lambda t: (t.max_ctas == 0) | (t.max_ctas < t.num_pixel_tiles * t.num_channel_tiles),
    ),
]
