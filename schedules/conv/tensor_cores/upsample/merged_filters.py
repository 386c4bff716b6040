"""Filters of an upsampled input, whose taps that read the same element are added before.

Let the input be upsampled by a factor f along an axis, u[i] = x[i // f]. The output p of a convolution of u of stride 1
adds u[p + r - pad] · K[r]. All taps r with the same (p + r - pad) // f read the same element of x, and which ones these
are depends on p modulo f. This is a transposed convolution of x with stride f, of R + f - 1 taps, each of them the sum
of up to f taps of K:

    K'[t] = sum over d in 0, ..., f - 1 of K[R - 1 + d - t], where that exists

Its padding is R - 1 - pad. Each output then reads ceil((R + f - 1) / f) instead of R elements along the axis: 4 instead
of 9 for filters of 3×3 and a factor of 2. The sums are rounded to the dtype of the weight.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, cast

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import Conv, operators
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.features import UPSAMPLING
from tvmconv.workloads.layout import CHANNELS_LAST

from ....tir_builder import Buffer, Expr, allocate, logical_and, store, thread_per_item

THREADS_PER_CTA = 256


def is_merging_useful(w: Conv) -> bool:
    """Whether the input is upsampled, strides are 1, upsampled axes have no dilation, and arrays are channels last."""
    axes = zip(w.upsampling, w.dilation, w.window, w.pad_low, w.pad_high, strict=True)
    return (
        UPSAMPLING in w.required_features
        and not w.cached_frames
        and not w.returns_stats
        and w.layout == CHANNELS_LAST
        and max(w.stride) == 1
        and all(
            (factor == 1 or dilation == 1) and max(low, high) < window for factor, dilation, window, low, high in axes
        )
    )


@functools.lru_cache(maxsize=256)
def make_transposed(w: Conv) -> InputGradient:
    """Return the transposed convolution with merged filters that a convolution of an upsampled input is."""
    kernel = [taps + factor - 1 for taps, factor in zip(w.kernel, w.upsampling, strict=True)]
    padding = [
        window - 1 - pad for sides in (w.pad_low, w.pad_high) for window, pad in zip(w.window, sides, strict=True)
    ]
    make_convolution: Callable[..., Any] = operators()[f"{w.operator}_transpose"]
    sizes = dict(zip((*w.SPACE, *w.KERNEL), (*w.x_size, *kernel), strict=True))
    names = ("N", "C", "O", "dilation", "groups", "dtype", "layout", "epilogue")
    options = {name: getattr(w, name) for name in names} | {"stride": w.upsampling, "padding": tuple(padding)}
    return cast("InputGradient", make_convolution(**sizes, **options))


def emit_merged_filters(w: Conv, filters: Buffer, *, channels_last: bool) -> Buffer:
    """Emit the sums of taps, and return the filters of the transposed convolution in a workspace.

    Args:
        w: The convolution.
        filters: Its weight (O, taps, C / groups).
        channels_last: Whether the result is (taps, O / groups, C) instead of (C, taps, O / groups).
    """
    transposed = make_transposed(w)
    taps, outputs = math.prod(transposed.kernel), w.O // w.groups
    merged = allocate("K_merged", w.C * taps * outputs, w.storage, "global")
    total = allocate("total", 1, "float32")
    with thread_per_item(w.C * taps * outputs, THREADS_PER_CTA) as item:
        if channels_last:
            tap_idx, output, channel = item // (outputs * w.C), item // w.C % outputs, item % w.C
        else:
            channel, tap_idx, output = item // (taps * outputs), item // outputs % taps, item % outputs
        filter_idx = channel // (w.C // w.groups) * outputs + output
        kernel = transposed.kernel
        merged_tap = [tap_idx // math.prod(kernel[axis + 1 :]) % size for axis, size in enumerate(kernel)]
        store(total, 0, T.float32(0))
        for offsets in itertools.product(*map(range, w.upsampling)):
            taps_of_filter = [
                size - 1 + offset - tap for size, offset, tap in zip(w.kernel, offsets, merged_tap, strict=True)
            ]
            index = filter_idx, *taps_of_filter, channel % (w.C // w.groups)
            element = filters[index]
            value = T.if_then_else(_is_inside(w, taps_of_filter), T.Cast("float32", element), T.float32(0))
            store(total, 0, total[0] + value)
        store(merged, item, T.Cast(w.storage, total[0]))
    return merged


def _is_inside(w: Conv, taps: list[Expr]) -> Expr:
    """Return whether a tap of the filter exists."""
    checks = [(tap >= 0, tap < size) for tap, size in zip(taps, w.kernel, strict=True)]
    return logical_and(*itertools.chain.from_iterable(checks))
