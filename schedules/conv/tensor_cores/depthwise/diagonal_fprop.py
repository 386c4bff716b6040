"""Depthwise convolutions as products of octets of channels with diagonal matrices (`diagonals`)."""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv

from ....primitives import disable_buffer_reuse
from ....tir_builder import build_schedule
from .diagonal_config import DiagonalConfig, can_multiply_octets, is_promising
from .diagonals import emit_diagonals


@schedule(
    "conv2d",
    dtypes=("float16", "bfloat16"),
    usage=DiagonalConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, can_multiply_octets),
    search_if=is_promising,
    starting_configs=DiagonalConfig.list_starting_configs,
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_diagonal(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Multiply octets of channels of X at two taps by diagonal matrices of the filters, row by row of a window."""
    config = DiagonalConfig.declare_knobs(w, k)
    built = build_schedule(w, lambda arguments: emit_diagonals(config, arguments))
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built
