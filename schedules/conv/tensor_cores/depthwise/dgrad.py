"""Gradients of inputs of depthwise convolutions with large filters, as products with band matrices (`bands`).

The gradient is the convolution of dY with the flipped filter. A row of dX is a row of dY times a band matrix, which has
the taps of a filter row at their distance from the diagonal.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import InputGradient

from ....tir_builder import build_schedule
from ...gradient_operators import assign_roles
from .band_config import BandConfig, has_bands, has_large_filter
from .image_bands import emit_bands


@schedule(
    "conv2d_dgrad",
    dtypes=("float16", "bfloat16"),
    usage=BandConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_bands),
    search_if=has_large_filter,
    starting_configs=BandConfig.list_starting_configs,
    supersedes=("implicit_gemm",),
    device_kinds=("cuda",),
    min_arch=80,
)
def depthwise_mma_sync(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Multiply rows of dY with band matrices of the taps of a filter row, for each channel."""
    config = BandConfig.declare_knobs(w, k)
    return build_schedule(w, lambda arguments: emit_bands(config, assign_roles(w, arguments)))
