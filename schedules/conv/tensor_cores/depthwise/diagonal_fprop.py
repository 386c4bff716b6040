"""Depthwise convolutions as products of octets of channels with diagonal matrices (`diagonals`).

The FMA units multiply and convert each element for each tap that reads it. Here a product of eight channels and 16
pixels has two taps, and no element is converted. Filters have at most 64 taps, which stay in registers. TMA copies
windows of X ahead of the warps that multiply.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv

from .diagonal_config import DiagonalConfig, fits_octets, is_promising
from .diagonals import build_diagonal_schedule


def has_octets(w: Conv) -> bool:
    """Whether the kernel can compute the layer."""
    is_plain = not (w.returns_stats or w.has_large_tensors or w.cached_frames) and max(w.upsampling) == 1
    return is_plain and w.storage == w.argument_dtypes[-1] and fits_octets(w)


@schedule(
    *("conv1d", "conv2d"),
    dtypes=("float16", "bfloat16"),
    usage=DiagonalConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_octets),
    search_if=is_promising,
    starting_configs=DiagonalConfig.list_starting_configs,
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_diagonal(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Multiply octets of channels of X at two taps by diagonal matrices of the filters, row by row of a window."""
    return build_diagonal_schedule(w, DiagonalConfig.declare_knobs(w, k))
