"""Gradients of inputs, and transposed convolutions, on Hopper's tensor cores: the kernel of `hopper`.

The gradient of stride 1 is a convolution of dY with other filters: its input channels are the weight's filters, its
output channels are the weight's channels, and taps are flipped. No filter is transposed in memory. TMA copies a box of
the weight as it is, channels × filters of the flipped tap, and `wgmma` reads it as an MN-major operand. All else, such
as clusters, split reductions, taps that share a copy, and epilogues, is that of `hopper`. wgmma does not transpose TF32
operands, so a launch of its own transposes the weight for them.

The gradients of other strides are several such convolutions, which `strided_dgrad` computes in one launch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

from ....primitives import keep_allocated_sizes
from ....tir_builder import Buffer
from ...gradient_conversion import build_channels_last_gradient, view_channels_last
from ...gradient_operators import DGRAD, TRANSPOSE
from ..filter_transposition import emit_transposed_filters
from ..gemm.channels_first_epilogue import ChannelsFirstOutput
from ..gemm.problem import make_dgrad
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from . import strided_dgrad
from .constraints import prune_narrow_boxes, require_whole_slices
from .kernel import emit_kernel
from .knobs import (
    can_keep_filters,
    compute_usage,
    declare_knobs,
    declare_output_knobs,
    require_channels_first_output,
)
from .latency import select_default_config
from .plan import ChannelsFirstAccess
from .starting_configs import add_output_configs, list_starting_configs
from .tile_config import HopperTileConfig
from .tma_requirements import can_load_by_tma, has_narrow_rows, is_promising

DTYPES = ("float16", "bfloat16", "tf32")


def can_load_gradient_by_tma(w: InputGradient) -> bool:
    """Whether TMA can copy both operands: channels of a group fill 16-byte chunks, and offsets are in its range."""
    conv = view_channels_last(w).direct_convolution
    if conv is None:
        return strided_dgrad.can_load_by_tma(w)
    shape = ImplicitGemmShape.from_workload(conv)
    return can_load_by_tma(conv) and shape.n * shape.itemsize % VECTOR_BYTES == 0


def compute_gradient_usage(w: InputGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    w = view_channels_last(w)
    conv = w.direct_convolution
    return compute_usage(conv, columns) if conv else strided_dgrad.compute_strided_usage(w, columns)


def is_gradient_promising(w: InputGradient) -> bool:
    """Return whether each group has enough input and output channels for wgmma, and rows are not narrow."""
    conv = view_channels_last(w).direct_convolution
    if conv is None:
        return strided_dgrad.is_promising(w)
    return is_promising(conv) and not has_narrow_rows(w.forward)


def can_keep_gradient_filters(w: InputGradient, conv: Conv) -> bool:
    """Return whether some CTAs may keep filters; see `can_keep_filters`.

    Args:
        w: The gradient or transposed convolution.
        conv: Its convolution of dY, channels last.
    """
    return w.layout == CHANNELS_LAST and can_keep_filters(conv, conv)


def list_gradient_starting_configs(w: InputGradient) -> list[dict[str, Any]]:
    """Return the configs with which a search starts; see `list_starting_configs`."""
    viewed = view_channels_last(w)
    conv = viewed.direct_convolution
    if conv is None:
        return strided_dgrad.list_strided_starting_configs(viewed)
    default, rules = select_default_config(conv, b_is_mn_major=True), [require_whole_slices(conv.storage)]
    configs = list_starting_configs(conv, default, rules=rules, keeps_filters=can_keep_gradient_filters(w, conv))
    return add_output_configs(conv, configs) if w.layout == CHANNELS_LAST else configs


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=DTYPES,
    usage=compute_gradient_usage,
    condition=can_load_gradient_by_tma,
    search_if=is_gradient_promising,
    starting_configs=list_gradient_starting_configs,
    supersedes=("mma_sync", "implicit_gemm", "tiling"),
    device_kinds=("cuda",),
    exact_arch=90,
)
def hopper(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Emit the kernel of the convolution of dY with transposed filters, one for each residue class of the stride."""
    dy, filters = w.OPERANDS
    roles = {dy: "X", filters: "K", w.RESULT: "Y"}
    viewed = view_channels_last(w)
    conv = viewed.direct_convolution
    if conv is None:
        config = strided_dgrad.declare_strided_knobs(viewed, k)
        emit = functools.partial(strided_dgrad.emit_strided_dgrad, viewed, config)
    else:
        keeps_filters = can_keep_gradient_filters(w, conv)
        config = declare_knobs(conv, k, b_is_mn_major=True, keeps_filters=keeps_filters)
        description, predicate = require_whole_slices(conv.storage)
        k.require(description, lambda c: predicate(HopperTileConfig.of_workload(c, conv)))
        if get_itemsize(w.storage) < ACCUMULATOR_BYTES:
            description, is_wide = prune_narrow_boxes(conv.O // conv.groups)
            k.prune(description, lambda c: is_wide(HopperTileConfig.of_workload(c, conv)))
        stores_pixels = w.layout == CHANNELS_FIRST
        if stores_pixels:
            require_channels_first_output(conv, k)
        else:
            config = dataclasses.replace(config, **declare_output_knobs(conv, k))
        access = ChannelsFirstAccess(output=ChannelsFirstOutput.from_workload(conv) if stores_pixels else None)
        emit = functools.partial(emit_kernel, conv, config, access=access, make_problem=make_dgrad)

    def emit_launches(arguments: dict[str, Buffer]) -> None:
        emit({roles.get(name, name): each for name, each in arguments.items()})

    has_wide_elements = get_itemsize(w.storage) == ACCUMULATOR_BYTES
    prepare = functools.partial(emit_transposed_filters, w.forward) if has_wide_elements else None
    built = build_channels_last_gradient(w, emit_launches, converts_output=conv is None, prepare_filters=prepare)
    if conv is None:
        keep_allocated_sizes(built)
    return built
