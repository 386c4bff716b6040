"""Convolution on Hopper's tensor cores: a producer warp issues TMA copies, warpgroups multiply them from shared memory.

The kernel computes no operand addresses. TMA treats the input as an image and copies the pixels below one filter tap
(im2col mode); it handles padding, stride, dilation and the ends of rows and images. It copies rows of up to 128 bytes
of channels of both operands, in the swizzle that `wgmma` reads from shared memory. The roles of a CTA run concurrently
and signal full and empty stages by mbarriers in shared memory:

    producer, one thread               pipeline stages                 consumer warpgroups, 128 threads each
    for each k-tile (tap, channels):   +---------+---------+---        for each k-tile:
      wait until the stage is empty    | pixels  | pixels  | ...         wait until the stage is full
      TMA: pixels × channels    --->   | ------- | ------- |      --->   wgmma: accumulators += pixels × weights
      TMA: weights × channels   --->   | weights | weights | ...         release the previous stage
                                       +---------+---------+---        for each epilogue tile:
                                                                         epilogue; accumulators to shared memory
                                                                         TMA: epilogue tile to the output

- The grid is persistent: as many CTAs as the GPU runs at a time process work tiles in turn, and the next tile's
  operands are loaded while a tile is stored.
- Two warpgroups may compute tiles of their own in turn (ping-pong): one stores while the other multiplies. Producers
  then leave registers to consumers (`setmaxnreg`).
- CTAs of a cluster with neighbouring tiles share operands: each loads a slice, and TMA multicasts it to all of them.
- If tiles are few, the CTAs of a cluster split the reduction of one tile instead, and reduce partial sums through
  distributed shared memory.
- A residual is also loaded by TMA, into the epilogue stages that become the output. Biases are prefetched to shared
  memory.
- `griddepcontrol` lets the next launch start while this one ends (programmatic dependent launch).

Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", "Tensors: im2col mode",
"mbarrier"; NVIDIA CUTLASS, `sm90_mma_tma_gmma_ss_warpspecialized` (the roles).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, cast

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import EIGHT_BIT_DTYPES
from tvmconv.workloads.features import CACHED_FRAMES, LARGE_TENSORS
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

from ....tir_builder import Buffer, build_schedule
from ...layout_conversion import build_channels_last_schedule, skip_unread_pixels
from ..eight_bit_requirements import CHANNELS_LAST_EIGHT_BITS, PAIRED_EIGHT_BITS
from ..frame_product import FrameProduct
from ..gemm.channels_first_epilogue import ChannelsFirstOutput
from ..gemm.problem import make_frames
from ..space_to_depth import fold_filter_row_into_channels, split_filter_height
from .halo_kernel import emit_halo_kernel
from .input_loader import (
    add_input_loader_usage,
    declare_input_loader,
    list_input_loader_starting_configs,
    list_input_loaders,
    select_input_loader_default,
)
from .input_loader_latency import estimate_by_input_loader_us
from .kernel import emit_kernel
from .knobs import (
    can_keep_filters,
    compute_usage,
    declare_knobs,
    declare_output_knobs,
    require_channels_first_output,
)
from .latency import estimate_latency_us, select_default_config
from .plan import ChannelsFirstAccess
from .starting_configs import add_output_configs, list_starting_configs
from .tile_config import HALO_LOADERS, TMA, HopperTileConfig
from .tma_requirements import (
    WGMMA_M,
    can_load_by_tma,
    can_store_by_tma,
    choose_box_pixels,
    find_residual,
    has_large_output,
    is_promising,
    pad_planes,
)

if TYPE_CHECKING:
    from tvmconv.workloads import Conv3d

WIDE_DTYPES = ("float16", "bfloat16", "tf32")  # of 16 or 32 bits
DTYPES = (*WIDE_DTYPES, *EIGHT_BIT_DTYPES)


def view_for_tma(w: Conv) -> Conv:
    """Return the workload as TMA views it: the same arrays, with other axes if the filter positions do not overlap.

    With cached frames, each frame of the output is a product of its own.
    """
    if w.cached_frames:
        return cast("Conv", FrameProduct.from_workload(cast("Conv3d", w)))
    return split_filter_height(fold_filter_row_into_channels(w.to_channels_last()))


def can_load_view_by_tma(w: Conv) -> bool:
    """Whether TMA can copy the operands: channels of a group fill 16-byte chunks, and the filter fits TMA's offsets."""
    return can_load_by_tma(view_for_tma(w))


def has_accessible_tensors(w: Conv) -> bool:
    """Whether arrays with cached frames or over 2^31 - 1 elements have 16 or 32 bits, channels last, and TMA stores."""
    if w.reads_x_only and not w.has_large_tensors:
        return True
    if w.dtype in EIGHT_BIT_DTYPES:
        return False
    view = view_for_tma(w)
    return w.layout == CHANNELS_LAST and not w.returns_stats and (can_store_by_tma(view) or not has_large_output(view))


