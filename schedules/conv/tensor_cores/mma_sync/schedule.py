"""Convolution on tensor cores with each instruction emitted: mma.sync on tiles that cp.async copies k-tiles ahead.

It does what `tensor_core` does by rewriting. Emitting each instruction allows what rewriting cannot express:

- Copies of 16 bytes return zeros where the filter overhangs the image's border, without a branch. Copies of 8, 4 or 2
  bytes serve groups with fewer channels.
- A swizzle stores the 16-byte chunk c of row r at position c XOR r (modulo 8). The 8 rows that `ldmatrix` reads at a
  time, and the chunks that neighbouring threads store, then lie in distinct banks without padding.
- The fragments of the next mma are loaded while the tensor cores compute this one, also across k-tiles, with one
  barrier per k-tile.
- A bias is copied to shared memory during the mainloop. A residual initializes the accumulators or is added at the end
  (`residual_add`).
- The reduction of one output is split over warps (`warps_k`) and over blocks (`split_k`), for images of few pixels with
  many channels. The partial sums meet in the shared memory of a cluster (sm_90 and later), or in a workspace that a
  second kernel reads.
- An output that is channels first is staged with the pixels of a channel in a row, and stored in vectors of pixels. An
  input that is channels first is transposed in shared memory, once for all taps, or copied to an MN-major tile for
  filters of one tap (`input_loader`). Otherwise a launch of its own transposes it.
- A block computes several tiles in turn (`tiles_per_block`) if there are many: while it stores one tile, the operands
  of the next are being copied.

The operands are rows of the reduction, taps × channels, with channels last as in NHWC. The input operand, pixels ×
reduction, never exists in memory (implicit GEMM); the weight operand is channels × reduction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import EIGHT_BIT_DTYPES, FLOAT8_DTYPES, INT8, get_itemsize
from tvmconv.workloads.features import ALL_FEATURES
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

from ...layout_conversion import build_channels_last_schedule, estimate_input_conversion_us, skip_unread_pixels
from ..eight_bit_requirements import CHANNELS_LAST_EIGHT_BITS, PAIRED_EIGHT_BITS
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from ..space_to_depth import fold_filter_row_into_channels
from .input_loader import CONVERTED, INPUT_LOADER, list_input_loaders, rank_loader_defaults
from .kernel import emit_kernels
from .knobs import compute_usage, declare_knobs
from .tile_config import MMA_N, list_options

DTYPES = ("float16", "bfloat16", "tf32")  # those of gradients, too


def view(w: Conv) -> Conv:
    """Return the workload as the kernel views it: channels last, with lines of patches as channels.

    The conversion of a channels-first X leaves out pixels that no tap reads.
    """
    converted = skip_unread_pixels(w) if w.input_layout == CHANNELS_FIRST else w
    return fold_filter_row_into_channels(converted.to_channels_last())


def compute_layout_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use, with what the layout of X costs in their estimates."""
    fixed = {"stores_channels_first": w.output_layout == CHANNELS_FIRST}
    usage = compute_usage(view(w), columns, **fixed)
    assert usage.estimate is not None
    if INPUT_LOADER not in columns:
        usage.estimate = usage.estimate + estimate_input_conversion_us(w)
    channels_last = {name: column for name, column in columns.items() if name != INPUT_LOADER}
    channels_last_us: Any = compute_usage(view(w), channels_last, **fixed).estimate
    usage.layout_seconds = np.maximum(usage.estimate - channels_last_us, 0.0) * 1e-6
    return usage


def choose_loaders(w: Conv) -> tuple[str, ...]:
    """Return how X can be loaded; no values if there is no choice."""
    is_channels_first = w.input_layout == w.output_layout == CHANNELS_FIRST
    return list_input_loaders(view(w)) if is_channels_first and view(w) == w.to_channels_last() else ()


def list_starting_configs(w: Conv) -> list[dict[str, Any]]:
    """Return the best config of each other loader than that of the default."""
    loaders, names = choose_loaders(w), (*list_options(get_itemsize(w.storage)), INPUT_LOADER)
    ranking = rank_loader_defaults(view(w), loaders) if loaders else []
    return [{name: getattr(config, name) for name in names} for _, config in ranking[1:]]


def is_promising(w: Conv) -> bool:
    """Return whether there is one group, or each group fills 16-byte chunks and half an mma."""
    gemm = ImplicitGemmShape.from_workload(w)
    return gemm.groups == 1 or (gemm.channels_per_group * gemm.itemsize % VECTOR_BYTES == 0 and gemm.n >= MMA_N)


def stages_stats(w: Conv) -> bool:
    """Whether outputs with statistics are staged as they are stored: X is channels last, and there is no residual."""
    has_no_residual = all(operation.argument_kind != "output" for operation in w.argument_ops)
    return not w.returns_stats or (w.layout == CHANNELS_LAST and has_no_residual)


def has_accessible_tensors(w: Conv) -> bool:
    """Whether cached frames, upsampled inputs and more than 2^31 - 1 elements have 16 or 32 bits, channels last."""
    return not w.required_features or (w.layout == CHANNELS_LAST and w.dtype not in EIGHT_BIT_DTYPES)


OPERATORS = ("conv1d", "conv2d", "conv3d")
OPTIONS: dict[str, Any] = {  # of both schedules
    "usage": compute_layout_usage,
    "condition": all_of(CHANNELS_LAST_EIGHT_BITS, PAIRED_EIGHT_BITS, stages_stats, has_accessible_tensors),
    "search_if": is_promising,
    "starting_configs": list_starting_configs,
    "supersedes": ("direct", "implicit_gemm", "tensor_core"),
    "device_kinds": ("cuda",),
    "computes_stats": True,
}


@schedule(*OPERATORS, dtypes=(*DTYPES, INT8.name), min_arch=80, features=ALL_FEATURES, **OPTIONS)
def mma_sync(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Tile pixels × channels over blocks and warps, and pipeline the k-tiles of the reduction."""
    viewed_workload = view(w)
    stores_channels_first = w.output_layout == CHANNELS_FIRST
    config = declare_knobs(viewed_workload, k, stores_channels_first=stores_channels_first, loaders=choose_loaders(w))
    return build_channels_last_schedule(
        w,
        lambda arguments: emit_kernels(viewed_workload, config, arguments),
        converts_input=config.input_loader == CONVERTED,
        converts_output=False,
        skips_unread_pixels=True,
    )


@schedule(*OPERATORS, dtypes=FLOAT8_DTYPES, min_arch=89, **OPTIONS)
def mma_sync_fp8(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Do what `mma_sync` does, with 8-bit floats, whose sums are promoted to float32."""
    return mma_sync(s, w, k)
