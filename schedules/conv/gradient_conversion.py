"""Channels-first gradients by channels-last kernels: arrays are transposed by launches of their own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

from tvm.s_tir import Schedule

from tvmconv.workloads.conv_gradient import DerivedConv, TransposedConv
from tvmconv.workloads.layout import CHANNELS_LAST

from ..primitives import disable_buffer_reuse, mark_constant_args
from ..tir_builder import Buffer, allocate, build_schedule
from .layout_conversion import emit_transpose

Gradient = TypeVar("Gradient", bound=DerivedConv)


def view_channels_last(w: Gradient) -> Gradient:
    """Return a gradient with the same sizes, channels last."""
    return dataclasses.replace(w, layout=CHANNELS_LAST)  # type: ignore[type-var]


def build_channels_last_gradient(
    w: DerivedConv,
    emit_kernels: Callable[[dict[str, Buffer]], None],
    *,
    converts_output: bool = True,
    prepare_filters: Callable[[Buffer], Buffer] | None = None,
) -> Schedule:
    """Return the schedule of kernels that compute a gradient channels last, with conversions if it is channels first.

    Each array (first, second, space) becomes (first, space, second), and the result is transposed back. Arrays with
    one second axis or one position in space are the same in both layouts.

    Args:
        w: The gradient or transposed convolution.
        emit_kernels: Function that emits the kernels; it receives buffers by name, all of them channels last.
        converts_output: Whether arrays of the shape of the result are converted; otherwise the kernels access them as
            they are.
        prepare_filters: Function that emits kernels that read a weight K, channels last, and returns what they store.
    """
    shapes = dict(zip(w.argument_names, w.argument_shapes, strict=True))
    has_constant_filters = isinstance(w, TransposedConv)
    if has_constant_filters:  # the kernels that convert them come first, and run once
        shapes = {"K": shapes["K"], **shapes}

    def emit(arguments: dict[str, Buffer]) -> None:
        converted, result = dict(arguments), list(arguments)[-1]
        for name, shape in shapes.items():
            is_constant = has_constant_filters and name == "K"
            is_kept = shape == shapes[result] and name not in w.OPERANDS and not converts_output
            is_converted = w.layout != CHANNELS_LAST and len(shape) > 2 and min(shape[1], math.prod(shape[2:])) > 1
            if is_converted and not is_kept:
                first, second, *space = shape
                dtype = str(arguments[name].dtype)
                converted[name] = allocate(f"{name}_last", (first, *space, second), dtype, "global")
                if name != result:
                    sizes = first, second, math.prod(space)
                    emit_transpose(arguments[name], converted[name], *sizes, waits=not is_constant)
            if is_constant and prepare_filters:
                converted[name] = prepare_filters(converted[name])
        if prepare_filters and not has_constant_filters:
            converted["K"] = prepare_filters(converted["K"])
        emit_kernels(converted)
        if converted[result] is not arguments[result]:
            images, channels, *space = shapes[result]
            emit_transpose(converted[result], arguments[result], images, math.prod(space), channels)

    schedule = build_schedule(w, emit)
    if has_constant_filters:
        mark_constant_args(schedule, "K")
    disable_buffer_reuse(schedule)  # TVM does not see the accesses of TMA
    return schedule