def stores_stats_by_tma(w: Conv) -> bool:
    """Whether TMA stores an output with statistics: X is channels last, and the epilogue has no residual."""
    view = view_for_tma(w)
    has_no_residual = all(operation.argument_kind != "output" for operation in w.argument_ops)
    return not w.returns_stats or (w.layout == CHANNELS_LAST and can_store_by_tma(view) and has_no_residual)


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=lambda w, c: add_input_loader_usage(compute_usage(view_for_tma(w), c), w, view_for_tma(w), c),
    condition=all_of(
        *(CHANNELS_LAST_EIGHT_BITS, PAIRED_EIGHT_BITS),
        *(has_accessible_tensors, can_load_view_by_tma, stores_stats_by_tma),
    ),
    search_if=lambda w: is_promising(view_for_tma(w)),
    starting_configs=lambda w: [
        *list_input_loader_starting_configs(w, view_for_tma(w)),
        *add_output_configs(
            w, list_starting_configs(view_for_tma(w), keeps_filters=can_keep_filters(w, view_for_tma(w)))
        ),
    ],
    supersedes=("direct", "implicit_gemm", "tensor_core"),
    device_kinds=("cuda",),
    exact_arch=90,
    computes_stats=True,
    features=(LARGE_TENSORS, CACHED_FRAMES),
)
def hopper(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Emit a producer, a pipeline of stages, consumer warpgroups, and TMA stores of the output."""
    viewed_workload = view_for_tma(w)
    has_wide_accumulators = w.output_layout != CHANNELS_FIRST or not find_residual(w)
    default = None if has_wide_accumulators else select_default_config(viewed_workload)
    loaders = list_input_loaders(w, viewed_workload)
    loader_default = select_input_loader_default(viewed_workload, loaders) if loaders else None
    estimate = estimate_by_input_loader_us if loaders else estimate_latency_us
    keeps_filters = can_keep_filters(w, viewed_workload)
    config = declare_knobs(viewed_workload, k, loader_default or default, estimate, keeps_filters=keeps_filters)
    if w.output_layout == CHANNELS_FIRST:
        require_channels_first_output(viewed_workload, k)
    if loaders:
        config = dataclasses.replace(config, **declare_input_loader(viewed_workload, k, loaders, loader_default))
    config = dataclasses.replace(config, **declare_output_knobs(w, k))
    if isinstance(viewed_workload, FrameProduct):
        return build_schedule(w, functools.partial(_emit_frames_kernel, viewed_workload, config))
    if config.input_loader in HALO_LOADERS:
        return build_channels_last_schedule(
            w,
            lambda arguments: emit_halo_kernel(viewed_workload, config, arguments),
            converts_input=False,
            converts_output=False,
        )
    access = _choose_access(w, viewed_workload, config)
    converts_input, product = not access.input_box_pixels, viewed_workload
    has_same_axes = viewed_workload == w.to_channels_last()
    skips_unread_pixels = converts_input and w.input_layout == CHANNELS_FIRST and has_same_axes
    if skips_unread_pixels:
        product = skip_unread_pixels(viewed_workload)
    elif access.input_pixels:
        product = pad_planes(viewed_workload) or viewed_workload
    return build_channels_last_schedule(
        w,
        lambda arguments: emit_kernel(product, config, arguments, access),
        converts_input=converts_input,
        converts_output=False,
        skips_unread_pixels=skips_unread_pixels,
    )


def _emit_frames_kernel(product: FrameProduct, config: HopperTileConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel of a convolution with cached frames."""
    problem = make_frames(product.volume, product.shape, config.taps_per_copy > 1)
    emit_kernel(cast("Conv", product), config, arguments, make_problem=lambda *_: problem)


def _choose_access(w: Conv, viewed_workload: Conv, config: HopperTileConfig) -> ChannelsFirstAccess:
    """Return the channels-first arrays that the kernel itself accesses; other channels-first arrays are converted."""
    reads_input = w.input_layout == CHANNELS_FIRST and config.cluster_n == 1
    stores_output = w.output_layout == CHANNELS_FIRST
    box_pixels = WGMMA_M if config.gathers_input else choose_box_pixels(viewed_workload)
    pixels = rows_per_image = 0
    if reads_input and stores_output and config.input_loader == TMA and (padded := pad_planes(viewed_workload)):
        pixels, rows_per_image = math.prod(viewed_workload.input_size), math.prod(padded.input_size)
        box_pixels = choose_box_pixels(padded)
    return ChannelsFirstAccess(
        box_pixels if reads_input else 0,
        pixels,
        ChannelsFirstOutput.from_workload(viewed_workload, rows_per_image) if stores_output else None,
    )
