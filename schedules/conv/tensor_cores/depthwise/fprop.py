"""Depthwise convolutions with large filters, as products with band matrices (`bands`).

A row of Y is a row of X times a band matrix, which has the taps of a filter row at their distance from the diagonal.
Channels are first or last in X and in Y.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

from ....tir_builder import build_schedule
from .band_config import BandConfig, has_bands, has_large_filter
from .image_bands import emit_bands


def has_one_layout(w: Conv) -> bool:
    """Return whether X and Y are both channels last, or both channels first."""
    return w.layout in (CHANNELS_LAST, CHANNELS_FIRST)


@schedule(
    "conv2d",
    dtypes=("float16", "bfloat16"),
    usage=BandConfig.compute_usage,
    condition=all_of(has_one_layout, has_bands),
    search_if=has_large_filter,
    starting_configs=BandConfig.list_starting_configs,
    device_kinds=("cuda",),
    min_arch=80,
)
def depthwise_mma_sync(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Multiply rows of X with band matrices of the taps of a filter row, for each channel."""
    config = BandConfig.declare_knobs(w, k)
    return build_schedule(w, lambda arguments: emit_bands(config, arguments))
